"""Linear layers whose matrix and inputs both have 8 bits a number, as W8A8 checkpoints want it:

    y = epilogue(round(rmsnorm(x)) W^T + b)

Each row of inputs is rounded by itself, for any number of rows, and the matrix alone decides the
order of summation: so the bits of a row do not depend on the batch.
"""

import torch
from torch import Tensor

from .._dispatch import uses_triton
from .linear import linear_reference
from .narrow_matrix import NarrowMatrix, dequantise
from .rms_norm import Norm
from .row_codes import RowCodes, Rows, round_rows, rounded_rows
from .scaled_product import most_rows_in_parts, parts_of, scaled_product
from .split_product import add_parts


def scaled_linear(
    x: Rows,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Like `linear`: rmsnorm(x) W^T + b; with `gated`, silu(first half) * second half of that.

    Rows that are rounded already have no norm.
    Shape: x [T, K], rows dense, matrix [N, K] or, gated, [2 N, K], out [T, N] dense -> [T, N]
    """
    if isinstance(x, Tensor) and not uses_triton(x):
        y = scaled_linear_reference(x, matrix, bias, norm=norm, gated=gated)
        return y if out is None else out.copy_(y)
    rows = _rounded(x, matrix, norm)
    if out is None:
        num_out = matrix.shape[0]
        shape = len(rows.codes), num_out // 2 if gated else num_out
        out = torch.empty(shape, dtype=rows.dtype, device=rows.codes.device)
    scaled_product(out, rows, matrix, bias, gated=gated)
    return out


def add_scaled_linear(
    residual: Tensor,
    x: Rows,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
) -> Rows | None:
    """Like `add_linear`: add x W^T + b to the residual in place.

    Returns norm(residual) if that comes cheaply; otherwise None, and the next layer must apply it.
    Shape: residual [T, N] dense, x [T, K], matrix [N, K] -> [T, N]
    """
    if isinstance(x, Tensor) and not uses_triton(x):
        scaled_linear_reference(x, matrix, bias, residual=residual)
        return None
    rows, num_splits = _rounded(x, matrix), parts_of(matrix)
    if bias is None and len(residual) <= most_rows_in_parts(matrix):
        parts = residual.new_empty(num_splits, *residual.shape, dtype=torch.float32)
        scaled_product(parts, rows, matrix, num_splits=num_splits)
        return add_parts(residual, parts, norm)
    scaled_product(residual, rows, matrix, bias, num_splits=num_splits, adds=True)
    return None


def scaled_linear_reference(
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """As `linear_reference`, with the numbers that the codes stand for."""
    assert matrix.row_format is not None
    x = rounded_rows(x, matrix.row_format, norm)
    plain = dequantise(matrix, x.dtype)
    return linear_reference(x, plain, bias, gated=gated, residual=residual)


def _rounded(x: Rows, matrix: NarrowMatrix, norm: Norm | None = None) -> RowCodes:
    if isinstance(x, RowCodes):
        return x
    assert matrix.row_format is not None
    return round_rows(x, matrix.row_format, norm)
