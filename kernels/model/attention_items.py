"""What attention has to do for a batch, listed once for all of a model's layers.

An item is a block of a sequence's rows over one split of its tokens. Rows of a prefill chunk see
their tokens in one go. Where sequences have few rows, one of many tokens is split over programs: by
a length that follows from its own, and from how many sequences a batch is made for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import tl, triton

MAX_SPLITS = 16
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
WIDTH = tl.constexpr(8)  # of an item; see the kernel


class AttentionItems(NamedTuple):
    """The items of one batch, for layers that pack `block_m` query heads and rows together."""

    items: Tensor  # [most items possible, WIDTH] int32
    num_items: Tensor  # [1] int32
    num_row_blocks: int  # at most; a count that needs no length on the host
    block_m: int
    block_q: int  # rows of an item
    splits: bool


def list_items(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    num_rows: int,
    num_kv_heads: int,
    group: int,
) -> AttentionItems:
    """List the items of a batch for layers whose KV heads serve `group` query heads each.

    The list's shape follows from shapes alone, so that a captured launch stays right.

    Shape:
        cu_seqlens_q: [B + 1]; sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i + 1]
        seq_lens: [B], tokens a sequence attends to, its own rows included
        slots: [B], each sequence's row of the block table
    """
    num_reqs = len(seq_lens)
    # Few rows a sequence make decodes and verifications; many make prefill chunks.
    rows_per_req = triton.cdiv(num_rows, num_reqs)
    splits = rows_per_req <= 16
    block_m = min(64, triton.next_power_of_2(rows_per_req * group)) if splits else 128
    block_m = max(16, block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    # Sequence i starts at row block cu_seqlens_q[i] // block_q + i.
    num_row_blocks = num_rows // block_q + num_reqs
    most = num_row_blocks * (MAX_SPLITS if splits else 1)
    # The nearer sequences come to filling the GPU by themselves, the longer are their splits, which
    # are left for where one would hold up the others.
    num_blocks = num_reqs * num_kv_heads
    share = 1024 * num_blocks // num_programs(seq_lens.device, 1)
    min_split_tokens = min(1024, max(256, triton.next_power_of_2(share)))
    items = torch.empty(most, WIDTH.value, dtype=torch.int32, device=seq_lens.device)
    num_items = torch.empty(1, dtype=torch.int32, device=seq_lens.device)
    _list_items_kernel[(num_reqs,)](
        items,
        num_items,
        cu_seqlens_q,
        seq_lens,
        slots,
        num_reqs,
        REQS=max(32, triton.next_power_of_2(num_reqs)),
        BLOCK_Q=block_q,
        MIN_SPLIT_TOKENS=min_split_tokens if splits else 0,
        num_warps=1,
    )
    return AttentionItems(items, num_items, num_row_blocks, block_m, block_q, splits)


@triton.jit(do_not_specialize=["num_reqs"])
def _list_items_kernel(
    items_ptr,  # [most, WIDTH]
    num_items_ptr,  # [1]
    cu_seqlens_q_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    slots_ptr,  # [num_reqs]
    num_reqs,
    REQS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,  # 0: nothing is split
):
    """One program: the items of one sequence."""
    request = tl.program_id(0)
    i = tl.arange(0, REQS)
    is_req = i < num_reqs
    first_rows = tl.load(cu_seqlens_q_ptr + i, mask=is_req, other=0).to(tl.int32)
    query_lens = tl.load(cu_seqlens_q_ptr + i + 1, mask=is_req, other=0).to(tl.int32) - first_rows
    seq_lens = tl.load(seq_lens_ptr + i, mask=is_req, other=0).to(tl.int32)
    split_tokens = tl.full([REQS], 1 << 30, tl.int32)
    if MIN_SPLIT_TOKENS > 0:
        split_tokens = tl.full([REQS], MIN_SPLIT_TOKENS, tl.int32)
        for _ in tl.static_range(16):
            split_tokens = tl.where(
                split_tokens * _MAX_SPLITS < seq_lens, split_tokens * 2, split_tokens
            )
    # Sequences without tokens have one split, which is empty.
    num_splits = tl.maximum((seq_lens + split_tokens - 1) // split_tokens, 1)
    num_items = (query_lens + BLOCK_Q - 1) // BLOCK_Q * num_splits
    if request == 0:
        tl.store(num_items_ptr, tl.sum(num_items, 0))
    mine = i == request
    first_item = tl.sum(tl.where(i < request, num_items, 0), 0)
    num_items = tl.sum(tl.where(mine, num_items, 0), 0)
    num_splits = tl.sum(tl.where(mine, num_splits, 0), 0)
    split_tokens = tl.sum(tl.where(mine, split_tokens, 0), 0)
    first_row = tl.sum(tl.where(mine, first_rows, 0), 0)
    query_len = tl.sum(tl.where(mine, query_lens, 0), 0)
    context_len = tl.sum(tl.where(mine, seq_lens, 0), 0) - query_len
    slot = tl.load(slots_ptr + request).to(tl.int32)
    for start in range(0, num_items, 32):
        item = start + tl.arange(0, 32)
        mask = item < num_items
        first_q = item // num_splits * BLOCK_Q
        at = items_ptr + (first_item + item) * WIDTH
        tl.store(at, first_row + first_q, mask=mask)
        tl.store(at + 1, tl.minimum(query_len - first_q, BLOCK_Q), mask=mask)
        tl.store(at + 2, context_len + first_q, mask=mask)  # position of the first row
        tl.store(at + 3, slot, mask=mask)
        tl.store(at + 4, item % num_splits, mask=mask)
        tl.store(at + 5, split_tokens, mask=mask)
        # As many row blocks as there can be lie before this one; see the wrapper.
        tl.store(at + 6, first_row // BLOCK_Q + request + first_q // BLOCK_Q, mask=mask)
        tl.store(at + 7, context_len + tl.zeros_like(item), mask=mask)
