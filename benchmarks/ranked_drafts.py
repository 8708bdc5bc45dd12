"""Tokens a second where drafts differ in how likely they are: verified rows chosen on the GPU,
beside every fixed k.

    python benchmarks/published_shapes.py qwen3-8b /tmp/m
    python benchmarks/ranked_drafts.py /tmp/m /tmp/m/eagle3 [--batch 64] [--most 3] [--tiny]

Head and target have random weights, so how often drafts are accepted is set, as in
`set_acceptance.py`; and the log odds that drafts are ranked by are set to what they then should be.
In the text `sequences` half of them have drafts of which 90% are accepted, the others 20%; in
`drafts` each draft of any sequence is of the one kind or the other; in `alike` 60% are accepted.

`k` is named by every request. Where the engine chooses, its drafts are ranked on the GPU, or (`by
sequence`) shared by what was accepted of each sequence before. These lines decode once before they
are timed, as a server has decoded for long. Tokens/s are those of steps whose batch is full. `rows`
are those of a step, on the average. --tiny: to try it on a CPU with Triton's interpreter.
"""

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine
from outrider.engine.learning import learn_costs
from outrider.engine.proposers import draws
from outrider.engine.scoring import ranking, verifier
from outrider.kernels.verify.step import SlotContents

PAGE_TOKENS, PROMPT_TOKENS = 16, 64
# (chance of a good draft, of a bad one, whether each draft is of one kind, not each sequence)
TEXTS = {"sequences": (0.9, 0.2, 0.0), "drafts": (0.9, 0.2, 1.0), "alike": (0.6, 0.6, 0.0)}


@triton.jit
def _uniform(seed, anchor, j, purpose):
    x = anchor * 0x9E3779B1 + seed * 0x85EBCA77 + (j.to(tl.int64) * 2 + purpose) * 0xC2B2AE35
    for _ in tl.static_range(3):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x45D9F3B
    x = x & 0xFFFFFFFF
    return (((x ^ (x >> 16)) & 0xFFFFFF).to(tl.float32) + 0.5) / (1 << 24)


@triton.jit
def _chance(seed, anchor, j, text_ptr):
    """Of draft j behind `anchor` known tokens."""
    good, bad, by_draft = tl.load(text_ptr), tl.load(text_ptr + 1), tl.load(text_ptr + 2)
    coin = tl.where(by_draft > 0, _uniform(seed, anchor, j, 0) < 0.5, seed % 2 == 0)
    return tl.where(coin, good, bad)


@triton.jit
def _odds_kernel(
    log_odds_ptr, stride, slot_ptr, seed_ptr, num_tokens_ptr, text_ptr, k, COLUMNS: tl.constexpr
):
    slot = tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    seed, anchor = tl.load(seed_ptr + slot), tl.load(num_tokens_ptr + slot)
    j = tl.arange(0, COLUMNS)
    chance = _chance(seed, anchor, j, text_ptr)
    tl.store(log_odds_ptr + slot * stride + j, tl.log(chance / (1.0 - chance)), mask=j < k)


