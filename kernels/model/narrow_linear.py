"""Linear layers whose matrix has 4 or 8 bits a number, and whose inputs have 16:

    y = epilogue(rmsnorm(x) W^T + b)

A program converts the codes of its outputs to numbers of x's dtype, which holds them exactly, and
multiplies on tensor cores, with sums in float32. Scales multiply sums, not weights. So nothing is
rounded beyond what the format rounds, and activations are not quantised.

The matrix alone decides the order of summation, so the bits of a row do not depend on the batch.
For many rows the library is much faster; then the matrix is unpacked for it, one layer at a time,
unless the bits must be the same.
"""

import torch
from torch import Tensor

from .._dispatch import uses_triton
from .linear import add_linear, linear, linear_reference
from .narrow_matrix import NarrowMatrix, dequantise, has_4_bits
from .narrow_numbers import unpack
from .narrow_product import narrow_product
from .rms_norm import Norm, rms_norm
from .row_codes import Rows
from .split_product import add_parts
from .tiles import MAX_SPLIT_ROWS, num_splits_of

# Measured on an H200.
_MAX_ROWS = 256  # beyond this the library is faster, although the matrix must be unpacked
_MAX_SPLITS = 8
_PROGRAMS_PER_SM = 5  # into which a product is split at most
_FEW_PROGRAMS_PER_SM = 3  # if it is gated, or has half the bytes
_MIN_STEPS = 2  # of a split


def narrow_linear(
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Like `linear`: rmsnorm(x) W^T + b; with `gated`, silu(first half) * second half of that.

    With `batch_invariant`, the bits of a row do not depend on the batch.
    Shape: x [T, K], rows dense, matrix [N, K] or, gated, [2 N, K], out [T, N] dense -> [T, N]
    """
    if not uses_triton(x):
        plain = dequantise(matrix, x.dtype)
        y = linear_reference(x, plain, bias, norm=norm, gated=gated)
        return y if out is None else out.copy_(y)
    if len(x) > _MAX_ROWS and not batch_invariant:
        y = linear(_ordered(x, matrix, norm), unpack(matrix, x.dtype), bias, gated=gated)
        return y if out is None else out.copy_(y)
    if out is None:
        num_out = matrix.shape[0]
        out = x.new_empty(len(x), num_out // 2 if gated else num_out)
    x = _ordered(x, matrix, norm)
    num_splits = _num_splits(matrix, gated=gated)
    parts = None
    if num_splits > 1 and len(x) <= MAX_SPLIT_ROWS:
        parts = x.new_empty(num_splits, len(x), matrix.shape[0], dtype=torch.float32)
    narrow_product(out, x, matrix, bias, num_splits, parts, gated=gated)
    return out


def add_narrow_linear(
    residual: Tensor,
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    batch_invariant: bool = False,
) -> Rows | None:
    """Like `add_linear`: add x W^T + b to the residual in place.

    Returns norm(residual) if that comes cheaply; otherwise None, and the next layer must apply it.
    Shape: residual [T, N] dense, x [T, K], matrix [N, K] -> [T, N]
    """
    if not uses_triton(x):
        plain = dequantise(matrix, x.dtype)
        linear_reference(x, plain, bias, residual=residual)
        return None
    if len(x) > _MAX_ROWS and not batch_invariant:
        x = _ordered(x, matrix)
        return add_linear(residual, x, unpack(matrix, x.dtype), bias, norm=norm)
    x = _ordered(x, matrix)
    num_splits = _num_splits(matrix)
    if bias is None and len(x) <= MAX_SPLIT_ROWS:
        parts = x.new_empty(num_splits, *residual.shape, dtype=torch.float32)
        narrow_product(None, x, matrix, None, num_splits, parts)
        return add_parts(residual, parts, norm)
    narrow_product(residual, x, matrix, bias, num_splits, None, adds=True)
    return None


def _ordered(x: Tensor, matrix: NarrowMatrix, norm: Norm | None = None) -> Tensor:
    """The inputs in the order of the codes' columns, normalised if there is a norm."""
    if norm is not None:
        x = rms_norm(x, norm)
    return x if matrix.order is None else x.index_select(1, matrix.order)


def _num_splits(matrix: NarrowMatrix, *, gated: bool = False) -> int:
    """How many partial sums an output is split into, so that few outputs keep a GPU busy."""
    splits = num_splits_of(
        matrix.shape[0],
        matrix.codes.shape[1],
        matrix.codes.device,
        multiple=matrix.half,
        least=_MIN_STEPS * matrix.half,
        per_sm=_FEW_PROGRAMS_PER_SM if gated or has_4_bits(matrix.kind) else _PROGRAMS_PER_SM,
    )
    return min(splits, _MAX_SPLITS)
