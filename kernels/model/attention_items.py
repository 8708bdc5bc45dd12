"""Lists the work of attention for a batch, once for all layers of a model.

An item is a block of a sequence's rows over one split of its tokens. For prefill chunks, an item
covers all tokens. For few rows, a long sequence is split over several programs. A sequence's last
rows, which see the most tokens, come first: a GPU should not end with its longest items.

The first 16 splits are one unit long; then there are 8 splits for every doubling of the position.
So no split is longer than a unit or than an eighth of the tokens before it. If the bits of a row
must not depend on the batch, the unit is fixed, and so are the splits. Otherwise the unit depends
on the number of sequences that the batch has room for, and doubles until 16 splits hold the
sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import tl, triton

_MIN_UNIT = 256
BATCH_INVARIANT_UNIT = 512  # measured on an H200: less would cost many sequences more than few gain
_MAX_GROWN_SPLITS = tl.constexpr(16)
_MOST_DOUBLINGS = 16  # of a unit
_NO_UNIT = 1 << 30  # no sequence is split
PROMPT_ROWS = 128  # rows, times query heads of a KV head, of an item of a prompt
FEW_ROWS = 64  # the same, at most, of an item of few rows, unless a KV head has more query heads
WIDTH = tl.constexpr(9)  # of an item; see the kernel


class AttentionItems(NamedTuple):
    """The items of one batch, for layers that pack `block_m` query heads and rows together."""

    items: Tensor  # [most items possible, WIDTH] int32
    num_items: Tensor  # [1] int32
    num_row_blocks: int  # an upper bound that the host can compute without the lengths
    block_m: int
    block_q: int  # rows of an item
    num_splits: int  # the most splits of a row; 1: each item covers all tokens
    is_prefill: bool
    batch_invariant: bool  # whether a row's order of summation is independent of the batch


def list_items(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    num_rows: int,
    num_kv_heads: int,
    group: int,
    max_seq_len: int,
    *,
    batch_invariant: bool = False,
    holds_prompt: bool = False,
) -> AttentionItems:
    """List the items of a batch for layers whose KV heads serve `group` query heads each.

    The shape of the list depends only on shapes, so a captured launch stays valid. With
    `batch_invariant`, a row's order of summation does not depend on the batch. `holds_prompt`: some
    of the sequences have many rows, however few there are on the average.

    Shape:
        cu_seqlens_q: [B + 1]; sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i + 1]
        seq_lens: [B], tokens a sequence attends to, its own rows included
        slots: [B], each sequence's row of the block table
    """
    num_reqs = len(seq_lens)
    # Few rows a sequence: decodes and verifications. Many: prefill chunks.
    rows_per_req = triton.cdiv(num_rows, num_reqs)
    is_prefill = holds_prompt or rows_per_req > 16
    few = min(FEW_ROWS, triton.next_power_of_2(rows_per_req * group))
    block_m = PROMPT_ROWS if is_prefill else few
    block_m = max(16, block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    # Sequence i starts at row block cu_seqlens_q[i] // block_q + i.
    num_row_blocks = num_rows // block_q + num_reqs
    if batch_invariant:
        unit = BATCH_INVARIANT_UNIT
        num_splits = 1 if is_prefill else _count_splits(max_seq_len, unit)
    else:
        # The better the sequences fill the GPU by themselves, the longer the splits: they only
        # keep a long sequence from delaying the others.
        num_blocks = num_reqs * num_kv_heads
        share = 1024 * num_blocks // num_programs(seq_lens.device, 1)
        unit = min(1024, max(_MIN_UNIT, triton.next_power_of_2(share)))
        unit = _NO_UNIT if is_prefill else unit
        num_splits = min(_MAX_GROWN_SPLITS.value, _count_splits(max_seq_len, unit))
    grows = not batch_invariant and num_splits > 1
    items = torch.empty(
        num_row_blocks * num_splits, WIDTH.value, dtype=torch.int32, device=seq_lens.device
    )
    num_items = torch.empty(1, dtype=torch.int32, device=seq_lens.device)
    _list_items_kernel[(num_reqs,)](
        items, num_items, cu_seqlens_q, seq_lens, slots, num_reqs, block_q, num_splits, unit,
        _MOST_DOUBLINGS if grows else 0,
        REQS=max(64, triton.next_power_of_2(num_reqs)), num_warps=1,
    )  # fmt: skip
    return AttentionItems(
        items, num_items, num_row_blocks, block_m, block_q, num_splits, is_prefill, batch_invariant
    )


def _count_splits(num_tokens: int, unit: int) -> int:
    """The number of splits, as `split_of` counts them."""
    num_units = -(-num_tokens // unit)
    octave = max((num_units - 1).bit_length() - 4, 0)
    return 8 * octave + -(-num_units >> octave) if num_units else 1


@triton.jit
def split_of(position, unit):
    """The split that a position lies in."""
    place = position // unit
    # A float's exponent is 3 up to place 15, and one more for each doubling.
    exponent = (tl.maximum(place, 8).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    octave = exponent - 3
    return 8 * octave + (place >> octave)


@triton.jit
def start_of(split, unit):
    """The first position of a split."""
    octave = tl.maximum(split // 8 - 1, 0)
    return ((split - 8 * octave) << octave) * unit


# One kernel for all kinds of batches: what it saves to compile is more than constants would gain.
@triton.jit(do_not_specialize=["num_reqs", "block_q", "most_splits", "unit", "num_doublings"])
def _list_items_kernel(
    items_ptr,  # [most, WIDTH]
    num_items_ptr,  # [1]
    cu_seqlens_q_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    slots_ptr,  # [num_reqs]
    num_reqs,
    block_q,
    most_splits,  # of a row; 1: an item covers all tokens
    unit,
    num_doublings,  # of a unit, at most, until few splits hold the sequence
    REQS: tl.constexpr,
):
    """Each program: the items of one sequence."""
    request = tl.program_id(0)
    i = tl.arange(0, REQS)
    is_req = i < num_reqs
    first_rows = tl.load(cu_seqlens_q_ptr + i, mask=is_req, other=0).to(tl.int32)
    query_lens = tl.load(cu_seqlens_q_ptr + i + 1, mask=is_req, other=0).to(tl.int32) - first_rows
    seq_lens = tl.load(seq_lens_ptr + i, mask=is_req, other=0).to(tl.int32)
    units = tl.zeros([REQS], tl.int32) + unit
    for _ in range(num_doublings):
        units = tl.where(units * _MAX_GROWN_SPLITS < seq_lens, units * 2, units)
    # Sequences without tokens have one split, which is empty.
    num_splits = tl.minimum(split_of(tl.maximum(seq_lens - 1, 0), units) + 1, most_splits)
    num_items = (query_lens + block_q - 1) // block_q * num_splits
    if request == 0:
        tl.store(num_items_ptr, tl.sum(num_items, 0))
    mine = i == request
    first_item = tl.sum(tl.where(i < request, num_items, 0), 0)
    num_items = tl.sum(tl.where(mine, num_items, 0), 0)
    num_splits = tl.sum(tl.where(mine, num_splits, 0), 0)
    unit = tl.sum(tl.where(mine, units, 0), 0)
    first_row = tl.sum(tl.where(mine, first_rows, 0), 0)
    query_len = tl.sum(tl.where(mine, query_lens, 0), 0)
    context_len = tl.sum(tl.where(mine, seq_lens, 0), 0) - query_len
    slot = tl.load(slots_ptr + request).to(tl.int32)
    num_blocks = num_items // num_splits
    for start in range(0, num_items, 32):
        item = start + tl.arange(0, 32)
        mask = item < num_items
        first_q = (num_blocks - 1 - item // num_splits) * block_q
        at = items_ptr + (first_item + item) * WIDTH
        tl.store(at, first_row + first_q, mask=mask)
        tl.store(at + 1, tl.minimum(query_len - first_q, block_q), mask=mask)
        tl.store(at + 2, context_len + first_q, mask=mask)  # position of the first row
        tl.store(at + 3, slot, mask=mask)
        tl.store(at + 4, item % num_splits, mask=mask)
        tl.store(at + 5, unit + tl.zeros_like(item), mask=mask)
        # The row block: assumes the most blocks that there can be before it; see the wrapper.
        tl.store(at + 6, first_row // block_q + request + first_q // block_q, mask=mask)
        tl.store(at + 7, context_len + tl.zeros_like(item), mask=mask)
        tl.store(at + 8, context_len + query_len + tl.zeros_like(item), mask=mask)
