"""Check and time the kernels of verification on one GPU.

    python benchmarks/kernels.py [--batch 1,8,64,256] [--k 1,4,8] [--vocab 32000,151936]

A table of microseconds: medians of CUDA-graph replays, the inputs rotated past the L2 cache, beside
the floor, which is the time that the target's logits alone take to move at this GPU's measured copy
bandwidth. A verification is timed with a copy that restores the drafts, which it overwrites in
their slots. "torch" columns are straightforward versions (softmax, sort, multinomial) of what
stands before them; "K0" is the draft sampler over B rows. Where a batch has at most 320 rows its
tokens are first compared with the torch references'; the requests that differ are counted at the
end.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.kernels.verify import verify as kernels
from outrider.kernels.verify.logprobs import gather_logprobs
from outrider.kernels.verify.sampling import Rule, Sampling
from outrider.kernels.verify.step import SlotContents

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
    torch: bool = False  # also time the straightforward version

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


MODES = [
    Mode("greedy", temperature=0.0, torch=True),
    Mode("sampled", torch=True),
    Mode("k50 p.95", top_k=50, top_p=0.95, torch=True),
    Mode("block", rule=Rule.BLOCK),
    Mode("match", rule=Rule.MATCH),
]
MORE_MODES = [
    Mode("top-p 0.9", top_p=0.9),
    Mode("top-p 0.9, flat logits", top_p=0.9, flat=True),
    Mode("block, top-k 50, top-p 0.95", top_k=50, top_p=0.95, rule=Rule.BLOCK),
    Mode("match, top-k 50, top-p 0.95", top_k=50, top_p=0.95, rule=Rule.MATCH),
    Mode("one-hot drafts", one_hot=True),
]


class Inputs(NamedTuple):
    target: torch.Tensor  # [B * (k + 1), V]
    cu_rows: torch.Tensor
    slots: SlotContents  # without known tokens, so that no call moves them on
    slot: torch.Tensor
    drafts: torch.Tensor  # [B, k + 1], for the slots
    num_drafts: torch.Tensor
    kept: tuple[torch.Tensor, torch.Tensor] | None  # [B, k, V] and [B, k, 4]


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


def make_logits(
    batch: int, k: int, vocab: int, flat: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits shaped like a language model's (Zipf with exponent 1.5), and a noisy copy of them.

    Shape: [B * (k + 1), V], [B, k, V] bfloat16.
    """
    torch.manual_seed(seed)
    rows = batch * (k + 1)
    target = torch.randn(rows, vocab, device=DEVICE)
    if not flat:
        zipf = -1.5 * torch.arange(1, vocab + 1, device=DEVICE).float().log()
        for part in target.split(512):
            part.copy_(zipf[part.argsort(-1)])
    draft = target.view(batch, k + 1, vocab)[:, :k]
    return target.bfloat16(), (draft + 0.5 * torch.randn_like(draft)).bfloat16()


def make_inputs(target: torch.Tensor, draft: torch.Tensor, mode: Mode, seed: int) -> Inputs:
    """A step over these logits, its drafts drawn from the draft's."""
    batch, k, vocab = draft.shape
    slot = torch.arange(batch, device=DEVICE)
    slots = SlotContents(
        torch.zeros(batch, k + 1, dtype=torch.int32, device=DEVICE),
        torch.zeros_like(slot),
        make_sampling(batch, mode, seed),
    )
    kept = draft, torch.empty(batch, k, 4, device=DEVICE)
    for j in range(k):
        offset = torch.full_like(slot, j)
        kernels.draw_draft(draft[:, j], slots, slot, offset, kept, vocab)
    return Inputs(
        target,
        torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * (k + 1),
        slots,
        slot,
        slots.token_ids.clone(),
        torch.full((batch,), k, dtype=torch.int32, device=DEVICE),
        None if mode.one_hot else kept,
    )


