"""Verification on a CPU in one compiled call, and drafts in another.

The references take some hundred operations of torch for it, which together cost as much as a pass
of the target. The outcome is theirs, except where a last bit of an exponential decides: about once
in a million draws.
"""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu import layers
from ..cpu.layers import Batch, Decoder, Slots, compiled, num_threads, pointer
from .drafts import DraftSample, Step, Verified
from .philox import Purpose
from .sampling import STATE_WIDTH, Sampling
from .slot_rows import SlotState


class _Step(Structure):  # mirrors rows.h, which has the shapes
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int32),
        ("is_bf16", c_int32),
        ("count", c_int32),
        ("columns", c_int32),
        ("first_rows", c_void_p),
        ("num_drafts", c_void_p),
        ("entries", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("rule", c_void_p),
        ("anchor", c_void_p),
        ("token_ids", c_void_p),
        ("token_stride", c_int64),
        ("num_slots", c_int64),
        ("draft_logits", c_void_p),
        ("draft_stride", c_int64),
        ("draft_column_stride", c_int64),
        ("draft_width", c_int32),
        ("draft_is_bf16", c_int32),
        ("draft_state", c_void_p),
        ("draft_state_stride", c_int64),
        ("offset", c_void_p),
        ("words", c_void_p),
        ("purpose", c_int32),
        ("state", c_void_p),
        ("out", c_void_p),
    )


def takes(logits: Tensor, draft_logits: Tensor | None = None) -> bool:
    """Whether the calls below can read these logits. Shape: [..., V]."""
    return layers.reads(logits) and (draft_logits is None or layers.reads(draft_logits))


def verify(step: Step) -> Verified:
    """The requests' outcomes."""
    drafts = step.drafts.in_order()
    count, max_drafts = drafts.token_ids.shape
    token_ids = drafts.token_ids.int().contiguous()
    out = torch.empty(count, max_drafts + 2, dtype=torch.int64)
    given = _Step(
        first_rows=pointer(step.cu_rows, torch.int32),
        num_drafts=pointer(drafts.num_drafts, torch.int32),
        columns=max_drafts,
        token_ids=pointer(token_ids, torch.int32),
        token_stride=max_drafts,
    )
    _set_drafts(given, drafts.logits, drafts.state)
    _call("outrider_verify", given, step, out)
    emitted, is_bad = out[:, :-1], out[:, -1].bool()
    return Verified(emitted, (emitted >= 0).sum(1).int(), is_bad)


def draw(step: Step) -> DraftSample:
    """A token and a state for each row."""
    state = torch.empty(len(step.logits), STATE_WIDTH)
    out = torch.empty(len(step.logits), dtype=torch.int64)
    _call("outrider_draw", _Step(state=pointer(state, torch.float32)), step, out)
    return DraftSample(out, state)


def _call(name: str, given: _Step, step: Step, out: Tensor) -> None:
    sampling = Sampling(*(field.contiguous() for field in step.sampling))
    anchor, offset = step.anchor.contiguous(), step.position - step.anchor
    words = None if step.words is None else step.words.contiguous()
    given.offset, given.words = pointer(offset, torch.int64), pointer(words, torch.int64)
    given.out = pointer(out, torch.int64)
    _set_requests(given, sampling, anchor)
    _set_rows(given, len(out), step.logits, step.vocab_size, step.purpose)
    getattr(_library(), name)(ctypes.byref(given))


