"""Greedy draws and verification on a CPU in one compiled call each; the references take dozens.

For a few rows of logits those dozens of calls cost as much as a pass of a small draft. The results
are the same, since greedy decoding only compares logits and sums nothing.
"""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..cpu.layers import compiled
from .slot_rows import SlotState


class _Logits(Structure):  # this and the next mirror greedy.cpp
    _fields_ = (
        ("data", c_void_p),
        ("stride", c_int64),
        ("vocab_size", c_int64),
        ("is_bf16", c_int32),
    )


class _Slots(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("stride", c_int64),
        ("num_tokens", c_void_p),
        ("count", c_int64),
    )


def takes(logits: Tensor) -> bool:
    """Whether the functions below can take these logits. Shape: [N, V]."""
    return (
        logits.device.type == "cpu"
        and not uses_triton(logits)
        and logits.dtype in (torch.float32, torch.bfloat16)
        and logits.stride(1) == 1
        and compiled() is not None
    )


def verify_greedy(
    slots: SlotState,
    first_rows: Tensor,
    slot: Tensor,
    num_drafts: Tensor,
    num_columns: int,
    logits: Tensor,
    vocab_size: int,
) -> Tensor:
    """`verify` for greedy requests, including reading and writing their slots.

    Returns tokens (padded with -1) and a flag for bad logits, like `write_verified`.
    Shape: first_rows, slot, num_drafts [B] int32; logits [T, V] -> [B, num_columns + 2] int64.
    """
    out = torch.empty(len(slot), num_columns + 2, dtype=torch.int64)
    _library().outrider_verify_greedy(
        ctypes.byref(_of_logits(logits, vocab_size)),
        ctypes.byref(_of_slots(slots)),
        len(slot),
        *(_pointer(tensor, torch.int32) for tensor in (first_rows, slot, num_drafts)),
        num_columns,
        _pointer(out, torch.int64),
    )
    return out


def draft_greedy(
    slots: SlotState, slot: Tensor, offset: Tensor, logits: Tensor, vocab_size: int
) -> Tensor:
    """`draft_sample` for greedy requests; writes each draft into its slot, after `offset` others.

    Shape: slot, offset [N] int64; logits [N, V] -> [N] int64.
    """
    out = torch.empty(len(slot), dtype=torch.int64)
    _library().outrider_draft_greedy(
        ctypes.byref(_of_logits(logits, vocab_size)),
        ctypes.byref(_of_slots(slots)),
        len(slot),
        *(_pointer(tensor, torch.int64) for tensor in (slot, offset, out)),
    )
    return out


def probabilities(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """Probabilities of one token a row, at temperature 1.

    Shape: logits [N, V], token_ids [N] int64 -> [N]
    """
    if not takes(logits):
        return probabilities_reference(logits, token_ids)
    out = torch.empty(len(token_ids))
    _library().outrider_probabilities(
        ctypes.byref(_of_logits(logits, logits.shape[1])),
        len(token_ids),
        _pointer(token_ids, torch.int64),
        _pointer(out, torch.float32),
    )
    of_row: np.ndarray = out.numpy()
    return of_row


def probabilities_reference(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    probs = torch.softmax(logits.float(), dim=-1).gather(1, token_ids[:, None])
    of_row: np.ndarray = probs.squeeze(1).numpy(force=True)
    return of_row


def _library() -> Any:
    library = compiled()
    assert library is not None
    return library


def _of_logits(logits: Tensor, vocab_size: int) -> _Logits:
    assert logits.stride(1) == 1
    assert vocab_size <= logits.shape[1]
    is_bf16 = logits.dtype == torch.bfloat16
    return _Logits(logits.data_ptr(), logits.stride(0), vocab_size, is_bf16)


def _of_slots(slots: SlotState) -> _Slots:
    assert slots.token_ids.dtype == torch.int32
    assert slots.token_ids.stride(1) == 1
    assert slots.num_tokens.dtype == torch.int64
    return _Slots(
        slots.token_ids.data_ptr(),
        slots.token_ids.stride(0),
        slots.num_tokens.data_ptr(),
        len(slots.num_tokens),
    )


def _pointer(tensor: Tensor, dtype: torch.dtype) -> c_void_p:
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return c_void_p(tensor.data_ptr())
