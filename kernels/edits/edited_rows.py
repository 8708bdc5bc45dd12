"""Copies of the rows of logits that are edited, and their way back.

Which slots are edited is read on the device: a graph has one shape, whoever runs in it. Rows of
other slots are not touched, here or there.
"""

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .edit_rows import EditRows, check_rows

_BLOCK = 2048


def take_rows(logits: torch.Tensor, rows: EditRows, is_edited: torch.Tensor) -> torch.Tensor:
    """Copies of the rows of edited slots; what other rows hold is undefined.

    In float32, because bfloat16 would round away a small penalty on a large logit.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    rows
        Their positions do not matter. Shape: [M] each.
    is_edited
        Shape: [S] bool.

    Returns
    -------
    Shape: [M, V'] float32.
    """
    check_rows(logits, rows)
    if not uses_triton(logits):
        return logits.index_select(0, rows.row).to(torch.float32, copy=True)
    copies = logits.new_empty((len(rows.row), logits.shape[1]), dtype=torch.float32)
    _copy(logits, rows.row, copies, None, rows, is_edited)
    return copies


def put_back(
    logits: torch.Tensor, rows: EditRows, is_edited: torch.Tensor, copies: torch.Tensor
) -> None:
    """Write the copies of edited slots over their rows, rounded to the logits' dtype.

    Shapes as above.
    """
    check_rows(logits, rows)
    if not uses_triton(logits):
        own = is_edited[rows.slot].nonzero()[:, 0]
        logits[rows.row[own]] = copies[own].to(logits.dtype)
    else:
        _copy(copies, None, logits, rows.row, rows, is_edited)


def _copy(
    source: torch.Tensor,
    source_row: torch.Tensor | None,
    target: torch.Tensor,
    target_row: torch.Tensor | None,
    rows: EditRows,
    is_edited: torch.Tensor,
) -> None:
    """Copy row source_row[i] to row target_row[i] for each i of an edited slot; None: row i."""
    width = source.shape[1]
    if len(rows.row):
        _copy_kernel[(len(rows.row), triton.cdiv(width, _BLOCK))](
            source, source.stride(0), source_row, target, target.stride(0), target_row, width,
            rows.slot, is_edited,
            BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _copy_kernel(
    source_ptr,  # [N, width]
    source_stride,
    source_row_ptr,  # [M], or None
    target_ptr,  # [N', width]
    target_stride,
    target_row_ptr,  # [M], or None
    width,
    slot_ptr,  # [M]
    is_edited_ptr,  # [S]
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if tl.load(is_edited_ptr + tl.load(slot_ptr + i)):
        source_row = i if source_row_ptr is None else tl.load(source_row_ptr + i)
        target_row = i if target_row_ptr is None else tl.load(target_row_ptr + i)
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < width
        logits = tl.load(source_ptr + source_row * source_stride + ids, mask=inside)
        at = target_ptr + target_row * target_stride + ids
        tl.store(at, logits.to(target_ptr.dtype.element_ty), mask=inside)
