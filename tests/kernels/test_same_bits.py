"""On a CPU a row of many comes out as the row alone, to the bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from verification import HAS_AMX, HAS_KERNELS

from outrider.kernels.model import packed_linear as module
from outrider.kernels.model.attention_reference import paged_attention_reference, row_blocks
from outrider.kernels.model.packed_linear import pack_weight, packed_linear

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
PAGE = 16
NUM_ROWS = [2, 3, 4, 5, 7, 9, 16, 17, 31, 33, 64, 255]
LENGTHS = [1, 16, 17, 33, 257, 513]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.skipif(HAS_AMX, reason="not yet on processors with AMX")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "softcap", "with_sinks"),
    [
        (9, 3, 64, None, None, False),
        (4, 2, 16, 8, None, False),
        (8, 2, 128, None, None, False),
        (4, 4, 64, None, None, False),
        (9, 3, 64, 100, 5.0, False),
        (8, 2, 64, None, None, True),
    ],
)
def test_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_pages = 34
    query = randn(num_pages * PAGE, num_heads, head_dim)
    keys, values = (randn(num_pages, PAGE, num_kv_heads, head_dim) for _ in range(2))
    sinks = randn(num_heads) if with_sinks else None

    def attended(first: int, end: int) -> Tensor:
        pages = slice(0, -(-end // PAGE))
        group = num_heads // num_kv_heads
        blocks = row_blocks(end - first, end, window, group, dtype, CPU)
        rows = query[first:end]
        return paged_attention_reference(
            rows, keys, values, pages, blocks, head_dim**-0.5, softcap, sinks
        )

    alone = torch.cat([attended(row, row + 1) for row in range(len(query))])
    for end in (len(query), *LENGTHS):
        for num_rows in (n for n in NUM_ROWS if n <= end):
            got = attended(end - num_rows, end)
            assert torch.equal(got, alone[end - num_rows : end]), (end, num_rows)


@pytest.mark.skipif(HAS_KERNELS, reason="the CPU's own products")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (576, 1536), (97, 40)])
def test_linear_layers(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    packed = pack_weight(weight)
    if packed is None:
        pytest.skip(f"oneDNN has no {dtype} here")
    x = torch.randn(600, num_in, generator=generator).to(dtype)
    alone = torch.cat([packed_linear(row[None], packed) for row in x])
    for num_rows in (*NUM_ROWS, 256, 257, 512, 513, 600):
        for start in (0, 600 - num_rows):
            got = packed_linear(x[start : start + num_rows], packed)
            assert torch.equal(got, alone[start : start + num_rows]), (num_rows, start)


def test_rows_go_to_the_library_in_counts_that_sum_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX, where more than 32 rows sum otherwise, and elsewhere, where one row does."""

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        differs = not 2 <= len(rows) <= 32 or len(rows) == 7
        return rows @ weight.t() * (1 + 1e-9 * differs)

    monkeypatch.setattr(module, "_product", product)
    monkeypatch.setattr(module, "_reorder", lambda weight: weight)
    monkeypatch.setattr(module, "_alike_by_shape", {})
    # Numbers whose sums are exact, so that this machine's own order does not matter.
    weight, x = torch.randint(-99, 99, (3200, 64)).double().split((3000, 200))
    packed = pack_weight(weight)
    assert packed is not None
    assert packed.blocks == tuple(n for n in module._BLOCKS if n <= 32 and n != 7)
    for num_rows in (1, 7, 8, 33, 48, 200):
        assert torch.equal(packed_linear(x[:num_rows], packed), x[:num_rows] @ weight.t())


@pytest.mark.parametrize("num_in", [1, 7, 24, 40, 577])
def test_the_library_reads_no_inputs_behind_the_last(
    num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    product = module._product

    def spied(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.update((rows.shape[1], weight.shape[1]))
        return product(rows, weight, bias)

    monkeypatch.setattr(module, "_product", spied)
    weight, x = torch.randn(65, num_in).bfloat16(), torch.randn(5, num_in).bfloat16()
    packed = pack_weight(weight)
    if packed is None:
        pytest.skip("oneDNN has no bfloat16 here")
    torch.testing.assert_close(packed_linear(x, packed), x @ weight.t())
    assert all(width % 32 == 0 for width in seen)
