"""On a GPU a row of many comes out as the row alone, to the bit, where a target keeps its bits.

Under the interpreter products are added up as tensor cores do, sixteen at a time: numpy's own sums
hang on how large a block is.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import attention_items, batch_invariant_attention, narrow_linear
from outrider.kernels.model import batch_invariant_linear as module
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.batch_invariant_attention import Heads, sums_alike
from outrider.kernels.model.batch_invariant_linear import (
    LibraryRows,
    add_batch_invariant_linear,
    batch_invariant_linear,
    library_rows,
)
from outrider.kernels.model.linear import linear_reference
from outrider.kernels.model.narrow_matrix import Kind, narrow_matrix
from outrider.kernels.model.paged_attention import paged_attention
from outrider.kernels.model.product import product
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.silu_mul import silu_mul

interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
FEWER_ROWS, MOST_ROWS = [2, 16, 65], 520
if ON_GPU:
    FEWER_ROWS += [5, 17, 31, 33, 64, 96, 130, 255, 256, 257, 300, 512, 520, 521, 1023]
    MOST_ROWS = 1100
LONE_ROWS = [0, 1, 15, 31, 32, 64, 254, MOST_ROWS - 1] if ON_GPU else [15, 254, MOST_ROWS - 1]


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums in the order of the hardware, whatever the blocks; not of what numpy finds fastest."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = d.data
        for k in range(0, a.data.shape[1], 16):
            left, right = a.data[:, k : k + 16].astype(float), b.data[k : k + 16].astype(float)
            total = (total + left @ right).astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    if not ON_GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        monkeypatch.setattr(attention_items, "BATCH_INVARIANT_UNIT", UNIT)
    with torch.inference_mode():
        yield


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Of millions of outputs one may be rounded as far off as no single one should be."""
    assert (got.float() - expected).norm() < 0.01 * expected.norm()


def library(weight: Tensor, bias: Tensor | None) -> LibraryRows:
    return library_rows(weight, bias) if ON_GPU else LibraryRows((), ())


# A width that is no multiple of a block; one that is split; few outputs of many inputs; on a GPU
# those of models, and such as the library takes.
SIZES = [(70, 200), (64, 1024), (70, 2120)]
if ON_GPU:
    SIZES += [(96, 5120), (272, 2048), (32, 2880), (1024, 4096), (4096, 1536)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("gated", "with_bias"), [(False, False), (False, True), (True, True)])
def test_products(size: tuple[int, int], gated: bool, with_bias: bool) -> None:
    num_out, num_in = size
    x, norm = randn(MOST_ROWS, num_in), Norm(randn(num_in, seed=1), 1e-5)
    weight = randn(num_out, num_in, seed=2) / num_in**0.5
    bias = randn(num_out, seed=3) if with_bias else None
    rows = library(weight, bias)

    def multiplied(x: Tensor) -> Tensor:
        return batch_invariant_linear(x, weight, bias, rows, norm=norm, gated=gated)

    truth = multiplied(x)
    wide = [tensor.float() for tensor in (x, weight)]
    expected = linear_reference(
        *wide,
        bias.float() if bias is not None else None,
        norm=Norm(norm.weight.float(), 1e-5),
        gated=gated,
    )
    assert_near(truth, expected)
    for i in LONE_ROWS:
        assert torch.equal(multiplied(x[i : i + 1]), truth[i : i + 1]), i
    for n in FEWER_ROWS:
        assert torch.equal(multiplied(x[-n:]), truth[-n:]), n


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_that_are_added_and_normalised(size: tuple[int, int], with_bias: bool) -> None:
    num_out, num_in = size
    x, residual = randn(MOST_ROWS, num_in), randn(MOST_ROWS, num_out, seed=1)
    weight = randn(num_out, num_in, seed=2) / num_in**0.5
    bias = randn(num_out, seed=3) if with_bias else None
    norm = Norm(randn(num_out, seed=4), 1e-5)
    rows = library(weight, bias)

    def added(rows_of: slice) -> tuple[Tensor, Tensor]:
        total = residual[rows_of].clone()
        normed = add_batch_invariant_linear(total, x[rows_of], weight, bias, rows, norm=norm)
        assert normed is not None
        return total, normed

    truth = added(slice(MOST_ROWS))
    expected = residual.float() + linear_reference(
        x.float(), weight.float(), bias.float() if bias is not None else None
    )
    assert_near(truth[0], expected)
    lone, many = (
        [slice(i, i + 1) for i in LONE_ROWS],
        [slice(MOST_ROWS - n, None) for n in FEWER_ROWS],
    )
    for rows_of in (*lone, *many):
        for got, whole in zip(added(rows_of), truth, strict=True):
            assert torch.equal(got, whole[rows_of]), rows_of