@triton.jit
def _before_kernel(
    drafts_ptr, anchor_ptr, token_ids_ptr, stride, num_tokens_ptr, slot_ptr, k,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What verification overwrites."""
    i = tl.program_id(0)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    anchor = tl.load(num_tokens_ptr + slot)
    column = tl.arange(0, COLUMNS)
    token = tl.load(token_ids_ptr + slot * stride + anchor + column, mask=column < k)
    tl.store(anchor_ptr + i, anchor)
    tl.store(drafts_ptr + i * k + column, token, mask=column < k)


@triton.jit
def _verdict_kernel(
    out_ptr, drafts_ptr, anchor_ptr, num_drafts_ptr, seed_ptr, text_ptr, token_ids_ptr, stride,
    num_tokens_ptr, slot_ptr, k, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    anchor, seed = tl.load(anchor_ptr + i), tl.load(seed_ptr + slot)
    num_drafts = tl.load(num_drafts_ptr + i)
    j = tl.arange(0, COLUMNS)
    fails = (j >= num_drafts) | (_uniform(seed, anchor, j, 1) >= _chance(seed, anchor, j, text_ptr))
    accepted = tl.min(tl.where(fails, j, COLUMNS - 1), 0)
    drafts = tl.load(drafts_ptr + i * k + j, mask=j < k, other=0)
    last = tl.load(out_ptr + i * (k + 2))
    tl.debug_barrier()
    token_ids = tl.where(j < accepted, drafts, tl.where(j == accepted, last, -1))
    tl.store(out_ptr + i * (k + 2) + j, token_ids, mask=j <= k)
    at = token_ids_ptr + slot * stride + anchor + j
    tl.store(at, tl.maximum(token_ids, 0).to(tl.int32), mask=j <= k)
    tl.store(num_tokens_ptr + slot, anchor + accepted + 1, mask=anchor > 0)


def set_chances(text: Tensor, slots_of: Any) -> None:
    """From now on engines verify, and rank, by what `text` says; call it before they are made.

    `slots_of()` are the engine's, once it is made. Shape: text [3].
    """
    verify, rank = verifier.verify, ranking.rank

    def verdict(
        logits: Tensor, cu_rows: Tensor, slots: SlotContents, slot: Tensor, num_drafts: Tensor,
        k: int, *args: Any, **more: Any,
    ) -> Tensor:  # fmt: skip
        batch, common = len(slot), {"k": k, "COLUMNS": 64, "num_warps": 1}
        drafts, anchor = slots.num_tokens.new_empty(batch, k), slots.num_tokens.new_empty(batch)
        at = slots.token_ids, slots.token_ids.stride(0), slots.num_tokens, slot
        if k:
            _before_kernel[(batch,)](drafts, anchor, *at, **common)
        out = verify(logits, cu_rows, slots, slot, num_drafts, k, *args, **more)
        if k:
            _verdict_kernel[(batch,)](
                out, drafts, anchor, num_drafts, slots.sampling.seed, text, *at, **common
            )
        return out

    def ranked(sequences: Tensor, num_seqs: int, most: int, log_odds: Tensor) -> Any:
        if (slots := slots_of()) is not None:
            _odds_kernel[(num_seqs,)](
                log_odds, log_odds.stride(0), sequences, slots.sampling.seed, slots.num_tokens,
                text, k=log_odds.shape[1], COLUMNS=32, num_warps=1,
            )  # fmt: skip
        return rank(sequences, num_seqs, most, log_odds)

    verifier.verify, ranking.rank = verdict, ranked  # type: ignore[assignment]


def build(args: argparse.Namespace) -> Engine:
    longest = PROMPT_TOKENS + args.new_tokens + 4 * (args.most + 1)
    return Engine(
        EngineConfig(
            target=ModelConfig(path=args.target, dtype=args.dtype),
            draft=ModelConfig(path=args.draft, dtype=args.dtype),
            device=args.device,
            max_model_len=longest,
            cache=CacheConfig(
                page_size_tokens=PAGE_TOKENS,
                num_pages=1 + args.batch * (longest // PAGE_TOKENS + 1),
                prefix_caching=False,
            ),
            scheduler=SchedulerConfig(max_num_seqs=args.batch, max_num_batched_tokens=8192),
            speculation=SpeculationConfig(
                sources=("draft_model",), num_speculative_tokens=args.most, adaptive=True
            ),
        )
    )


def decode(engine: Engine, args: argparse.Namespace, k: int | None) -> tuple[float, float, float]:
    """Tokens a second, rows and milliseconds of a step whose batch is full."""
    rng = random.Random(0)
    for i in range(args.batch):
        prompt = [rng.randrange(2, engine.info.vocab_size) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(
            max_tokens=args.new_tokens,
            temperature=1.0,
            seed=i,
            ignore_eos=True,
            num_speculative_tokens=k,
        )
        engine.submit([NewRequest(request_id=str(i), prompt_token_ids=prompt, params=params)])
    started: set[str] = set()
    while len(started) < args.batch:
        started |= {output.request_id for output in engine.step() if output.token_ids}
    before, start_s = engine.stats(), time.perf_counter()
    while not any(output.finish_reason for output in engine.step()):
        pass
    spent_s, after = time.perf_counter() - start_s, engine.stats()
    num_steps = after.steps - before.steps
    num_drafts = sum(after.drafted_per_position) - sum(before.drafted_per_position)
    engine.abort([str(i) for i in range(args.batch)])
    num_tokens = after.generation_tokens - before.generation_tokens
    num_rows = args.batch + num_drafts / num_steps
    return num_tokens / spent_s, num_rows, 1e3 * spent_s / num_steps


@contextmanager
def ranks(engine: Engine, is_on: bool) -> Iterator[None]:
    adaptive = engine.sequences.adaptive
    assert adaptive is not None
    adaptive._ranks, before = is_on and adaptive._ranks, adaptive._ranks
    yield
    adaptive._ranks = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--most", type=int, default=3, help="largest k")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--texts", nargs="+", default=[*TEXTS], choices=TEXTS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.device, args.dtype = ("cpu", "float32") if args.tiny else ("cuda", "auto")
    if args.tiny:
        draws.stops_early_on = lambda device: False

    text, engine = torch.zeros(3, device=args.device), None
    set_chances(text, lambda: None if engine is None else engine.worker.slots.state)
    engine = build(args)
    if args.tiny:
        engine.scheduler.lag = 1
    learn_costs(engine)
    print("SET ACCEPTANCE, whatever the models say")
    print(f"ready in {engine.info.load_s:.1f} s", flush=True)
    print(f"{'text':10s} {'k':12s} tokens/s    rows  step ms  of best k", flush=True)
    for name in args.texts:
        text.copy_(torch.tensor(TEXTS[name]))
        best = 0.0
        for label, k in [
            *((str(k), k) for k in range(args.most + 1)), ("by sequence", None), ("ranked", None)
        ]:  # fmt: skip
            with ranks(engine, label == "ranked"):
                if k is None:
                    decode(engine, args, k)
                rate, num_rows, step_ms = decode(engine, args, k)
            best = best if k is None else max(best, rate)
            print(
                f"{name:10s} {label:12s} {rate:8.1f} {num_rows:7.1f} {step_ms:8.2f}"
                f"  {rate / best:9.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
