"""The rows of a batch, from four numbers a sequence; and which row is the last of a sequence."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton

_ROWS = 256  # at once
_MOST_PARTS = 8  # programs of a sequence
_SEQS = 128  # numbers summed at once


class BatchRows(NamedTuple):
    """Where the rows of a batch are, whichever model computes them. All: int64."""

    slot_of_row: Tensor  # [T]
    positions: Tensor  # [T] absolute
    places: Tensor  # [T] where each row's KV goes: page * page_size + offset
    slots: Tensor  # [B], rows of the block table
    seq_lens: Tensor  # [B] tokens up to each sequence's last row
    cu_seqlens_q: Tensor  # [B + 1], of each sequence's rows


def lay_out(
    sequences: Tensor,
    num_rows: int,
    num_logits: int,
    num_tokens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    ahead: int = 0,
) -> tuple[BatchRows, Tensor, Tensor]:
    """Build a batch of T rows and L logits from four numbers a sequence, and look its rows up.

    Returns the rows, the token that each reads, and which rows get logits: [T], [L] int64.

    A sequence has a slot, the position of its first row, its number of rows, and how many of the
    last of them get logits. The position is relative to `num_tokens`: the last known token is at
    -1. Each row reads the token `ahead` places after its own.

    Rows beyond those of the sequences are padding, at position 0 of the last slot, whose number of
    tokens is 0; logits beyond theirs are of row 0. Sequences may be padding, too: without rows.

    Shape:
        sequences: [4, B] int64, rows may be strided
        num_tokens: [num_slots] int64
        token_ids: [num_slots, width] int32; block_table: [num_slots, pages] int32
    """
    arguments = sequences, num_rows, num_logits, num_tokens, token_ids, block_table, page_size
    if not uses_triton(token_ids):
        return lay_out_reference(*arguments, ahead)
    assert sequences.stride(1) == 1 or sequences.shape[1] == 1
    num_seqs = sequences.shape[1]
    rows = BatchRows(
        sequences.new_empty(num_rows),
        sequences.new_empty(num_rows),
        sequences.new_empty(num_rows),
        sequences[0],
        sequences.new_empty(num_seqs),
        sequences.new_empty(num_seqs + 1),
    )
    row_ids, logits_rows = sequences.new_empty(num_rows), sequences.new_empty(num_logits)
    num_parts = min(triton.cdiv(max(num_rows, num_logits, 1), _ROWS), _MOST_PARTS)
    _lay_out_kernel[(num_seqs + 1, num_parts)](
        rows, row_ids, logits_rows, sequences, sequences.stride(0), num_tokens, token_ids,
        token_ids.stride(0), block_table, block_table.stride(0), num_seqs, num_rows, num_logits,
        len(num_tokens) - 1, page_size, ahead,
        ROWS=_ROWS, SEQS=_SEQS,
    )  # fmt: skip
    return rows, row_ids, logits_rows


def lay_out_reference(
    sequences: Tensor,
    num_rows: int,
    num_logits: int,
    num_tokens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    ahead: int = 0,
) -> tuple[BatchRows, Tensor, Tensor]:
    slots, starts, lens, counts = sequences
    ends, known = lens.cumsum(0), num_tokens[slots]
    bounds = torch.cat((ends.new_zeros(1), ends))
    row = torch.arange(num_rows, device=slots.device)
    seq = torch.arange(len(slots), device=slots.device).repeat_interleave(lens)

    def padded(of_each: Tensor, fill: int, length: int) -> Tensor:
        return torch.cat((of_each, of_each.new_full((length - len(of_each),), fill)))

    first = starts + known - bounds[:-1]
    slot_of_row = padded(slots[seq], len(num_tokens) - 1, num_rows)
    positions = padded(first[seq] + row[: len(seq)], 0, num_rows)
    page = block_table[slot_of_row, positions // page_size].long()
    shift = ends - counts.cumsum(0)
    logits_rows = shift.repeat_interleave(counts)
    logits_rows += torch.arange(len(logits_rows), device=slots.device)
    places = page * page_size + positions % page_size
    rows = BatchRows(slot_of_row, positions, places, slots, starts + lens + known, bounds)
    row_ids = token_ids[slot_of_row, positions + ahead].long()
    return rows, row_ids, padded(logits_rows, 0, num_logits)


def places_of(
    slot_of_row: Tensor, positions: Tensor, block_table: Tensor, page_size: int
) -> Tensor:
    """Where KV of rows goes by another block table than that of `lay_out`, as in `places`.

    Shape: slot_of_row, positions (absolute) [T] int64, block_table [num_slots, pages] int32 -> [T].
    """
    if not uses_triton(positions):
        page = block_table[slot_of_row, positions // page_size].long()
        return page * page_size + positions % page_size
    places = torch.empty_like(positions)
    _places_of_kernel[(triton.cdiv(len(places), _ROWS),)](
        places, slot_of_row, positions, block_table, block_table.stride(0), len(places), page_size,
        ROWS=_ROWS,
    )  # fmt: skip
    return places


@triton.jit(do_not_specialize=["num_rows"])
def _places_of_kernel(
    places_ptr,  # [num_rows]
    slot_of_row_ptr,  # [num_rows]
    positions_ptr,  # [num_rows]
    block_table_ptr,  # [num_slots, pages]
    block_table_stride,
    num_rows,
    page_size,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(slot_of_row_ptr + row, mask=mask, other=0)
    position = tl.load(positions_ptr + row, mask=mask, other=0)
    page = tl.load(block_table_ptr + slot * block_table_stride + position // page_size, mask=mask)
    tl.store(places_ptr + row, page.to(tl.int64) * page_size + position % page_size, mask=mask)


@triton.jit
def _total(numbers_ptr, count, SEQS: tl.constexpr):
    """The sum of the first `count` numbers."""
    total = tl.zeros((), tl.int64)
    for first in range(0, count, SEQS):
        i = first + tl.arange(0, SEQS)
        total += tl.sum(tl.load(numbers_ptr + i, mask=i < count, other=0), 0)
    return total


@triton.jit(do_not_specialize=["stride", "num_seqs", "num_rows", "num_logits", "dummy", "ahead"])
def _lay_out_kernel(
    rows,
    row_ids_ptr,  # [num_rows]
    logits_rows_ptr,  # [num_logits]
    sequences_ptr,  # [4, num_seqs]
    stride,
    num_tokens_ptr,  # [num_slots]
    token_ids_ptr,  # [num_slots, width]
    token_ids_stride,
    block_table_ptr,  # [num_slots, pages]
    block_table_stride,
    num_seqs,
    num_rows,
    num_logits,
    dummy,
    page_size,
    ahead,
    ROWS: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Each program: a part of the rows and logits of one sequence; of the padding, if it is the
    last.
    """
    seq, part = tl.program_id(0), tl.program_id(1)
    lens_ptr, counts_ptr = sequences_ptr + 2 * stride, sequences_ptr + 3 * stride
    first_row, first_logits = _total(lens_ptr, seq, SEQS), _total(counts_ptr, seq, SEQS)
    is_seq = seq < num_seqs
    slot = tl.load(sequences_ptr + seq, mask=is_seq, other=dummy)
    start = tl.load(sequences_ptr + stride + seq, mask=is_seq, other=0)
    length = tl.load(lens_ptr + seq, mask=is_seq, other=num_rows - first_row)
    count = tl.load(counts_ptr + seq, mask=is_seq, other=num_logits - first_logits)
    start += tl.load(num_tokens_ptr + slot)
    end_row = first_row + length
    if part == 0:
        tl.store(rows.cu_seqlens_q + seq, first_row)
        tl.store(rows.seq_lens + seq, start + length, mask=is_seq)

    step = tl.num_programs(1) * ROWS
    for i in range(part * ROWS, length, step):
        offset = i + tl.arange(0, ROWS)
        mask = offset < length
        position = tl.where(is_seq, start + offset, 0)
        token = tl.load(token_ids_ptr + slot * token_ids_stride + position + ahead, mask=mask)
        pages_ptr = block_table_ptr + slot * block_table_stride
        page = tl.load(pages_ptr + position // page_size, mask=mask)
        row = first_row + offset
        tl.store(rows.slot_of_row + row, tl.zeros_like(row) + slot, mask=mask)
        tl.store(rows.positions + row, position, mask=mask)
        place = page.to(tl.int64) * page_size + position % page_size
        tl.store(rows.places + row, place, mask=mask)
        tl.store(row_ids_ptr + row, token.to(tl.int64), mask=mask)

    for i in range(part * ROWS, count, step):
        offset = i + tl.arange(0, ROWS)
        row = tl.where(is_seq, end_row - count + offset, 0)
        tl.store(logits_rows_ptr + first_logits + offset, row, mask=offset < count)


def last_known_rows(
    slots: Tensor, seq_lens: Tensor, bounds: Tensor, num_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The last row of each sequence that has a known token behind it, and the tokens up to it.

    With n known tokens it is at n - 2; of an unfinished prompt it is the last. Padding has row 0,
    and one token.
    Shape: as `keep_last_rows` -> [B], [B] int64
    """
    if not uses_triton(slots):
        return last_known_rows_reference(slots, seq_lens, bounds, num_tokens)
    rows, lens = torch.empty_like(seq_lens), torch.empty_like(seq_lens)
    size = triton.cdiv(len(slots), _SEQS)
    _last_known_rows_kernel[(size,)](
        rows, lens, slots, seq_lens, bounds, num_tokens, len(slots), SEQS=_SEQS
    )
    return rows, lens


def last_known_rows_reference(
    slots: Tensor, seq_lens: Tensor, bounds: Tensor, num_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    first, last = bounds[:-1], bounds[1:] - 1
    row = (last - 1 + num_tokens[slots] - seq_lens).clamp(first, last)
    has_rows = first <= last
    return row.where(has_rows, 0), (seq_lens - last + row).where(has_rows, 1)


@triton.jit
def _last_known_row(seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_tokens_ptr, mask):
    """That row of sequences, their slots, tokens up to their last rows, and these."""
    slot = tl.load(slots_ptr + seq, mask=mask, other=0)
    first = tl.load(bounds_ptr + seq, mask=mask, other=0)
    last = tl.load(bounds_ptr + seq + 1, mask=mask, other=0) - 1
    seq_len = tl.load(seq_lens_ptr + seq, mask=mask, other=0)
    row = last - 1 + tl.load(num_tokens_ptr + slot, mask=mask, other=0) - seq_len
    return tl.minimum(tl.maximum(row, first), last), slot, seq_len, first, last


@triton.jit(do_not_specialize=["num_seqs"])
def _last_known_rows_kernel(
    rows_ptr,  # [num_seqs]
    lens_ptr,  # [num_seqs]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_tokens_ptr,  # [num_slots]
    num_seqs,
    SEQS: tl.constexpr,
):
    seq = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    mask = seq < num_seqs
    row, _, seq_len, first, last = _last_known_row(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_tokens_ptr, mask
    )
    has_rows = first <= last
    tl.store(rows_ptr + seq, tl.where(has_rows, row, 0), mask=mask)
    tl.store(lens_ptr + seq, tl.where(has_rows, seq_len - last + row, 1), mask=mask)


def keep_last_rows(
    kept: Tensor,
    y: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    bounds: Tensor,
    num_tokens: Tensor,
    *,
    are_last: bool = False,
) -> None:
    """Keep for each sequence the output of its last row that has a known token behind it.

    With n known tokens it is at n - 2; of an unfinished prompt any row is kept. `are_last`: y is of
    these rows alone.
    Shape: kept [num_slots, H], y [T, H] or, of the last rows, [B, H], both dense; slots, seq_lens
        (absolute) [B]; bounds [B + 1], of each sequence's rows; num_tokens [num_slots].
    """
    if not uses_triton(y):
        keep_last_rows_reference(kept, y, slots, seq_lens, bounds, num_tokens, are_last=are_last)
        return
    assert kept.is_contiguous()
    assert y.is_contiguous()
    width = y.shape[1]
    _keep_last_rows_kernel[(len(slots),)](
        kept, y, slots, seq_lens, bounds, num_tokens, WIDTH=width, ARE_LAST=are_last,
        BLOCK=triton.next_power_of_2(width), **dependent_launch(y.device),
    )  # fmt: skip


def keep_last_rows_reference(
    kept: Tensor,
    y: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    bounds: Tensor,
    num_tokens: Tensor,
    *,
    are_last: bool = False,
) -> None:
    rows, _ = last_known_rows_reference(slots, seq_lens, bounds, num_tokens)
    has_rows = bounds[:-1] < bounds[1:]
    kept[slots[has_rows]] = (y if are_last else y[rows])[has_rows]


@triton.jit
def _keep_last_rows_kernel(
    kept_ptr,  # [num_slots, WIDTH]
    y_ptr,  # [num_rows, WIDTH] or, ARE_LAST, [num_seqs, WIDTH]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_tokens_ptr,  # [num_slots]
    WIDTH: tl.constexpr,
    ARE_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one sequence."""
    start_next_kernel(DEPENDENT)
    seq = tl.program_id(0)
    # All known since before the pass, whose first launch is an ordinary one.
    row, slot, _, first, last = _last_known_row(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_tokens_ptr, True
    )
    if ARE_LAST:
        row = seq.to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = (k < WIDTH) & (first <= last)  # padding has no rows
    wait_for_inputs(DEPENDENT)
    y = tl.load(y_ptr + row * WIDTH + k, mask=mask)
    tl.store(kept_ptr + slot * WIDTH + k, y, mask=mask)