def test_a_gate_takes_halves_that_are_summed_as_without_it() -> None:
    """The library may compute some of the rows, and it has no gate."""
    for num_out, num_in in SIZES[:3]:
        x, weight = randn(20, num_in), randn(num_out, num_in, seed=2) / num_in**0.5
        gated = silu_mul(product(x, weight))
        assert torch.equal(product(x, weight, gated=True), gated), num_out


@pytest.mark.parametrize(("num_in", "from_start"), [(1000, 1.0), (1000, 1 + 2e-6), (2048, 1.0)])
def test_rounding_hides_no_other_order_of_sums_of_few_outputs(
    num_in: int, from_start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a thousand numbers of 16 bits differs, if the library sums otherwise. With 2,048
    inputs ours are summed by shares, so that whatever seems alike is chance.
    """

    def summed(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return (x.double() @ weight.double().t()).float()

    def by_library(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return (from_start * summed(x, weight)).to(x.dtype)

    monkeypatch.setattr(module, "product", lambda x, *args: summed(x, *args).to(x.dtype))
    monkeypatch.setattr(module, "_library_product", by_library)
    monkeypatch.setattr(module, "parts_of", lambda _: 1)
    for name in ("product_parts", "library_parts"):
        monkeypatch.setattr(module, name, lambda x, *args: summed(x, *args)[None])
    find_rows = module._library_rows.__wrapped__
    found = find_rows(torch.Size((24, num_in)), torch.bfloat16, torch.device("cpu"), False)
    assert bool(found.plain) == (from_start == 1.0 and num_in < 2048)
    assert {40, 4096} <= set(found.in_parts)


def test_rows_go_to_the_library_in_counts_that_sum_alike() -> None:
    def blocks(num_rows: int, *counts: int) -> list[tuple[int, bool]]:
        got = list(module._blocks(num_rows, counts))
        assert [rows.start for rows, _ in got] == [0, *(rows.stop for rows, _ in got)][:-1]
        assert sum(rows.stop - rows.start for rows, _ in got) == num_rows
        return [(rows.stop - rows.start, is_library) for rows, is_library in got]

    assert blocks(0, 512, 64) == []
    assert blocks(32, 512, 64, 32) == [(32, False)]
    assert blocks(64, 512, 64) == [(64, True)]
    assert blocks(65, 512, 64) == [(65, False)]  # not the weights twice
    assert blocks(1100, 1024, 512, 64) == [(1024, True), (76, False)]
    assert blocks(1100, 512, 64) == [(512, True), (512, True), (76, False)]
    assert blocks(900) == [(900, False)]


PAGE = 16
UNIT = 512 if ON_GPU else 64  # tokens of a split
LENGTH = 2 * UNIT + 60
ENDS = [16, 65, UNIT - 1, UNIT, UNIT + 1, LENGTH]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "softcap", "with_sinks"),
    [
        (4, 2, 64, None, None, False),
        (6, 2, 40, 100, 5.0, True),
        (2, 2, 16, UNIT + 70, None, True),
        *([(32, 8, 128, None, None, False)] if ON_GPU else []),
        *([(6, 1, 256, None, None, False), (8, 1, 256, 300, None, True)] if ON_GPU else []),
    ],
)
def test_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    # Few outputs: rounded to 16 bits two orders would seldom differ.
    dtype = DTYPE if ON_GPU else torch.float32
    query = randn(LENGTH, num_heads, head_dim, dtype=dtype)
    keys, values = (
        randn(LENGTH, num_kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2)
    )
    sinks = randn(num_heads, seed=3, dtype=dtype) if with_sinks else None

    def attended(ends: list[int], num_rows: int, page: int = PAGE, max_len: int = 4096) -> Tensor:
        """The last rows of as many sequences as there are ends, which share their pages."""
        num_pages = -(-LENGTH // page)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page))
        caches = []
        for tokens in (keys, values):
            cache = tokens.new_full((num_pages * page, *tokens.shape[1:]), torch.nan)
            cache[:LENGTH] = tokens
            paged = cache.view(num_pages, page, *tokens.shape[1:])
            caches.append(torch.empty_like(paged).index_copy_(0, order.to(DEVICE), paged))
        table = torch.zeros(len(ends), max_len // page, dtype=torch.int32)
        table[:, :num_pages] = order.int()
        rows = torch.cat([query[end - num_rows : end] for end in ends])
        items = list_items(
            torch.arange(len(ends) + 1, device=DEVICE) * num_rows,
            torch.tensor(ends, device=DEVICE),
            torch.arange(len(ends), device=DEVICE),
            len(rows),
            num_kv_heads,
            num_heads // num_kv_heads,
            max_len,
            batch_invariant=True,
        )
        return paged_attention(
            rows, *caches, items, table.to(DEVICE), head_dim**-0.5, window, softcap, sinks
        )

    whole = attended([LENGTH], LENGTH)
    assert not whole.isnan().any()
    # A size of pages that the kernels of large heads for Hopper GPUs take, too.
    other_page = 8 if head_dim > 128 else 5
    for num_rows in (1, *([4] if ON_GPU else []), 5, 16, 17):
        ends = [end for end in ENDS if end >= num_rows]
        truth = torch.cat([whole[end - num_rows : end] for end in ends])
        assert torch.equal(attended(ends, num_rows), truth), num_rows
        assert torch.equal(attended(ends, num_rows, other_page, LENGTH + 9), truth), num_rows
        last = [ends[-1]]
        assert torch.equal(attended(last, num_rows), whole[LENGTH - num_rows :]), num_rows


@pytest.mark.parametrize(
    "heads", [Heads(2, 1, 16, 16, None, None, False), Heads(4, 4, 16, 16, 70, 5.0, True)]
)
def test_attention_that_sums_otherwise_is_found_out_at_load(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:
        monkeypatch.setattr(attention_items, "BATCH_INVARIANT_UNIT", 64)
        monkeypatch.setattr(batch_invariant_attention, "BATCH_INVARIANT_UNIT", 64)
    find_out = sums_alike.__wrapped__.__wrapped__  # not from the cache
    assert find_out(heads, DTYPE, DTYPE, DEVICE, 2048)

    def by_batch(*args: Any, batch_invariant: bool) -> Any:
        return list_items(*args, batch_invariant=batch_invariant and len(args[1]) == 1)

    monkeypatch.setattr(batch_invariant_attention, "list_items", by_batch)
    assert not find_out(heads, DTYPE, DTYPE, DEVICE, 2048)


NARROW: list[tuple[Kind, int, bool]] = [
    ("fp8", 1024, False),
    ("fp8", 128, False),
    ("int8", 32, True),
    ("int4", 64, False),
    ("fp4", 32, False),
]


@pytest.mark.parametrize(
    ("kind", "group", "with_zeros", "num_splits"),
    [
        # The interpreter tries each format with one of the two, and a GPU with both.
        pytest.param(
            *format_, splits, marks=pytest.mark.sweep if not ON_GPU and i % 2 != splits // 4 else ()
        )
        for i, format_ in enumerate(NARROW)
        for splits in (1, 4)
    ],
)
def test_narrow_products(
    kind: Kind, group: int, with_zeros: bool, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts, whose last program merges, and with programs that take all splits themselves."""
    monkeypatch.setattr(narrow_linear, "_num_splits", lambda matrix, gated=False: num_splits)
    monkeypatch.setattr(narrow_linear, "MAX_SPLIT_ROWS", 20)
    num_out, num_in, num_rows = 64, 1024, 70
    generator = torch.Generator().manual_seed(0)
    end = 16 if kind in ("int4", "fp4") else 120
    codes = torch.randint(0, end, (num_out, num_in), generator=generator, dtype=torch.uint8)
    if kind in ("fp8", "int8"):
        codes = codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    groups = (num_in // group, num_out)
    zero = torch.randint(0, 16, groups, generator=generator, dtype=torch.int8)
    matrix = narrow_matrix(
        kind,
        codes.to(DEVICE),
        (torch.rand(groups, generator=generator) / 100 + 0.001).to(DEVICE),
        group=group,
        zero=zero.to(DEVICE) if with_zeros else None,
    )
    x, bias = randn(num_rows, num_in), randn(num_out, seed=1)
    residual, norm = randn(num_rows, num_out, seed=2), Norm(randn(num_out, seed=3), 1e-5)

    def computed(rows: slice) -> list[Tensor]:
        some = x[rows]
        plain = narrow_linear.narrow_linear(some, matrix, bias, batch_invariant=True)
        gated = narrow_linear.narrow_linear(some, matrix, gated=True, batch_invariant=True)
        total = residual[rows].clone()
        normed = narrow_linear.add_narrow_linear(
            total, some, matrix, norm=norm, batch_invariant=True
        )
        return [plain, gated, total, rms_norm(total, norm) if normed is None else normed]

    whole = computed(slice(num_rows))
    for rows in (slice(3, 4), slice(0, 17), slice(20, 53), slice(num_rows - 65, num_rows)):
        for got, expected in zip(computed(rows), whole, strict=True):
            assert torch.equal(got, expected[rows]), rows
