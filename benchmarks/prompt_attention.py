"""Time attention of prompts on one GPU, beside torch's own backends.

    python benchmarks/prompt_attention.py [--tokens 2048,16384,65536] [--head-dims 64,128,256]
        [--seconds 55]

One sequence, 32 query heads over 8 KV heads, bfloat16, pages in random order, of 16 tokens if
nothing else is said. A row is a way to compute it: milliseconds, and TFLOP/s of causal attention.
`cudnn` and `flash` are torch's `scaled_dot_product_attention` over keys and values that lie
together, without pages. Each of our ways is first compared with float32 arithmetic, and its bits
with those of the same rows in chunks and one by one. Ways that do not fit the GPU, or into the
time, are named.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from outrider.kernels.compiling import compile_together
from outrider.kernels.model import paged_attention as attention
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.fp8 import to_e4m3

HEADS, KV_HEADS, PAGE = 32, 8, 16
DEVICE = "cuda"


class Way(NamedTuple):
    """How our kernels are launched."""

    name: str
    in_fp8: bool = False
    batch_invariant: bool = True
    page: int = PAGE
    in_triton: bool = False  # by the kernel of other GPUs


WAYS = [
    Way("ours"),
    Way("ours, FP8 pages", in_fp8=True),
    Way("ours, pages of 64", page=64),
    Way("ours, not batch-invariant", batch_invariant=False),
    Way("in Triton", in_triton=True),
    Way("in Triton, FP8 pages", in_triton=True, in_fp8=True),
]


class Inputs(NamedTuple):
    query: Tensor  # [T, HEADS, head_dim]
    keys: Tensor  # [T, KV_HEADS, head_dim]
    values: Tensor
    tables: dict[int, Tensor]  # by the size of pages: [1, pages]


def pages_of(num_tokens: int, page: int) -> Tensor:
    """A block table of one sequence, in random order."""
    return torch.randperm(num_tokens // page, device=DEVICE)[None].int()


def make_inputs(num_tokens: int, head_dim: int) -> Inputs:
    torch.manual_seed(num_tokens + head_dim)

    def randn(heads: int) -> Tensor:
        return torch.randn(num_tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)

    tables = {page: pages_of(num_tokens, page) for page in (PAGE, 64)}
    return Inputs(randn(HEADS), randn(KV_HEADS), randn(KV_HEADS), tables)


def paged(x: Tensor, table: Tensor) -> Tensor:
    shape = table.shape[1], x.shape[0] // table.shape[1], *x.shape[1:]
    out = torch.empty(shape, dtype=x.dtype, device=DEVICE)
    out[table[0].long()] = x.view(shape)
    return out


def call(way: Way, x: Inputs, first: int = 0, end: int | None = None) -> Callable[[], Tensor]:
    """Attention of the rows from `first` to `end`, over pages made here."""
    end = end or len(x.query)
    table = x.tables[way.page]
    keys, values = paged(x.keys, table), paged(x.values, table)
    if way.in_fp8:
        keys, values = to_e4m3(keys), to_e4m3(values)
    query = x.query[first:end]
    items = list_items(
        torch.tensor([0, end - first], device=DEVICE),
        torch.tensor([end], device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        end - first,
        KV_HEADS,
        HEADS // KV_HEADS,
        len(x.query),
        batch_invariant=way.batch_invariant,
    )
    scale = query.shape[-1] ** -0.5

    def run() -> Tensor:
        is_for = attention.is_for
        if way.in_triton:
            attention.is_for = lambda *_: False
        try:
            return attention.paged_attention(query, keys, values, items, table, scale)
        finally:
            attention.is_for = is_for

    return run


def library(backend: SDPBackend, x: Inputs) -> Callable[[], Tensor]:
    query = x.query.transpose(0, 1)[None].contiguous()
    keys, values = (  # not every backend shares KV heads
        tensor.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)[None].contiguous()
        for tensor in (x.keys, x.values)
    )

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, is_causal=True)

    return run


def time_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def faults(way: Way, x: Inputs) -> str:
    """What is wrong with it over a prompt of 1,500 tokens and a bit."""
    whole = call(way, x)().float()
    group = HEADS // KV_HEADS
    exact = scaled_dot_product_attention(
        *(
            tensor.float().repeat_interleave(repeat, 1).transpose(0, 1)[None]
            for tensor, repeat in ((x.query, 1), (x.keys, group), (x.values, group))
        ),
        is_causal=True,
    )[0].transpose(0, 1)
    error = ((whole - exact).norm() / exact.norm()).item()
    found = "" if error < (0.06 if way.in_fp8 else 0.006) else f" WRONG by {error:.1%}"
    if way.batch_invariant:
        for first, end in (
            (0, 300),
            (300, 1000),
            (1000, 1536),
            (777, 800),
            (1535, 1536),
            (511, 514),
        ):
            if not torch.equal(call(way, x, first, end)().float(), whole[first:end]):
                found += f" OTHER BITS {first}:{end}"
    return found


def attempt(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=numbers, default=[2048, 16384, 65536])
    parser.add_argument("--head-dims", type=numbers, default=[128, 64, 256])
    parser.add_argument("--seconds", type=float, default=55, help="start nothing after this")
    args = parser.parse_args()
    until_s = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    small = {head_dim: make_inputs(1536, head_dim) for head_dim in args.head_dims}
    warm_ups = [
        run
        for head_dim in args.head_dims
        for way in WAYS
        for run in (call(way, small[head_dim]), call(way, small[head_dim], 1535))
    ]
    print(attempt(lambda: compile_together(warm_ups, torch.device(DEVICE))) or "", end="")
    print(f"compiled with {until_s - time.monotonic():.0f} s left")
    print(f"{'ms, TFLOP/s':<30}", *(f"{tokens:>16}" for tokens in args.tokens), flush=True)
    for head_dim in args.head_dims:
        inputs = [make_inputs(tokens, head_dim) for tokens in args.tokens]
        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            of_sizes = [library(backend, x) for x in inputs]
            show(f"{head_dim} {name}", of_sizes, args.tokens, head_dim, "", until_s)
        for way in WAYS:
            if time.monotonic() > until_s:
                print(f"{head_dim} {way.name}: no time left")
                continue
            found = attempt(lambda way=way: faults(way, small[head_dim]))  # noqa: B023
            of_sizes = [call(way, x) for x in inputs]
            show(f"{head_dim} {way.name}", of_sizes, args.tokens, head_dim, found, until_s)


def show(
    name: str,
    of_sizes: list[Callable[[], Tensor]],
    tokens: list[int],
    head_dim: int,
    found: str,
    until_s: float,
) -> None:
    cells = []
    for run, num_tokens in zip(of_sizes, tokens, strict=True):
        ms = attempt(lambda run=run: time_ms(run)) if time.monotonic() < until_s else "-"
        if isinstance(ms, float):
            flops = 4 * HEADS * head_dim * num_tokens**2 / 2
            ms = f"{ms:8.3f} {flops / ms / 1e9:6.0f}"
        cells.append(f"{ms:>16}")
    print(f"{name:<30}", *cells, found, flush=True)


if __name__ == "__main__":
    main()
