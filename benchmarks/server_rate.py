"""What `outrider evaluate` says and what the server gives: the same prompts, in turn, in one run.

    python benchmarks/server_rate.py [--k 0 3 own] [--temperature 0] [-- ARGUMENTS OF SERVE]

One stream. Each prompt goes to evaluate's engine and to the server over HTTP within seconds, the
one first and then the other; exit status 1 if their tokens a second are more than 5% apart. With
`--beside` all of it stands next to a process that keeps one core busy, whose own pace is shown too.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from serving import Serving, serving
from transformers import AutoTokenizer

from outrider.engine.api import SamplingParams, ignore_progress
from outrider.engine.config import EngineConfig
from outrider.engine.processes.process_engine import ProcessEngine
from outrider.server.config.settings_loader import load_settings
from outrider.server.evaluation.measure import RAW, SHORT, as_messages, held_out_prompts, run
from outrider.server.models.pair import engine_config, prepare_pair

TOLERANCE = 0.05
# Every prompt is asked several times: a prefix that was found would spare the later ones work.
NO_PREFIXES = "cache.prefix_caching=false"


def config_and_prompts(
    categories: list[str], per_category: int
) -> tuple[EngineConfig, list[list[int]]]:
    settings = load_settings(assignments=[NO_PREFIXES])
    pair = prepare_pair(settings, ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    prompts = [
        tokenizer(turns[0])["input_ids"]
        if category == RAW
        else tokenizer.apply_chat_template(as_messages(turns), add_generation_prompt=True)[
            "input_ids"
        ]
        for category, of_category in held_out_prompts().items()
        if category in categories
        for turns in of_category[:per_category]
    ]
    return engine_config(pair), prompts


async def over_http(
    client: httpx.AsyncClient, prompt: list[int], params: SamplingParams
) -> tuple[int, float]:
    """Tokens, and the seconds from the request to its whole answer."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "speculation": {"verification": params.verification},
    }
    if params.num_speculative_tokens is not None:
        body["speculation"]["num_speculative_tokens"] = params.num_speculative_tokens
    start_s = time.perf_counter()
    answer = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - start_s
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"], seconds


async def in_turn(
    server: Serving, config: EngineConfig, prompts: list[list[int]], args: argparse.Namespace
) -> dict[tuple[str, str], float]:
    """Tokens a second by way and k."""
    ks = {named: None if named == "own" else int(named) for named in args.k}
    counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    engine = ProcessEngine(config)
    await engine.start()
    try:
        url = f"http://{server.host}:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for i, prompt in enumerate([prompts[0], *prompts]):
                for named, k in ks.items():
                    params = SamplingParams(
                        max_tokens=args.max_tokens,
                        temperature=args.temperature,
                        seed=i,
                        # As without a seed: with one alone the server takes `match`.
                        verification=config.speculation.verification,
                        num_speculative_tokens=k,
                    )
                    for way in ("evaluate", "server")[:: 1 if i % 2 else -1]:
                        if way == "server":
                            tokens, seconds = await over_http(client, prompt, params)
                        else:
                            tally = await run(engine, prompt, params)
                            tokens, seconds = tally.num_tokens, tally.seconds
                        if i > 0:  # the first is warm-up
                            counts[way, named][0] += tokens
                            counts[way, named][1] += seconds
    finally:
        await engine.stop()
    return {key: tokens / seconds for key, (tokens, seconds) in counts.items()}


def _keep_busy(loops: Any) -> None:
    while True:
        for _ in range(100_000):
            pass
        loops.value += 100_000


@contextmanager
def neighbour() -> Iterator[Any]:
    """A process that keeps one core busy; counts its loops."""
    loops = multiprocessing.Value("q", 0, lock=False)
    process = multiprocessing.Process(target=_keep_busy, args=(loops,), daemon=True)
    process.start()
    try:
        yield loops
    finally:
        process.kill()


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--k", nargs="+", default=["0", "3", "own"])
    parser.add_argument("--categories", nargs="+", default=SHORT, help="as in evaluate")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--beside", action="store_true")
    args = parser.parse_args(sys.argv[1:at])
    config, prompts = config_and_prompts(args.categories, args.per_category)
    log = Path(tempfile.mkdtemp(prefix="outrider-rate-")) / "serve.log"
    with serving(log, ["--set", NO_PREFIXES, *sys.argv[at + 1 :]]) as server:
        if args.beside:
            with neighbour() as loops:
                start_s = time.perf_counter()
                rates = asyncio.run(in_turn(server, config, prompts, args))
                pace = loops.value / 1e6 / (time.perf_counter() - start_s)
        else:
            rates = asyncio.run(in_turn(server, config, prompts, args))
    table = Table("k", "evaluate, tokens/s", "server, tokens/s", "server / evaluate")
    agree = True
    for named in args.k:
        evaluate, server_rate = rates["evaluate", named], rates["server", named]
        ratio = server_rate / evaluate
        agree &= abs(ratio - 1) <= TOLERANCE
        table.add_row(named, f"{evaluate:.1f}", f"{server_rate:.1f}", f"{ratio:.3f}")
    console = Console()
    console.print(table)
    if args.beside:
        console.print(f"the neighbour: {pace:.1f} million loops/s")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