def verify_slots(
    slots: SlotState,
    slots_np: np.ndarray,
    num_drafts_np: np.ndarray,
    max_drafts: int,
    logits: Tensor,
    vocab_size: int,
    kept: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`verify` for requests in slots: `read_slots`, and `write_verified` what comes out.

    Shape: slots_np, num_drafts_np [B] int64; logits [sum(num_drafts + 1), V], in this order; kept
    [num_slots, K, V'] and [num_slots, K, 4], or None for one-hot drafts -> [B, K + 2].
    """
    ends_np = (num_drafts_np + 1).cumsum()
    counts_np = np.array((ends_np - num_drafts_np - 1, num_drafts_np), dtype=np.int32)
    out = torch.empty(len(slots_np), max_drafts + 2, dtype=torch.int64)
    given = _in_slots(slots, slots_np, logits, vocab_size, kept, Purpose.FINAL)
    given.first_rows = counts_np.ctypes.data
    given.num_drafts = counts_np.ctypes.data + counts_np.strides[0]
    given.columns, given.out = max_drafts, pointer(out, torch.int64)
    _library().outrider_verify(ctypes.byref(given))
    return out


def draw_into_slots(
    slots: SlotState,
    slots_np: np.ndarray,
    offsets_np: np.ndarray,
    logits: Tensor,
    vocab_size: int,
    kept: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`draft_sample` for requests in slots: `read_slots`, and `write_draft` what comes out.

    Shape: slots_np, offsets_np [N] int64; logits [N, V'], of the dtype of those kept; kept as
    above, or None to keep nothing -> [N] int64.
    """
    out = torch.empty(len(slots_np), dtype=torch.int64)
    given = _in_slots(slots, slots_np, logits, vocab_size, kept, Purpose.DRAFT)
    given.offset, given.out = _pointer_np(offsets_np), pointer(out, torch.int64)
    _library().outrider_draw(ctypes.byref(given))
    return out


@dataclass(slots=True)
class LinesOfDrafts:
    """Up to k_i drafts for each of N sequences in slots, each predicted by a pass of a model."""

    slots: SlotState
    slots_np: np.ndarray  # [N] int64
    counts_np: np.ndarray  # [N] int64, k_i; then how many were drawn
    # [N] float64: no draft follows drafts that are less likely than this to stand, all of them
    least_chance_np: np.ndarray
    vocab_size: int
    kept: tuple[Tensor, Tensor] | None  # as above

    def draw(self, model: Decoder, batch: Batch, rows: Slots, logits: Tensor) -> None:
        """Compute these rows, which end with a row of logits for each sequence, and then draw each
        draft and compute its row in turn: `draw_into_slots` and `run_pass_in_slots` over and over.

        Shape: logits [N, V'], to which all passes write.
        """
        given = _in_slots(
            self.slots, self.slots_np, logits, self.vocab_size, self.kept, Purpose.DRAFT
        )
        _library().outrider_draft(
            ctypes.byref(model),
            ctypes.byref(batch),
            ctypes.byref(rows),
            num_threads(),
            ctypes.byref(given),
            c_void_p(_pointer_np(self.counts_np)),
            c_void_p(self.least_chance_np.ctypes.data),
        )


def _in_slots(
    slots: SlotState,
    slots_np: np.ndarray,
    logits: Tensor,
    vocab_size: int,
    kept: tuple[Tensor, Tensor] | None,
    purpose: Purpose,
) -> _Step:
    """A step for requests in slots. Drafts are drawn into `kept`, and verified from there."""
    assert slots.token_ids.stride(1) == 1
    if purpose == Purpose.DRAFT and kept is not None:
        assert kept[0].dtype == logits.dtype
        assert kept[0].shape[2] == logits.shape[1]
    given = _Step(
        entries=_pointer_np(slots_np),
        token_ids=pointer(slots.token_ids, torch.int32),
        token_stride=slots.token_ids.stride(0),
        num_slots=len(slots.num_tokens),
    )
    _set_requests(given, slots.sampling, slots.num_tokens)
    _set_drafts(given, *(kept or (None, None)))
    _set_rows(given, len(slots_np), logits, vocab_size, purpose)
    return given


def _pointer_np(array_np: np.ndarray) -> int:
    assert array_np.dtype == np.int64
    assert array_np.flags.c_contiguous
    return array_np.ctypes.data


def _set_requests(given: _Step, sampling: Sampling, anchor: Tensor) -> None:
    given.temperature = pointer(sampling.temperature, torch.float32)
    given.top_k = pointer(sampling.top_k, torch.int32)
    given.top_p = pointer(sampling.top_p, torch.float32)
    given.min_p = pointer(sampling.min_p, torch.float32)
    given.seed = pointer(sampling.seed, torch.int64)
    given.rule = pointer(sampling.rule, torch.int32)
    given.anchor = pointer(anchor, torch.int64)


def _set_drafts(given: _Step, logits: Tensor | None, state: Tensor | None) -> None:
    if logits is None or state is None or logits.shape[1] == 0:
        return
    given.draft_logits, given.draft_width = logits.data_ptr(), logits.shape[2]
    given.draft_stride, given.draft_column_stride, _ = logits.stride()
    given.draft_is_bf16 = logits.dtype == torch.bfloat16
    given.draft_state, given.draft_state_stride = pointer(state, torch.float32), state.stride(0)


def _set_rows(given: _Step, count: int, logits: Tensor, vocab_size: int, purpose: Purpose) -> None:
    assert logits.stride(1) == 1
    given.logits, given.stride = logits.data_ptr(), logits.stride(0)
    given.is_bf16 = logits.dtype == torch.bfloat16
    given.vocab_size = min(vocab_size, logits.shape[1])
    given.count, given.purpose = count, int(purpose)


def probabilities(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """Probabilities of one token a row, at temperature 1.

    Shape: logits [N, V], token_ids [N] int64 -> [N]
    """
    if not takes(logits):
        return probabilities_reference(logits, token_ids)
    out_np = np.empty(len(token_ids), dtype=np.float32)
    _library().outrider_probabilities(
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


def _library() -> Any:
    library = compiled()
    assert library is not None
    return library
