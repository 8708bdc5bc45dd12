"""Tokens a second of a pair, and where a step's time goes, by batch size and k.

    python benchmarks/engine.py TARGET DRAFT [--batch 1 8 32 64] [--k 0 4] [--best-of 8]

Needs torch, triton and transformers only. Prompts are random token ids, 128 of them, and 256 tokens
are decoded, as in the tables of other engines this is compared with. One engine serves all k, which
every request names for itself; the best k of each line is found by measuring all up to --best-of.

The floor is that of the weights that a step reads once. Draft, target and verify are timed one
after the other, so that what the step takes less than their sum is host time that the GPU hid.
Idle is the share of a stretch of steps that the GPU, in a profile of its kernels, waited for the
host: gaps of 5 us and more, since a graph leaves up to 2 us between any two of its kernels.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from step_parts import timed_parts
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.loop import Engine
from outrider.engine.paged_model import PagedModel

PARTS = {"draft": "propose", "target": "score", "verify": "verify"}
PAGE_TOKENS = 16
HOST_GAP_US = 5.0
SEARCH_TOKENS = 64  # decoded for each k that is tried
PARTS_TOKENS = 64  # decoded while parts and idle time are measured
PROFILED_STEPS = 6


def build(args: argparse.Namespace) -> Engine:
    k = max(*args.k, args.best_of)
    # As many as the batches need: counting what fits would take a step of its own at every start.
    longest = args.prompt_tokens + max(args.new_tokens, PARTS_TOKENS) + 4 * (k + 1)
    num_pages = 1 + max(args.batch) * (longest // PAGE_TOKENS + 1)
    return Engine(
        EngineConfig(
            target=ModelConfig(path=args.target, dtype=args.dtype),
            draft=ModelConfig(path=args.draft, dtype=args.dtype) if k else None,
            device=args.device,
            enforce_eager=args.enforce_eager,
            max_model_len=longest,
            cache=CacheConfig(
                page_size_tokens=PAGE_TOKENS, num_pages=num_pages, prefix_caching=False
            ),
            scheduler=SchedulerConfig(max_num_seqs=max(args.batch), max_num_batched_tokens=8192),
            speculation=SpeculationConfig(num_speculative_tokens=k, adaptive=False),
        )
    )


class Measured:
    """Batches of one size, temperature and k, in an engine that does nothing else."""

    def __init__(
        self, engine: Engine, batch: int, temperature: float, k: int, prompt_tokens: int
    ) -> None:
        self._engine = engine
        self._batch = batch
        self._temperature = temperature
        self._k = k
        self._prompt_tokens = prompt_tokens
        self.tokens_per_s = self.step_s = self.acceptance = 0.0

    def decode(self, new_tokens: int) -> None:
        """Decode a batch to its end; the clock starts once the prompts are computed."""
        self._start(new_tokens)
        before = self._engine.stats()
        start_s = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        spent_s = time.perf_counter() - start_s
        after = self._engine.stats()
        drafted = sum(after.drafted_per_position) - sum(before.drafted_per_position)
        accepted = sum(after.accepted_per_position) - sum(before.accepted_per_position)
        self.tokens_per_s = (after.generation_tokens - before.generation_tokens) / spent_s
        self.step_s = spent_s / (after.steps - before.steps)
        self.acceptance = accepted / max(1, drafted)

    def parts(self) -> tuple[dict[str, float], float | None]:
        """Median seconds of each part alone, and the GPU's idle share of steps as they come."""
        self._start(PARTS_TOKENS)
        on_gpu = self._engine.info.device != "cpu"
        idle = idle_share(self._engine) if on_gpu else None
        with timed_parts(self._engine, synchronize=on_gpu) as spent:
            while self._engine.has_work():
                self._engine.step()
        return {name: statistics.median(spent[call]) for name, call in PARTS.items()}, idle

    def _start(self, new_tokens: int) -> None:
        engine = self._engine
        generator = torch.Generator().manual_seed(self._batch)
        vocab = engine.info.vocab_size
        for i in range(self._batch):
            prompt = torch.randint(2, vocab, (self._prompt_tokens,), generator=generator).tolist()
            params = SamplingParams(
                max_tokens=new_tokens,
                temperature=self._temperature,
                seed=i,
                ignore_eos=True,
                num_speculative_tokens=self._k,
            )
            engine.submit([NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)])
        first = engine.stats().generation_tokens
        while engine.stats().generation_tokens < first + self._batch:
            engine.step()


def idle_share(engine: Engine) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    )
    first_us, busy_until_us = spans[0]
    idle_us = 0.0
    for start_us, end_us in spans:
        gap_us = start_us - busy_until_us
        idle_us += gap_us if gap_us >= HOST_GAP_US else 0.0
        busy_until_us = max(busy_until_us, end_us)
    return idle_us / (busy_until_us - first_us)


def weight_bytes(path: str, model: PagedModel) -> int:
    """What one pass reads of the weights: all but the embeddings, of which it reads a few rows."""
    on_disk = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    embeddings = model.model.get_input_embeddings().weight
    return on_disk - (0 if model.model.config.tie_word_embeddings else embeddings.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--best-of", type=int, default=8, help="largest k to try; 0: try none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tb-per-s", type=float, default=4.3, help="of the floor: a copy's rate")
    args = parser.parse_args()

    engine = build(args)
    target_bytes = weight_bytes(args.target, engine.target._model)
    draft = getattr(engine.proposer, "_draft", None)
    draft_bytes = weight_bytes(args.draft, draft) if draft else 0
    info = engine.info
    print(f"ready in {info.load_s:.1f} s, {info.warm_up_s:.1f} s of them to warm up")
    columns = "  ".join(f"{part:>7}" for part in PARTS)
    print(f"batch temp   k     tokens/s  accepted  step ms  floor ms  |  {columns}  |  idle")
    for batch in args.batch:
        for temperature in (0.0, 1.0):
            measure = [
                Measured(engine, batch, temperature, k, args.prompt_tokens)
                for k in range(max(*args.k, args.best_of) + 1)
            ]
            for each in measure[1 : args.best_of + 1]:
                each.decode(SEARCH_TOKENS)
            rates = [each.tokens_per_s for each in measure]
            best = {rates.index(max(rates))} if args.best_of else set()
            for k in sorted({*args.k} | best):
                measure[k].decode(args.new_tokens)
                parts, idle = measure[k].parts()
                floor_ms = (target_bytes + k * draft_bytes) / args.tb_per_s / 1e9
                spent = "  ".join(f"{1e3 * parts[part]:7.2f}" for part in PARTS)
                print(
                    f"{batch:5d} {temperature:4.1f}  {k:2d}{' best' if k in best else '     '}"
                    f" {measure[k].tokens_per_s:8.1f}  {measure[k].acceptance:8.3f}"
                    f"  {1e3 * measure[k].step_s:7.2f}  {floor_ms:8.2f}  |  {spent}"
                    f"  |  {'' if idle is None else f'{idle:.1%}'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
