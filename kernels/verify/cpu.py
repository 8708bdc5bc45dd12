"""Verification on a CPU in one compiled call, and drafts in another.

The references take some hundred operations of torch for it, which together cost as much as a pass
of the target. The outcome is theirs, except where a last bit of an exponential decides: about once
in a million draws.
"""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cpu import layers
from ..cpu.layers import (
    BatchStruct,
    DecoderStruct,
    SlotsStruct,
    fields,
    library,
    num_threads,
    pointer,
)
from .philox import Purpose
from .step import SlotContents, Step


class _Step(Structure):  # mirrors rows.h, which has the shapes
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        *fields(c_int32, "vocab_size is_bf16 count columns"),
        *fields(c_void_p, "first_rows num_drafts entries temperature top_k top_p min_p seed rule"),
        *fields(c_void_p, "num_tokens token_ids"),
        ("token_stride", c_int64),
        ("draft_logits", c_void_p),
        *fields(c_int64, "draft_stride draft_column_stride"),
        *fields(c_int32, "draft_width draft_is_bf16"),
        ("draft_state", c_void_p),
        ("draft_state_stride", c_int64),
        *fields(c_void_p, "offset words"),
        ("purpose", c_int32),
        ("out", c_void_p),
    )


def takes(logits: Tensor, draft_logits: Tensor | None = None) -> bool:
    """Whether the calls below can read these logits. Shape: [..., V]."""
    return layers.reads(logits) and (draft_logits is None or layers.reads(draft_logits))


def verify_arrays(
    slots: SlotContents,
    slots_np: np.ndarray,
    num_drafts_np: np.ndarray,
    max_drafts: int,
    logits: Tensor,
    vocab_size: int,
    kept: tuple[Tensor, Tensor] | None,
    words: Tensor | None = None,
) -> Tensor:
    """`verify` for what the host has in arrays: to make tensors of them takes longer than to verify
    a small step.

    Shape: slots_np, num_drafts_np [B] int64; logits [sum(num_drafts + 1), V] or more rows,
    words [B, K + 2, 4] -> [B, K + 2].
    """
    ends_np = (num_drafts_np + 1).cumsum()
    counts_np = np.array((ends_np - num_drafts_np - 1, num_drafts_np), dtype=np.int32)
    out = torch.empty(len(slots_np), max_drafts + 2, dtype=torch.int64)
    given = _in_slots(slots, slots_np, logits, vocab_size, kept, Purpose.FINAL)
    given.first_rows = counts_np.ctypes.data
    given.num_drafts = counts_np.ctypes.data + counts_np.strides[0]
    given.columns, given.out = max_drafts, pointer(out, torch.int64)
    given.words = pointer(words, torch.int64)
    library().outrider_verify(ctypes.byref(given))
    return out


def draw(step: Step) -> Tensor:
    """Drafts, also in their slots, and what they were drawn from in `step.kept`. Shape: [N]."""
    slot, out = step.slot.long(), torch.empty(len(step.slot), dtype=torch.int64)
    given = _in_slots(
        step.slots, slot.numpy(), step.logits, step.vocab_size, step.kept, step.purpose
    )
    given.offset, given.out = pointer(step.offset, torch.int64), pointer(out, torch.int64)
    library().outrider_draw(ctypes.byref(given))
    return out


@dataclass(slots=True)
class LinesOfDrafts:
    """Up to k_i drafts for each of N sequences in slots, each predicted by a pass of a model."""

    slots: SlotContents
    slots_np: np.ndarray  # [N] int64
    counts_np: np.ndarray  # [N] int64, k_i; then how many were drawn
    # [N] float64: no draft follows if all drafts so far are less likely to be accepted than this
    least_chance_np: np.ndarray
    vocab_size: int
    kept: tuple[Tensor, Tensor] | None  # as in a Step

    def draw(
        self, model: DecoderStruct, batch: BatchStruct, rows: SlotsStruct, logits: Tensor
    ) -> None:
        """Compute these rows, which end with a row of logits for each sequence, and then draw each
        draft and compute its row in turn: `draw` and `run_pass_in_slots` over and over.

        Shape: logits [N, V'], to which all passes write.
        """
        given = _in_slots(
            self.slots, self.slots_np, logits, self.vocab_size, self.kept, Purpose.DRAFT
        )
        library().outrider_draft(
            ctypes.byref(model),
            ctypes.byref(batch),
            ctypes.byref(rows),
            num_threads(),
            ctypes.byref(given),
            c_void_p(_pointer_np(self.counts_np)),
            c_void_p(self.least_chance_np.ctypes.data),
        )


def _in_slots(
    slots: SlotContents,
    slots_np: np.ndarray,
    logits: Tensor,
    vocab_size: int,
    kept: tuple[Tensor, Tensor] | None,
    purpose: Purpose,
) -> _Step:
    """A step for requests in slots. Drafts are drawn into `kept`, and verified from there."""
    sampling = slots.sampling
    assert slots.token_ids.stride(1) == 1
    assert logits.stride(1) == 1
    given = _Step(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        vocab_size=min(vocab_size, logits.shape[1]),
        is_bf16=logits.dtype == torch.bfloat16,
        count=len(slots_np),
        entries=_pointer_np(slots_np),
        temperature=pointer(sampling.temperature, torch.float32),
        top_k=pointer(sampling.top_k, torch.int32),
        top_p=pointer(sampling.top_p, torch.float32),
        min_p=pointer(sampling.min_p, torch.float32),
        seed=pointer(sampling.seed, torch.int64),
        rule=pointer(sampling.rule, torch.int32),
        num_tokens=pointer(slots.num_tokens, torch.int64),
        token_ids=pointer(slots.token_ids, torch.int32),
        token_stride=slots.token_ids.stride(0),
        purpose=int(purpose),
    )
    if kept is not None and kept[0].shape[1] > 0:
        draft_logits, state = kept
        if purpose == Purpose.DRAFT:
            assert draft_logits.dtype == logits.dtype
            assert draft_logits.shape[2] == logits.shape[1]
        given.draft_logits, given.draft_width = draft_logits.data_ptr(), draft_logits.shape[2]
        given.draft_stride, given.draft_column_stride, _ = draft_logits.stride()
        given.draft_is_bf16 = draft_logits.dtype == torch.bfloat16
        given.draft_state, given.draft_state_stride = pointer(state, torch.float32), state.stride(0)
    return given


def _pointer_np(array_np: np.ndarray) -> int:
    assert array_np.dtype == np.int64
    assert array_np.flags.c_contiguous
    return array_np.ctypes.data


def probabilities(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """Probabilities of one token a row, at temperature 1.

    Shape: logits [N, V], token_ids [N] int64 -> [N]
    """
    if not takes(logits):
        return probabilities_reference(logits, token_ids)
    out_np = np.empty(len(token_ids), dtype=np.float32)
    library().outrider_probabilities(
        c_void_p(logits.data_ptr()),
        c_int64(logits.stride(0)),
        c_int64(logits.shape[1]),
        logits.dtype == torch.bfloat16,
        len(token_ids),
        c_void_p(pointer(token_ids, torch.int64)),
        c_void_p(out_np.ctypes.data),
    )
    return out_np


def probabilities_reference(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    probs = torch.softmax(logits.float(), dim=-1).gather(1, token_ids[:, None])
    of_row: np.ndarray = probs.squeeze(1).numpy(force=True)
    return of_row
