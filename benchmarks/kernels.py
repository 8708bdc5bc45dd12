"""Check and time the kernels of verification on one GPU.

    python benchmarks/kernels.py [--batch 1,8,64,256] [--k 1,4,8] [--vocab 32000,151936]

Every case is first compared with the torch references, then timed: median of CUDA-graph replays,
the inputs rotated past the L2 cache, beside the time that the target's logits alone take to move
at this GPU's measured copy bandwidth (the floor) and beside a straightforward torch version.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.kernels import verify as kernels
from outrider.kernels.logprobs import gather_logprobs
from outrider.kernels.sampling import Rule, Sampling

L2_BYTES = 60e6
DEVICE = "cuda"


class Mode(NamedTuple):
    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    rule: Rule = Rule.TOKEN
    one_hot: bool = False
    flat: bool = False  # logits without a peak: the worst case of top-p

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


MODES = [
    Mode("greedy", temperature=0.0),
    Mode("temperature"),
    Mode("top-k 50, top-p 0.95", top_k=50, top_p=0.95),
    Mode("top-p 0.9", top_p=0.9),
    Mode("top-p 0.9, flat logits", top_p=0.9, flat=True),
    Mode("block", rule=Rule.BLOCK),
    Mode("block, top-k 50, top-p 0.95", top_k=50, top_p=0.95, rule=Rule.BLOCK),
    Mode("match", rule=Rule.MATCH),
    Mode("one-hot drafts", one_hot=True),
]


class Inputs(NamedTuple):
    target: torch.Tensor  # [B * (k + 1), V]
    cu_rows: torch.Tensor
    draft_ids: torch.Tensor  # [B, k]
    num_drafts: torch.Tensor
    draft: torch.Tensor | None  # [B, k, V]
    state: torch.Tensor | None
    sampling: Sampling
    positions: torch.Tensor


def make_sampling(batch: int, mode: Mode, seed: int) -> Sampling:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=DEVICE)

    return Sampling(
        full(mode.temperature, torch.float32),
        full(mode.top_k, torch.int32),
        full(mode.top_p, torch.float32),
        full(0.0, torch.float32),
        torch.arange(batch, device=DEVICE) * 1_000_003 + seed,
        full(int(mode.rule), torch.int32),
    )


def make_inputs(
    batch: int, k: int, vocab: int, mode: Mode, dtype: torch.dtype, seed: int
) -> Inputs:
    """Logits shaped like a language model's (Zipf with exponent 1.5), drafts a noisy copy's own."""
    torch.manual_seed(seed)
    rows = batch * (k + 1)
    if mode.flat:
        target = torch.randn(rows, vocab, device=DEVICE)
    else:
        target = torch.empty(rows, vocab, device=DEVICE)
        zipf = -1.5 * torch.arange(1, vocab + 1, device=DEVICE).float().log()
        for row in range(rows):
            target[row] = zipf[torch.randperm(vocab, device=DEVICE)]
    draft = target.view(batch, k + 1, vocab)[:, :k]
    draft = (draft + 0.5 * torch.randn_like(draft)).to(dtype)
    sampling = make_sampling(batch, mode, seed)
    positions = torch.full((batch,), 100 + seed, device=DEVICE)
    ids = torch.empty(batch, k, dtype=torch.int64, device=DEVICE)
    state = torch.empty(batch, k, 4, device=DEVICE)
    for j in range(k):
        drawn = kernels.draft_sample(draft[:, j], sampling, positions + j, positions, vocab)
        ids[:, j], state[:, j] = drawn.token_ids, drawn.state
    return Inputs(
        target.to(dtype),
        torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * (k + 1),
        ids,
        torch.full((batch,), k, dtype=torch.int32, device=DEVICE),
        None if mode.one_hot else draft,
        None if mode.one_hot else state,
        sampling,
        positions,
    )


def run_verify(x: Inputs, mode: Mode) -> kernels.Verified:
    return kernels.verify(
        x.target, x.cu_rows, x.draft_ids, x.num_drafts, x.draft, x.state, x.sampling, x.positions,
        x.target.shape[1], filters=mode.filters,
    )  # fmt: skip


def run_reference(x: Inputs, mode: Mode) -> kernels.Verified:
    dispatch, kernels.uses_triton = kernels.uses_triton, lambda tensor: False
    try:
        return run_verify(x, mode)
    finally:
        kernels.uses_triton = dispatch


def torch_probs(logits: torch.Tensor, mode: Mode) -> torch.Tensor:
    x = logits.float() / mode.temperature
    if mode.filters:
        value, index = x.sort(dim=-1, descending=True)
        if mode.top_k:
            value[..., mode.top_k :] = -torch.inf
        p = value.softmax(-1)
        value[(p.cumsum(-1) - p) >= mode.top_p] = -torch.inf
        x = torch.empty_like(x).scatter_(-1, index, value)
    return x.softmax(-1)


def run_torch(x: Inputs, mode: Mode) -> torch.Tensor:
    """Verification by the token rule, written the obvious way."""
    batch, k = x.draft_ids.shape
    if mode.temperature == 0:
        best = x.target.argmax(-1).view(batch, k + 1)
        accepted = (best[:, :k] == x.draft_ids).long().cumprod(1).sum(1)
        return best.gather(1, accepted[:, None])
    p = torch_probs(x.target, mode).view(batch, k + 1, -1)
    q = torch.zeros_like(p[:, :k])
    if x.draft is None:
        q.scatter_(2, x.draft_ids[..., None], 1.0)
    else:
        q = torch_probs(x.draft, mode)
    ids = x.draft_ids[..., None]
    ratio = (p[:, :k].gather(2, ids) / q.gather(2, ids))[..., 0]
    accepted = (torch.rand_like(ratio) <= ratio).long().cumprod(1).sum(1)
    recovered = (p[:, :k] - q).clamp_min_(0)
    recovered = torch.cat([recovered / recovered.sum(-1, keepdim=True), p[:, k:]], 1)
    tokens = torch.multinomial(recovered.flatten(0, 1).nan_to_num_(1.0), 1).view(batch, k + 1)
    return tokens.gather(1, accepted[:, None])


def time_us(calls: list[Callable[[], object]], replays: int = 30) -> float:
    """Median time of one call over graph replays, each of which makes every call once."""
    calls = calls * -(-8 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def measure_bandwidth() -> float:
    """Bytes a second, read plus written, of a large device-to-device copy."""
    source = torch.empty(2**30, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 5 * 8 * source.numel() / (start.elapsed_time(end) * 1e-3)


def make_sets(batch: int, k: int, vocab: int, mode: Mode) -> list[Inputs]:
    set_bytes = batch * (2 * k + 1) * vocab * 2
    count = int(max(2, min(64, 3 * L2_BYTES // set_bytes + 1)))
    return [make_inputs(batch, k, vocab, mode, torch.bfloat16, seed) for seed in range(count)]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--k", type=numbers, default=[1, 4, 8])
    parser.add_argument("--vocab", type=numbers, default=[32000, 151936])
    parser.add_argument("--modes", default="", help="only modes whose name contains this")
    parser.add_argument("--no-torch", action="store_true", help="skip the torch version")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(
        f"{'mode':<28}{'B':>5}{'k':>3}{'V':>8}{'differ':>8}{'us':>9}{'floor':>8}{'x':>6}{'torch':>9}"
    )
    figures = []
    for vocab in args.vocab:
        for batch in args.batch:
            for k in args.k:
                floor = batch * (k + 1) * vocab * 2 / bandwidth * 1e6
                for mode in (mode for mode in MODES if args.modes in mode.name):
                    sets = make_sets(batch, k, vocab, mode)
                    ours, reference = run_verify(sets[0], mode), run_reference(sets[0], mode)
                    differ = (ours.token_ids != reference.token_ids).any(1).float().mean().item()
                    us = time_us([lambda x=x, mode=mode: run_verify(x, mode) for x in sets])
                    plain = 0.0
                    if not args.no_torch and mode.rule == Rule.TOKEN:
                        few = sets[:2]
                        plain = time_us([lambda x=x, mode=mode: run_torch(x, mode) for x in few], 3)
                    figures.append([mode.name, batch, k, vocab, differ, us, floor, plain])
                    print(
                        f"{mode.name:<28}{batch:>5}{k:>3}{vocab:>8}{differ:>8.3f}{us:>9.1f}"
                        f"{floor:>8.1f}{us / floor:>6.2f}{plain:>9.1f}",
                        flush=True,
                    )
                figures += time_others(batch, k, vocab, bandwidth)
    if args.json:
        args.json.write_text(json.dumps(figures))


def time_others(batch: int, k: int, vocab: int, bandwidth: float) -> list[list[object]]:
    """The draft sampler over B rows, and logprobs with five alternatives over every row."""
    figures: list[list[object]] = []
    for mode in MODES[:4]:
        sets = make_sets(batch, k, vocab, mode)
        calls: list[Callable[[], object]] = [
            lambda x=x, mode=mode: kernels.draft_sample(
                x.target[: len(x.positions)], x.sampling, x.positions, x.positions, vocab,
                filters=mode.filters,
            )
            for x in sets
        ]  # fmt: skip
        us, floor = time_us(calls), batch * vocab * 2 / bandwidth * 1e6
        figures.append([f"draft {mode.name}", batch, k, vocab, 0.0, us, floor, 0.0])
        print(f"draft {mode.name:<22}{batch:>5}{k:>3}{vocab:>8}{'':>8}{us:>9.1f}{floor:>8.1f}")
    sets = make_sets(batch, k, vocab, MODES[0])
    ids = torch.zeros(len(sets[0].target), dtype=torch.int64, device=DEVICE)
    calls = [lambda x=x: gather_logprobs(x.target, ids, 5, vocab) for x in sets]
    us, floor = time_us(calls), batch * (k + 1) * vocab * 2 / bandwidth * 1e6
    figures.append(["logprobs, 5 best", batch, k, vocab, 0.0, us, floor, 0.0])
    print(f"{'logprobs, 5 best':<28}{batch:>5}{k:>3}{vocab:>8}{'':>8}{us:>9.1f}{floor:>8.1f}")
    return figures


if __name__ == "__main__":
    main()
