"""On a CPU a row of many comes out as the row alone, to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_tensors import normals
from torch import Tensor
from verification import HAS_KERNELS

from outrider.kernels.model import packed_linear as module
from outrider.kernels.model.attention_reference import (
    KEY_BLOCK,
    paged_attention_reference,
    row_blocks,
)
from outrider.kernels.model.batch_invariant_attention import Heads, rows_at_once
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
    randn = normals(dtype=dtype, device=CPU)
    num_pages = 34
    query = randn(num_pages * PAGE, num_heads, head_dim)
    keys, values = (randn(num_pages, PAGE, num_kv_heads, head_dim) for _ in range(2))
    sinks = randn(num_heads) if with_sinks else None
    dims = (head_dim, head_dim)
    heads = Heads(num_heads, num_kv_heads, *dims, window, softcap, with_sinks)
    at_once = rows_at_once(heads, dtype, dtype)

    def attended(first: int, end: int) -> Tensor:
        pages = slice(0, -(-end // PAGE))
        group = num_heads // num_kv_heads
        blocks = row_blocks(end - first, end, window, group, dtype, CPU, at_once)
        rows = query[first:end]
        return paged_attention_reference(
            rows, keys, values, pages, blocks, head_dim**-0.5, softcap, sinks
        )

    alone = torch.cat([attended(row, row + 1) for row in range(len(query))])
    for end in (len(query), *LENGTHS):
        for num_rows in (n for n in NUM_ROWS if n <= end):
            got = attended(end - num_rows, end)
            assert torch.equal(got, alone[end - num_rows : end]), (end, num_rows)


def test_rows_are_handed_over_one_by_one_if_several_sum_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with AMX, where wide heads of several rows are summed in another order."""
    attend = F.scaled_dot_product_attention
    seen = set()

    def by_rows(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.add(query.shape[2])
        return attend(query, key, value, **options) * (1 + 1e-2 * (query.shape[2] > 4))

    sound, spoilt = Heads(8, 2, 64, 64, None, None, False), Heads(8, 2, 32, 32, None, None, False)
    assert rows_at_once(sound, torch.float32, torch.float32) in (1, KEY_BLOCK)
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_rows)
    assert rows_at_once(spoilt, torch.float32, torch.float32) == 1
    assert max(seen) > 4
    blocks = row_blocks(20, 50, None, 4, torch.float32, CPU, 1)
    assert [block.rows for block in blocks] == [slice(i, i + 1) for i in range(20)]
    assert [block.num_keys for block in blocks] == [32] * 2 + [48] * 16 + [64] * 2


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
