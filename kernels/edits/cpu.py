"""Logit edits on a CPU, a compiled call each.

The references take up to some thirty operations of torch, half of them over the whole vocabulary.
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from ..cpu import layers
from .edit_rows import EditRows


class _Rows(Structure):  # mirrors edits.cpp
    _fields_ = (
        ("logits", c_void_p),
        *layers.fields(c_int64, "stride width count"),
        *layers.fields(c_void_p, "row slot position"),
    )


def takes(logits: Tensor) -> bool:
    """Whether the calls below can edit these logits. Shape: [N, V']."""
    return logits.dtype == torch.float32 and layers.reads(logits)


def call(
    name: str, logits: Tensor, rows: EditRows, tables: tuple[Tensor, ...], *sizes: int
) -> None:
    """Edit these rows in place, by the edit that edits.cpp has under this name."""
    assert all(tensor.is_contiguous() for tensor in (*rows, *tables))
    row, slot, position = (field.data_ptr() for field in rows)
    width = logits.shape[1]
    given = _Rows(logits.data_ptr(), logits.stride(0), width, len(rows.row), row, slot, position)
    getattr(layers.library(), f"outrider_{name}")(
        ctypes.byref(given),
        (c_void_p * len(tables))(*(table.data_ptr() for table in tables)),
        *(c_int64(size) for size in sizes),
    )
