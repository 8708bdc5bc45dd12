"""The paged attention kernel against the plain-torch reference, over ragged batches."""

from functools import partial

import pytest
import torch
from grids import pairwise
from random_tensors import normals
from verification import DEVICE, HAS_KERNELS

from outrider.kernels.model import attention_items
from outrider.kernels.model import paged_attention as module
from outrider.kernels.model.attention_items import list_items
from outrider.kernels.model.attention_reference import (
    paged_attention_reference,
    row_blocks,
    whole_block,
)
from outrider.kernels.model.fp8 import to_e4m3
from outrider.kernels.model.paged_attention import paged_attention

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")

PAGE = 16
# A GPU takes minutes to compile the products of float32 that the interpreter proves.
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
# Rows and context before them: a prefill, a decode, verifications, a chunk behind whole blocks.
BATCH = [(37, 0), (1, 90), (5, 63), (9, 15), (1, 0), (70, 133)]
# One over three splits, one whose rows lie on both sides of a border, one of a single split.
LONG = [(1, 600), (5, 253), (3, 100)]


@pytest.mark.parametrize(
    ("heads", "mask", "batch"),
    pairwise(
        # Query heads, KV heads, their size, that of values.
        [(4, 4, 64, 64), (6, 2, 40, 24), (9, 3, 64, 64), (8, 1, 128, 128), (7, 1, 16, 16)],
        # Window, softcap, whether there are sinks.
        [(None, None, False), (8, None, False), (None, 5.0, False), (70, None, True)],
        [BATCH, BATCH[1:5], [(5, 300)]],
    ),
)
def test_kernel_equals_reference(
    heads: tuple[int, int, int, int],
    mask: tuple[int | None, float | None, bool],
    batch: list[tuple[int, int]],
) -> None:
    for batch_invariant in (False, True):
        check(batch, *heads, *mask, DTYPE, batch_invariant)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("batch", [BATCH, BATCH[1:5], [(5, 300)]], ids=["mixed", "decode", "alone"])
def test_kernel_equals_reference_in_float32(batch: list[tuple[int, int]]) -> None:
    check(batch, 6, 2, 40, 24, 70, 5.0, True)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("batch", [BATCH, LONG, [(1, 150)]], ids=["mixed", "long", "alone"])
def test_pages_may_be_fp8(batch: list[tuple[int, int]], batch_invariant: bool) -> None:
    check(batch, 6, 2, 40, 24, 70, None, True, DTYPE, batch_invariant, in_fp8=True)
    check(batch, 8, 2, 64, 64, None, None, False, DTYPE, batch_invariant, in_fp8=True)


def test_one_row_of_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_programs", lambda *_: 132)  # more than there are blocks
    check([(1, 150)], 32, 8, 128, 128, None, None, False)
    check([(1, 150)], 32, 8, 128, 128, None, None, False, in_fp8=True)


@pytest.mark.parametrize(
    ("window", "with_sinks", "batch_invariant"), pairwise([None, 300], [False, True], [False, True])
)
def test_splits_of_long_sequences_are_merged(
    window: int | None, with_sinks: bool, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_items, "num_programs", lambda *_: 132)  # too few sequences
    for _ in range(2):  # the second launch finds the counters as the first left them
        check(LONG, 6, 2, 40, 24, window, None, with_sinks, batch_invariant=batch_invariant)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("mask", [(None, None, False), (300, None, True), (None, 5.0, True)])
@pytest.mark.parametrize("rows", [1, 4, 5, 16])
def test_few_rows_of_large_heads(rows: int, mask: tuple[int | None, float | None, bool]) -> None:
    batch = [(rows, 600), (rows, 0), (rows, 510)]
    for batch_invariant in (False, True):
        check(batch, 6, 1, 256, 256, *mask, DTYPE, batch_invariant)


# Blocks of drafts: of one row, of more than an item holds, over a border of splits, the first rows.
BLOCKS = [(1, 40), (17, 30), (8, 250), (5, 0)]


