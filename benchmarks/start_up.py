"""Where the time of a start goes, stage by stage, for a target that ranks share or not.

    python benchmarks/start_up.py [--ranks 2 2 1] [--layers 80] [--draft-layers 16] [--width 1024]

Target and draft have random weights: as many layers as a 70B and a 1B, each narrow, so that the
time is the host's. The first start may find a cold cache of kernels. Of the graphs it says how many
passes the host of this rank made, and how long these took; the other ranks make the target's, too.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_model import save_random_model

from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.learning import learn_costs
from outrider.engine.state import phase


class Graphs:
    """What capturing took, in seconds of the host."""

    def __init__(self) -> None:
        self.num_captures, self.num_passes = 0, 0
        self.eager_s, self.captured_s, self.around_s = 0.0, 0.0, 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_captures} captures, {self.num_passes} passes: {self.eager_s:.1f} s eager, "
            f"{self.captured_s:.1f} s captured, {self.around_s:.1f} s around them"
        )

    def counting(self, record: Callable[..., Any]) -> Callable[..., Any]:
        """`record_graph`, noted here."""

        def counted(run: Callable[[], Any], *args: Any, **options: Any) -> Any:
            spent = []

            def timed() -> Any:
                begin = time.perf_counter()
                output = run()
                spent.append(time.perf_counter() - begin)
                return output

            begin = time.perf_counter()
            recorded = record(timed, *args, **options)
            self.num_captures += 1
            self.num_passes += len(spent)
            self.eager_s += sum(spent[:-1])
            self.captured_s += spent[-1]
            self.around_s += time.perf_counter() - begin - sum(spent)
            return recorded

        return counted


def start(config: EngineConfig) -> None:
    graphs, stages, begin = Graphs(), list[str](), time.perf_counter()
    record = phase.record_graph
    phase.record_graph = graphs.counting(record)

    def report(stage: str, done: int, total: int) -> None:
        if stages[-1:] != [stage]:
            stages.append(stage)
            print(f"{time.perf_counter() - begin:7.1f} s  {stage}", flush=True)

    engine = Engine(config, report)
    learn_costs(engine, report)
    print(f"{time.perf_counter() - begin:7.1f} s  all; {graphs}", flush=True)
    engine.worker.close()
    phase.record_graph = record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 2, 1])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--draft-layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("target", "draft")}
        for path, num_layers in zip(paths.values(), (args.layers, args.draft_layers), strict=True):
            path.mkdir()
            save_random_model(path, num_layers, width=args.width, inner=2 * args.width)
        for num_ranks in args.ranks:
            print(f"{num_ranks} ranks" if num_ranks > 1 else "one process", flush=True)
            target = ModelConfig(path=str(paths["target"]), tensor_parallel=num_ranks)
            draft = ModelConfig(path=str(paths["draft"]))
            start(EngineConfig(target=target, draft=draft, device=device))


if __name__ == "__main__":
    main()
