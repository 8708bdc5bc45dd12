"""Draws and verification of sampled requests on a CPU in one compiled call.

The references take some hundred operations of torch for it, which together cost as much as a pass
of the target. The outcome is theirs, except where a last bit of an exponential decides: about once
in a million draws.
"""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from ..cpu.layers import compiled
from .drafts import Step, Verified
from .sampling import STATE_WIDTH

_DTYPES = (torch.float32, torch.bfloat16)


class _Step(Structure):  # mirrors rows.h
    _fields_ = (
        *((name, c_int32) for name in ("count", "columns", "purpose", "vocab_size")),
        ("logits", c_void_p),
        ("stride", c_int64),
        ("is_bf16", c_int32),
        ("draft_is_bf16", c_int32),
        *(
            (name, c_void_p)
            for name in (
                "first_rows",
                "num_drafts",
                "draft_ids",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "seed",
                "rule",
                "anchor",
                "position",
                "draft_logits",
            )
        ),
        ("draft_stride", c_int64),
        ("draft_column_stride", c_int64),
        ("draft_width", c_int32),
        *(
            (name, c_void_p)
            for name in (
                "draft_state",
                "draft_rows",
                "words",
                "state",
                "token_ids",
                "num_tokens",
                "is_bad",
            )
        ),
    )


def takes(step: Step) -> bool:
    """Whether `sample` can take this step."""
    return (
        step.logits.device.type == "cpu"
        and _is_readable(step.logits)
        and (step.drafts.logits is None or _is_readable(step.drafts.logits))
        and compiled() is not None
    )


def _is_readable(logits: Tensor) -> bool:
    return logits.dtype in _DTYPES and logits.stride(-1) == 1


def sample(step: Step) -> tuple[Verified, Tensor]:
    """The requests' outcomes, and the states of those rows that were needed for them."""
    library = compiled()
    assert library is not None
    logits, drafts, sampling = step.logits, step.drafts, step.sampling
    count, columns = drafts.token_ids.shape
    first_rows, num_drafts = step.cu_rows, drafts.num_drafts
    if first_rows is None:
        first_rows = torch.arange(count, dtype=torch.int32)
        num_drafts = torch.zeros_like(first_rows)
    state = torch.empty(len(logits), STATE_WIDTH)
    verified = Verified(
        torch.empty(count, columns + 1, dtype=torch.int64),
        torch.empty(count, dtype=torch.int32),
        torch.empty(count, dtype=torch.bool),
    )
    kept: list[Tensor] = []  # alive until the call is over

    def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        kept.append(tensor.to(dtype).contiguous())
        return kept[-1].data_ptr()

    q = drafts.draft_logits()
    rows = q.rows if q.raw is None or q.rows is not None else torch.arange(count)
    given = _Step(
        count, columns, int(step.purpose), step.vocab_size,
        logits.data_ptr(), logits.stride(0),
        logits.dtype == torch.bfloat16, q.raw is not None and q.raw.dtype == torch.bfloat16,
        pointer(first_rows, torch.int32), pointer(num_drafts, torch.int32),
        pointer(drafts.token_ids, torch.int64),
        pointer(sampling.temperature, torch.float32), pointer(sampling.top_k, torch.int32),
        pointer(sampling.top_p, torch.float32), pointer(sampling.min_p, torch.float32),
        pointer(sampling.seed, torch.int64), pointer(sampling.rule, torch.int32),
        pointer(step.anchor, torch.int64), pointer(step.position, torch.int64),
        0 if q.raw is None else q.raw.data_ptr(), q.stride_b, q.stride_k, q.width,
        pointer(q.state, torch.float32), pointer(rows, torch.int64),
        pointer(step.words, torch.int64),
        state.data_ptr(), *(out.data_ptr() for out in verified),
    )  # fmt: skip
    library.outrider_sample(ctypes.byref(given))
    return verified, state