@pytest.mark.parametrize(
    ("heads", "window"), pairwise([(4, 4, 64, 64), (6, 2, 40, 24), (8, 1, 128, 128)], [None, 20])
)
def test_rows_that_are_not_causal_see_those_behind_them(
    heads: tuple[int, int, int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(BLOCKS, *heads, window, None, False, DTYPE, causal=False)
    check([(70, 133)], *heads, window, None, False, DTYPE, causal=False)  # as a prefill
    monkeypatch.setattr(attention_items, "num_programs", lambda *_: 132)  # so that splits are made
    check([(8, 250), (3, 600)], *heads, window, None, True, DTYPE, causal=False)


def check(
    batch: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
    in_fp8: bool = False,
    causal: bool = True,
) -> None:
    randn = normals(num_heads, dtype)
    num_rows = sum(rows for rows, _ in batch)
    seq_lens = [rows + context for rows, context in batch]
    # What is past a sequence's end holds NaN, as a page of a broken sequence may; so does page 0,
    # where padding writes, and what lies before the windows of all rows.
    k_cache = randn(96, PAGE, num_kv_heads, head_dim)
    v_cache = randn(96, PAGE, num_kv_heads, value_dim)
    k_cache[0] = v_cache[0] = float("nan")
    pages = (torch.randperm(95, generator=torch.Generator().manual_seed(num_heads)) + 1).int()
    table = torch.zeros(len(batch), 40, dtype=torch.int32)
    for i, seq_len in enumerate(seq_lens):
        count = -(-seq_len // PAGE)
        table[len(batch) - 1 - i, :count], pages = pages[:count], pages[count:]
        tail = table[len(batch) - 1 - i, count - 1]
        k_cache[tail, seq_len - (count - 1) * PAGE :] = float("nan")
        v_cache[tail, seq_len - (count - 1) * PAGE :] = float("nan")
        passed = max(0, batch[i][1] - window + 1) if window else 0  # tokens that no row sees
        for column in range(-(-passed // PAGE)):
            page, end = table[len(batch) - 1 - i, column], passed - column * PAGE
            k_cache[page, :end] = v_cache[page, :end] = float("nan")
    table = table.to(DEVICE)
    k_scale, v_scale = 0.5, 3.0
    of_keys, of_values = (k_scale, v_scale) if in_fp8 else (1.0, 1.0)  # they are of FP8 alone
    if in_fp8:
        k_cache, v_cache = to_e4m3(k_cache / k_scale), to_e4m3(v_cache / v_scale)
    slots = torch.arange(len(batch) - 1, -1, -1, device=DEVICE)
    # As Llama hands it over: heads before rows in memory.
    query = randn(num_heads, num_rows, head_dim).transpose(0, 1)
    sinks = randn(num_heads) if with_sinks else None
    cu = torch.tensor([0, *(rows for rows, _ in batch)]).cumsum(0).int().to(DEVICE)
    scale = head_dim**-0.5
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    out = paged_attention(
        query,
        k_cache,
        v_cache,
        list_items(
            cu,
            lens,
            slots,
            num_rows,
            num_kv_heads,
            num_heads // num_kv_heads,
            table.shape[1] * PAGE,
            batch_invariant=batch_invariant,
        ),
        table,
        scale,
        window,
        softcap,
        sinks,
        k_scale,
        v_scale,
        causal=causal,
    )
    divide = row_blocks if causal else partial(whole_block, causal=False)
    expected = torch.cat(
        [
            paged_attention_reference(
                query[cu[i] : cu[i + 1]].float(),
                k_cache.float().nan_to_num() * of_keys,
                v_cache.float().nan_to_num() * of_values,
                table[slots[i], : -(-seq_len // PAGE)],
                divide(rows, seq_len, window, num_heads // num_kv_heads, torch.float32, DEVICE),
                scale,
                softcap,
                sinks.float() if sinks is not None else None,
            )
            for i, ((rows, _), seq_len) in enumerate(zip(batch, seq_lens, strict=True))
        ]
    )
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
