"""Keeps the logits and the state that each draft was drawn from, for its verification."""

import torch

from ..triton_or_none import tl, triton
from .sampling import STATE_WIDTH
from .step import Step

_STATE_WIDTH = tl.constexpr(STATE_WIDTH)
_BLOCK = 4096  # logits copied by one program


def keep_reference(
    step: Step, kept: tuple[torch.Tensor, torch.Tensor], state: torch.Tensor
) -> None:
    logits, states = kept
    logits[step.slot, step.offset] = step.logits.to(logits.dtype)
    states[step.slot, step.offset] = state


def keep(step: Step, kept: tuple[torch.Tensor, torch.Tensor], state: torch.Tensor) -> None:
    """Copy each row's logits, converted, and its state to its slot and offset in `kept`.

    Shape: kept [num_slots, K, V'] and [num_slots, K, 4]; state [N, 4].
    """
    num_rows, width = step.logits.shape
    assert all(x.is_contiguous() for x in kept)
    _keep_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        *kept,
        kept[0].shape[1],
        step.slot,
        step.offset,
        state,
        step.logits,
        step.logits.stride(0),
        width,
        BLOCK=_BLOCK,
    )


@triton.jit
def _keep_kernel(
    kept_logits_ptr,  # [num_slots, num_drafts, width]
    kept_state_ptr,  # [num_slots, num_drafts, STATE_WIDTH]
    num_drafts,
    slot_ptr,  # [N]
    offset_ptr,  # [N]
    state_ptr,  # [N, STATE_WIDTH]
    logits_ptr,  # [N, width]
    logits_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Each program copies a block of a row's logits; a row's first program the state, too."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    kept_row = slot * num_drafts + tl.load(offset_ptr + row)
    if block == 0:
        i = tl.arange(0, _STATE_WIDTH)
        state = tl.load(state_ptr + row * _STATE_WIDTH + i)
        tl.store(kept_state_ptr + kept_row * _STATE_WIDTH + i, state)
    i = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + i, mask=i < width)
    logits = logits.to(kept_logits_ptr.dtype.element_ty)
    tl.store(kept_logits_ptr + kept_row * width + i, logits, mask=i < width)
