"""Looks up each row of a batch: its token, where its KV goes, which is the last of a sequence."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton


class Rows(NamedTuple):
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, page * page_size + offset of the positions
    seq_lens: Tensor  # [B] int64


def read_rows(
    slot_of_row: Tensor,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    num_tokens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    ahead: int = 0,
) -> Rows:
    """Look up the rows of a batch, which must have at least as many rows as sequences.

    `positions` and `seq_lens` are relative to `num_tokens`: a sequence's last known token is at -1.
    The result is absolute. Each row gets the token that stands `ahead` after its own.

    Shape:
        slot_of_row, positions: [T] int64
        slots, seq_lens: [B] int64
        num_tokens: [num_slots] int64
        token_ids: [num_slots, width] int32; block_table: [num_slots, pages] int32
    """
    if not uses_triton(token_ids):
        return read_rows_reference(
            slot_of_row, positions, slots, seq_lens, num_tokens, token_ids, block_table, page_size,
            ahead,
        )  # fmt: skip
    assert len(positions) >= len(seq_lens)
    rows = Rows(
        torch.empty_like(positions),
        torch.empty_like(positions),
        torch.empty_like(positions),
        torch.empty_like(seq_lens),
    )
    _read_rows_kernel[(triton.cdiv(len(positions), 256),)](
        *rows,
        slot_of_row,
        positions,
        slots,
        seq_lens,
        num_tokens,
        token_ids,
        block_table,
        len(positions),
        len(seq_lens),
        page_size,
        ahead,
        token_ids.stride(0),
        block_table.stride(0),
        BLOCK=256,
    )
    return rows


def read_rows_reference(
    slot_of_row: Tensor,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    num_tokens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    ahead: int = 0,
) -> Rows:
    positions = positions + num_tokens[slot_of_row]
    page = block_table[slot_of_row, positions // page_size].long()
    return Rows(
        token_ids=token_ids[slot_of_row, positions + ahead].long(),
        positions=positions,
        slot_mapping=page * page_size + positions % page_size,
        seq_lens=seq_lens + num_tokens[slots],
    )


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "ahead"])
def _read_rows_kernel(
    out_ids_ptr,  # [num_rows]
    out_positions_ptr,  # [num_rows]
    slot_mapping_ptr,  # [num_rows]
    out_seq_lens_ptr,  # [num_seqs]
    slot_of_row_ptr,  # [num_rows]
    position_ptr,  # [num_rows]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    num_tokens_ptr,  # [num_slots]
    token_ids_ptr,  # [num_slots, width]
    block_table_ptr,  # [num_slots, pages]
    num_rows,
    num_seqs,
    page_size,
    ahead,
    token_ids_stride,
    block_table_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_seq = row < num_rows, row < num_seqs

    seq_slot = tl.load(slots_ptr + row, mask=is_seq, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=is_seq, other=0)
    seq_len += tl.load(num_tokens_ptr + seq_slot, mask=is_seq, other=0)
    tl.store(out_seq_lens_ptr + row, seq_len, mask=is_seq)

    slot = tl.load(slot_of_row_ptr + row, mask=is_row, other=0)
    position = tl.load(position_ptr + row, mask=is_row, other=0)
    position += tl.load(num_tokens_ptr + slot, mask=is_row, other=0)
    token = tl.load(token_ids_ptr + slot * token_ids_stride + position + ahead, mask=is_row)
    page = tl.load(block_table_ptr + slot * block_table_stride + position // page_size, mask=is_row)
    slot_mapping = page.to(tl.int64) * page_size + position % page_size
    tl.store(out_ids_ptr + row, token.to(tl.int64), mask=is_row)
    tl.store(out_positions_ptr + row, position, mask=is_row)
    tl.store(slot_mapping_ptr + row, slot_mapping, mask=is_row)


def keep_last_rows(
    kept: Tensor, y: Tensor, slots: Tensor, seq_lens: Tensor, bounds: Tensor, num_tokens: Tensor
) -> None:
    """Keep for each sequence the output of its last row that has a known token behind it.

    With n known tokens it is at n - 2; of an unfinished prompt any row is kept.
    Shape: kept [num_slots, H], y [T, H], both dense; slots, seq_lens (absolute) [B]; bounds
        [B + 1], of each sequence's rows; num_tokens [num_slots].
    """
    if not uses_triton(y):
        keep_last_rows_reference(kept, y, slots, seq_lens, bounds, num_tokens)
        return
    assert kept.is_contiguous()
    assert y.is_contiguous()
    width = y.shape[1]
    _keep_last_rows_kernel[(len(slots),)](
        kept, y, slots, seq_lens, bounds, num_tokens, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), **dependent_launch(y.device),
    )  # fmt: skip


def keep_last_rows_reference(
    kept: Tensor, y: Tensor, slots: Tensor, seq_lens: Tensor, bounds: Tensor, num_tokens: Tensor
) -> None:
    first, last = bounds[:-1], bounds[1:] - 1
    row = last - 1 + num_tokens[slots] - seq_lens
    kept[slots] = y[row.clamp(first, last)]


@triton.jit
def _keep_last_rows_kernel(
    kept_ptr,  # [num_slots, WIDTH]
    y_ptr,  # [num_rows, WIDTH]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_tokens_ptr,  # [num_slots]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one sequence."""
    start_next_kernel(DEPENDENT)
    seq = tl.program_id(0)
    # All known since before the pass, whose first launch is an ordinary one.
    slot = tl.load(slots_ptr + seq)
    first = tl.load(bounds_ptr + seq)
    last = tl.load(bounds_ptr + seq + 1) - 1
    row = last - 1 + tl.load(num_tokens_ptr + slot) - tl.load(seq_lens_ptr + seq)
    row = tl.minimum(tl.maximum(row, first), last)
    k = tl.arange(0, BLOCK)
    mask = (k < WIDTH) & (first <= last)  # padding has no rows
    wait_for_inputs(DEPENDENT)
    y = tl.load(y_ptr + row * WIDTH + k, mask=mask)
    tl.store(kept_ptr + slot * WIDTH + k, y, mask=mask)