def make_sets(batch: int, k: int, vocab: int, flat: bool) -> list[tuple[torch.Tensor, ...]]:
    """Logits of as many steps as do not fit the L2 cache together."""
    set_bytes = batch * (2 * k + 1) * vocab * 2
    count = int(max(2, min(64, 3 * L2_BYTES // set_bytes + 1)))
    return [make_logits(batch, k, vocab, flat, seed) for seed in range(count)]


def run_draft(x: Inputs, mode: Mode) -> torch.Tensor:
    first = x.slots.num_tokens  # 0, and so the first draft's offset
    return kernels.draw_draft(
        x.target[: len(x.slot)], x.slots, x.slot, first, None, x.target.shape[1],
        filters=mode.filters, draws=mode.temperature > 0,
    )  # fmt: skip


def run_verify(x: Inputs, mode: Mode) -> torch.Tensor:
    x.slots.token_ids.copy_(x.drafts)
    return kernels.verify(
        x.target, x.cu_rows, x.slots, x.slot, x.num_drafts, x.drafts.shape[1] - 1, x.kept,
        x.target.shape[1], filters=mode.filters, draws=mode.temperature > 0,
    )  # fmt: skip


def run_reference(x: Inputs, mode: Mode) -> torch.Tensor:
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
    draft_ids = x.drafts[:, :-1].long()
    batch, k = draft_ids.shape
    if mode.temperature == 0:
        best = x.target.argmax(-1).view(batch, k + 1)
        accepted = (best[:, :k] == draft_ids).long().cumprod(1).sum(1)
        return best.gather(1, accepted[:, None])
    p = torch_probs(x.target, mode).view(batch, k + 1, -1)
    q = torch.zeros_like(p[:, :k])
    ids = draft_ids[..., None]
    if x.kept is None:
        q.scatter_(2, ids, 1.0)
    else:
        q = torch_probs(x.kept[0], mode)
    ratio = (p[:, :k].gather(2, ids) / q.gather(2, ids))[..., 0]
    accepted = (torch.rand_like(ratio) <= ratio).long().cumprod(1).sum(1)
    recovered = (p[:, :k] - q).clamp_min_(0)
    recovered = torch.cat([recovered / recovered.sum(-1, keepdim=True), p[:, k:]], 1)
    tokens = torch.multinomial(recovered.flatten(0, 1).nan_to_num_(1.0), 1).view(batch, k + 1)
    return tokens.gather(1, accepted[:, None])


def time_us(calls: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Median time of one call over graph replays, each of many calls: its launch counts too."""
    calls = [*calls] * -(-32 // len(calls))
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


def time_torch_us(call: Callable[[], object]) -> float:
    """Median of three calls, launched eagerly: they are long."""
    call()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Case(NamedTuple):
    figures: dict[str, float]  # microseconds
    num_differing: int
    num_compared: int


def run_case(batch: int, k: int, vocab: int, modes: list[Mode], with_torch: bool) -> Case:
    figures: dict[str, float] = {}
    num_differing = num_compared = 0
    sets = make_sets(batch, k, vocab, modes[0].flat)
    for mode in modes:
        inputs = [make_inputs(*logits, mode, seed) for seed, logits in enumerate(sets)]
        if batch * (k + 1) <= 320:
            ours, reference = run_verify(inputs[0], mode), run_reference(inputs[0], mode)
            num_differing += int((ours != reference).any(1).sum())
            num_compared += batch
        figures[mode.name] = time_us([partial(run_verify, x, mode) for x in inputs])
        if mode.torch and with_torch:
            figures[f"{mode.name}, torch"] = time_torch_us(partial(run_torch, inputs[0], mode))
        if mode.torch:
            figures[f"{mode.name}, K0"] = time_us([partial(run_draft, x, mode) for x in inputs])
        if mode.temperature == 0:
            ids = torch.zeros(batch * (k + 1), dtype=torch.int64, device=DEVICE)
            calls = [partial(gather_logprobs, x.target, ids, 5, vocab) for x in inputs]
            figures["logprobs"] = time_us(calls)
    return Case(figures, num_differing, num_compared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--k", type=numbers, default=[1, 4, 8])
    parser.add_argument("--vocab", type=numbers, default=[32000, 151936])
    parser.add_argument("--more", action="store_true", help="also rarer modes, one a line")
    parser.add_argument("--no-torch", action="store_true", help="skip the torch versions")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    figures, num_differing, num_compared = [], 0, 0
    for vocab, batch, k in itertools.product(args.vocab, args.batch, args.k):
        floor = batch * (k + 1) * vocab * 2 / bandwidth * 1e6
        case = run_case(batch, k, vocab, MODES, not args.no_torch)
        num_differing += case.num_differing
        num_compared += case.num_compared
        if not figures:
            print("     V   B  k   floor", *(f"{name:>15}" for name in case.figures))
        print(
            f"{vocab:>6}{batch:>4}{k:>3}{floor:>8.1f}",
            *(f"{us:>15.1f}" for us in case.figures.values()),
            flush=True,
        )
        figures.append({"vocab": vocab, "batch": batch, "k": k, "floor": floor, **case.figures})
        for mode in MORE_MODES if args.more else []:
            case = run_case(batch, k, vocab, [mode], False)
            num_differing += case.num_differing
            num_compared += case.num_compared
            print(f"{'':>21} {mode.name}: {case.figures[mode.name]:.1f}", flush=True)
            figures[-1] |= case.figures
    print(f"{num_differing} of {num_compared} requests differ from the reference")
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
