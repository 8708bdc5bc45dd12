"""RMSNorm: y_k = x_k w_k / sqrt(mean(x^2) + eps)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import INTERPRET, uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .narrow_matrix import RowFormat

_IN_PAIRS = tl.constexpr(not INTERPRET)


class Norm(NamedTuple):
    """RMSNorm: x / sqrt(mean(x²) + eps) * weight."""

    weight: Tensor  # [K] in the dtype of x, or float32
    eps: float
    rounds: RowFormat | None = None  # what the layer behind it rounds its inputs to


def rms_norm(
    x: Tensor, norm: Norm, rows: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Normalise the given rows of x, or all, into `out`, if given.

    Shape: x [N, K], each row dense; rows [T] int64 -> [T, K], each row dense.
    """
    num_rows, width = len(x if rows is None else rows), x.shape[1]
    if out is None:
        out = x.new_empty(num_rows, width)
    if not uses_triton(x):
        return out.copy_(rms_norm_reference(x if rows is None else x[rows], norm))
    assert x.stride(1) == out.stride(1) == 1
    _rms_norm_kernel[(num_rows,)](
        out, x, rows, norm.weight, norm.eps, out.stride(0), x.stride(0), WIDTH=width,
        **block_of_row(width), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def block_of_row(width: int) -> dict[str, int]:
    """How a program takes a row, or part of one; the order of a norm's sum depends on it."""
    block = max(4, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 128))}


def rms_norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """Shape: [..., K] -> [..., K], in the dtype of x.

    Uses torch's layer norm over x and -x together, whose mean is 0: one call on a CPU, where
    torch's RMSNorm makes a dozen.
    """
    if norm.weight.dtype != x.dtype:  # wider: they are multiplied before the result is rounded
        return rms_norm_reference(x.to(norm.weight.dtype), norm).to(x.dtype)
    width = x.shape[-1]
    both = F.layer_norm(torch.cat((x, -x), -1), (2 * width,), None, None, norm.eps)
    return both[..., :width] * norm.weight


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [T, WIDTH]
    x_ptr,  # [N, WIDTH]
    rows_ptr,  # [T], or None for all
    weight_ptr,  # [WIDTH]
    eps,
    out_stride,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start_next_kernel(DEPENDENT)
    out_row = tl.program_id(0).to(tl.int64)
    k = numbers_of_row(BLOCK)
    weight = tl.load(weight_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    row = out_row if rows_ptr is None else tl.load(rows_ptr + out_row)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    y = normed_row(x, weight, eps, WIDTH)
    tl.store(
        out_ptr + out_row * out_stride + k, rounded(y, out_ptr.dtype.element_ty), mask=k < WIDTH
    )


@triton.jit
def numbers_of_row(BLOCK: tl.constexpr):
    """Where a row's numbers are. A thread has four neighbours, so that all kernels sum alike.

    Triton would give it up to 16, where codes are stored. Volatile loads of float32 parts would
    then fetch each sector of 32 bytes twice. Shape: [BLOCK / 4, 4]
    """
    return tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of a row, of which each thread has the same numbers in every kernel that must agree.

    Shape: as `numbers_of_row`, float32, 0 behind the width
    """
    return x * inverse_rms(tl.sum(tl.sum(x * x, 1), 0), eps, WIDTH) * weight


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr):
    """By which rows are multiplied whose sums of squares these are. Shape: any, float32.

    Not a division: by a width that is an argument the GPU's is inexact, by a constant it is not.
    """
    return tl.rsqrt(tl.fma(squares, 1.0 / WIDTH, eps))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x.to(dtype), in pairs: one by one, a GPU converts at a quarter of the rate."""
    if _IN_PAIRS and dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
    return y
