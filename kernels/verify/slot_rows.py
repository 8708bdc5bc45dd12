"""Reads and writes the slots of a batch, in one launch each way.

A sequence's anchor, the position of the step's first new token, is the number of its known tokens.
The last slot is a dummy that padding reads and writes; its number of known tokens stays 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .drafts import DraftSample, Verified
from .sampling import STATE_WIDTH, Sampling

_STATE_WIDTH = tl.constexpr(STATE_WIDTH)
_ROWS = 32  # handled by one program
_LOGITS = 4096  # copied by one program


class SlotState(NamedTuple):
    """The contents of the slots. Passed whole to kernels."""

    token_ids: Tensor  # [num_slots, width] int32
    num_tokens: Tensor  # [num_slots] int64, known ones
    sampling: Sampling  # [num_slots] each


class SlotRows(NamedTuple):
    sampling: Sampling  # [B] each
    anchor: Tensor  # [B] int64
    position: Tensor  # [B] int64, of the first token to draw
    draft_ids: Tensor  # [B, K] int64, the tokens from the anchor on


def read_slots(
    slots: SlotState,
    slot: Tensor,
    num_drafts: int = 0,
    offset: Tensor | None = None,
) -> SlotRows:
    """Read what a batch needs to draw, and the drafts to verify.

    Parameters
    ----------
    slot
        Shape: [B] of any integers.
    num_drafts
        Drafts to read for each row: K.
    offset
        Position of the token to draw, minus the anchor; None: 0. Shape: [B].
    """
    if not uses_triton(slot):
        return read_slots_reference(slots, slot, num_drafts, offset)
    num_rows, new = len(slot), slots.num_tokens.new_empty
    rows = SlotRows(
        Sampling(*(field.new_empty(num_rows) for field in slots.sampling)),
        new(num_rows),
        new(num_rows),
        new(num_rows, num_drafts),
    )
    _read_slots_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *rows,
        *slots,
        slots.token_ids.stride(0),
        slot,
        offset,
        num_rows,
        num_drafts,
        ROWS=_ROWS,
        COLUMNS=triton.next_power_of_2(max(num_drafts, 1)),
    )
    return rows


def read_slots_reference(
    slots: SlotState,
    slot: Tensor,
    num_drafts: int = 0,
    offset: Tensor | None = None,
) -> SlotRows:
    slot = slot.long()
    anchor = slots.num_tokens[slot]
    position = anchor if offset is None else anchor + offset
    draft_at = anchor[:, None] + torch.arange(num_drafts, device=anchor.device)
    draft_ids = slots.token_ids[slot[:, None], draft_at].long()
    return SlotRows(slots.sampling.take(slot), anchor, position, draft_ids)


def write_draft(
    slots: SlotState,
    slot: Tensor,
    position: Tensor,
    offset: Tensor,
    drawn: DraftSample,
    logits: Tensor,
    kept: tuple[Tensor, Tensor] | None,
) -> None:
    """Write one draft a row into its slot, and keep the logits and state that it was drawn from.

    Shape: slot, position, offset (index among the step's drafts) [N] int; logits [N, V']; kept
    [num_slots, K, V'] of any dtype and [num_slots, K, 4], or None to keep nothing.
    """
    if not uses_triton(slot):
        write_draft_reference(slots, slot, position, offset, drawn, logits, kept)
        return
    num_rows, width = logits.shape
    assert logits.stride(1) == 1
    assert drawn.state.is_contiguous()
    assert kept is None or all(x.is_contiguous() for x in kept)
    num_blocks = triton.cdiv(width, _LOGITS) if kept is not None else 1
    _write_draft_kernel[(num_rows, num_blocks)](
        slots.token_ids,
        slots.token_ids.stride(0),
        *(kept or (None, None)),
        kept[0].shape[1] if kept is not None else 0,
        slot,
        position,
        offset,
        *drawn,
        logits,
        logits.stride(0),
        width,
        BLOCK=_LOGITS,
    )


def write_draft_reference(
    slots: SlotState,
    slot: Tensor,
    position: Tensor,
    offset: Tensor,
    drawn: DraftSample,
    logits: Tensor,
    kept: tuple[Tensor, Tensor] | None,
) -> None:
    slots.token_ids[slot, position] = drawn.token_ids.int()
    if kept is not None:
        kept[0][slot, offset] = logits.to(kept[0].dtype)
        kept[1][slot, offset] = drawn.state


def write_verified(slots: SlotState, slot: Tensor, anchor: Tensor, verified: Verified) -> Tensor:
    """Write each row's tokens into its slot from the anchor on, and advance the known tokens.

    Positions after the last token get 0, which is never read. Returns the tokens (padded with -1)
    and a flag for bad logits, for the host.
    Shape: slot, anchor [B] int -> [B, K + 2] int64.
    """
    if not uses_triton(slot):
        return write_verified_reference(slots, slot, anchor, verified)
    num_rows, num_columns = verified.token_ids.shape
    out = verified.token_ids.new_empty(num_rows, num_columns + 1)
    _write_verified_kernel[(triton.cdiv(num_rows, _ROWS),)](
        out,
        slots.token_ids,
        slots.token_ids.stride(0),
        slots.num_tokens,
        len(slots.num_tokens) - 1,
        slot,
        anchor,
        verified,
        num_rows,
        num_columns,
        ROWS=_ROWS,
        COLUMNS=triton.next_power_of_2(num_columns),
    )
    return out


def write_verified_reference(
    slots: SlotState, slot: Tensor, anchor: Tensor, verified: Verified
) -> Tensor:
    slot, anchor = slot.long(), anchor.long()
    positions = anchor[:, None] + torch.arange(verified.token_ids.shape[1], device=anchor.device)
    slots.token_ids[slot[:, None], positions] = verified.token_ids.clamp_min(0).int()
    slots.num_tokens[slot] = anchor + verified.num_tokens
    slots.num_tokens[-1] = 0
    return torch.cat((verified.token_ids, verified.is_bad[:, None]), dim=1)


@triton.jit(do_not_specialize=["num_rows", "num_drafts"])
def _read_slots_kernel(
    out_sampling,
    out_anchor_ptr,  # [num_rows]
    out_position_ptr,  # [num_rows]
    draft_ids_ptr,  # [num_rows, num_drafts]
    token_ids_ptr,  # [num_slots, width]
    num_tokens_ptr,  # [num_slots]
    sampling,
    token_ids_stride,
    slot_ptr,  # [num_rows]
    offset_ptr,  # [num_rows] or None
    num_rows,
    num_drafts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row, mask=inside, other=0).to(tl.int64)
    anchor = tl.load(num_tokens_ptr + slot, mask=inside, other=0)
    position = anchor
    if offset_ptr is not None:
        position += tl.load(offset_ptr + row, mask=inside, other=0)
    tl.store(out_anchor_ptr + row, anchor, mask=inside)
    tl.store(out_position_ptr + row, position, mask=inside)
    for field in tl.static_range(len(sampling)):
        value = tl.load(sampling[field] + slot, mask=inside)
        tl.store(out_sampling[field] + row, value, mask=inside)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (column < num_drafts)
    token_at = token_ids_ptr + (slot * token_ids_stride + anchor)[:, None] + column
    token_ids = tl.load(token_at, mask=mask, other=0)
    at = row[:, None] * num_drafts + column
    tl.store(draft_ids_ptr + at, token_ids.to(tl.int64), mask=mask)


@triton.jit
def _write_draft_kernel(
    token_ids_ptr,  # [num_slots, slots_width]
    token_ids_stride,
    kept_logits_ptr,  # [num_slots, num_drafts, width] or None
    kept_state_ptr,  # [num_slots, num_drafts, STATE_WIDTH] or None
    num_drafts,
    slot_ptr,  # [N]
    position_ptr,  # [N]
    offset_ptr,  # [N]
    drawn_ptr,  # [N]
    state_ptr,  # [N, STATE_WIDTH]
    logits_ptr,  # [N, width]
    logits_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Each program copies a block of a row's logits; a row's first program writes the rest, too."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    kept_row = slot * num_drafts + tl.load(offset_ptr + row)
    if block == 0:
        at = token_ids_ptr + slot * token_ids_stride + tl.load(position_ptr + row)
        tl.store(at, tl.load(drawn_ptr + row).to(tl.int32))
    if kept_logits_ptr is not None:
        if block == 0:
            i = tl.arange(0, _STATE_WIDTH)
            state = tl.load(state_ptr + row * _STATE_WIDTH + i)
            tl.store(kept_state_ptr + kept_row * _STATE_WIDTH + i, state)
        i = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * logits_stride + i, mask=i < width)
        logits = logits.to(kept_logits_ptr.dtype.element_ty)
        tl.store(kept_logits_ptr + kept_row * width + i, logits, mask=i < width)


@triton.jit(do_not_specialize=["last_slot", "num_rows"])
def _write_verified_kernel(
    out_ptr,  # [num_rows, num_columns + 1]
    token_ids_ptr,  # [num_slots, width]
    token_ids_stride,
    num_tokens_ptr,  # [num_slots]
    last_slot,
    slot_ptr,  # [num_rows]
    anchor_ptr,  # [num_rows]
    verified,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_ptr + row, mask=inside, other=0).to(tl.int64)
    anchor = tl.load(anchor_ptr + row, mask=inside, other=0).to(tl.int64)
    num_new = tl.load(verified.num_tokens + row, mask=inside, other=0)
    tl.store(num_tokens_ptr + slot, anchor + num_new, mask=inside & (slot != last_slot))
    is_bad = tl.load(verified.is_bad + row, mask=inside, other=0).to(tl.int64)
    tl.store(out_ptr + row * (num_columns + 1) + num_columns, is_bad, mask=inside)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (column < num_columns)
    token_at = verified.token_ids + row[:, None] * num_columns + column
    token_ids = tl.load(token_at, mask=mask, other=0)
    tl.store(out_ptr + row[:, None] * (num_columns + 1) + column, token_ids, mask=mask)
    at = token_ids_ptr + (slot * token_ids_stride + anchor)[:, None] + column
    tl.store(at, tl.maximum(token_ids, 0).to(tl.int32), mask=mask)
