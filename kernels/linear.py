"""Linear layers with what stands around them: RMSNorm before, silu(gate) * up or a residual behind.

    y = epilogue(rmsnorm(x) W^T + b),     rmsnorm(x)_k = x_k w_k / sqrt(mean(x^2) + eps)

Decoding has few rows, so a layer's time is that of reading W once, and every launch beside it
counts. For a single row one launch does it all. With up to 16 a small W is still read by a kernel
of ours; for the rest the library's matrix product is ahead.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.packed_linear import PackedWeight, packed_linear

_MAX_NARROW_ROWS = 16
_MAX_NARROW_WEIGHTS = 1 << 22  # measured: up to here the library leaves multiprocessors idle


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor  # [K]
    eps: float


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """A linear layer and its surroundings.

    Parameters
    ----------
    x
        Shape: [T, K], rows dense.
    weight
        Shape: [N, K]; with `gated` [2 N, K], the gate's rows before those of `up`. On a CPU it may
        come from `pack_weight`.
    bias
        Shape: [N] or, with `gated`, [2 N].
    norm
        Applied to x first.
    gated
        Return silu(gate) * up of the two halves.
    residual
        Is added to the result, in place, and returned. Shape: [T, N].

    Returns: [T, N]
    """
    if not uses_triton(x):
        return linear_reference(x, weight, bias, norm=norm, gated=gated, residual=residual)
    assert x.stride(-1) == 1
    assert isinstance(weight, Tensor)
    assert weight.is_contiguous()
    if len(x) == 1:
        return _fused(x, weight, bias, norm, gated, residual)
    if norm is not None:
        x = rms_norm(x, norm)
    if residual is not None and bias is None:
        if len(x) <= _MAX_NARROW_ROWS and weight.numel() <= _MAX_NARROW_WEIGHTS:
            return _add_product(residual, x, weight)
        return residual.addmm_(x, weight.t())
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul(y)
    return y if residual is None else residual.add_(y)


def linear_reference(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = rms_norm_reference(x, norm)
    if isinstance(weight, PackedWeight):
        y = packed_linear(x, weight, bias)
    else:
        y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul_reference(y)
    return y if residual is None else residual.add_(y)


def rms_norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """Shape: [T, K] -> [T, K]."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Shape: [T, 2 N] -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    num_in = x.shape[1]
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(1, num_out) if residual is None else residual
    # Measured: long rows want several blocks asked for before the first is used.
    block_k = min(1024, triton.next_power_of_2(num_in))
    unroll = 4 if num_in >= 4096 else 1
    _fused_kernel[(triton.cdiv(num_out, 4),)](
        out,
        x,
        weight,
        bias,
        norm.weight if norm is not None else None,
        residual,
        num_out,
        norm.eps if norm is not None else 0.0,
        NUM_IN=num_in,
        BLOCK_N=4,
        BLOCK_K=block_k,
        UNROLL=unroll,
        GATED=gated,
        num_warps=max(1, min(4 if unroll > 1 else 8, block_k // 128)),
    )
    return out


@triton.jit
def _product(x_ptr, norm_ptr, weight_rows, is_out, k0, NUM_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Terms of the outputs' sums: [BLOCK_N, BLOCK_K], of BLOCK_K inputs from k0 on."""
    k = k0 + tl.arange(0, BLOCK_K)
    weight = tl.load(weight_rows + k, mask=is_out & (k < NUM_IN)[None, :], other=0.0)
    x = tl.load(x_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x *= tl.load(norm_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    return weight.to(tl.float32) * x[None, :]


@triton.jit
def _fused_kernel(
    out_ptr,  # [num_out]
    x_ptr,  # [NUM_IN]
    weight_ptr,  # [num_out or 2 * num_out, NUM_IN]
    bias_ptr,  # [num_out or 2 * num_out] or None
    norm_ptr,  # [NUM_IN] or None
    residual_ptr,  # as out, or None
    num_out,
    eps,
    NUM_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    GATED: tl.constexpr,
):
    """One program: BLOCK_N outputs of one row. Sums meet across threads only at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_out
    is_out = inside[:, None]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * NUM_IN
    up_rows = weight_rows + num_out.to(tl.int64) * NUM_IN
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, NUM_IN, UNROLL * BLOCK_K):
        for i in tl.static_range(UNROLL):
            k0 = start + i * BLOCK_K
            acc += _product(x_ptr, norm_ptr, weight_rows, is_out, k0, NUM_IN, BLOCK_K)
            if GATED:
                acc_up += _product(x_ptr, norm_ptr, up_rows, is_out, k0, NUM_IN, BLOCK_K)
            if norm_ptr is not None:
                k = k0 + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
                square += x * x
    y = tl.sum(acc, 1)
    up = tl.sum(acc_up, 1)
    if norm_ptr is not None:
        # The row's own scale is a factor of the whole sum: it can wait until here.
        scale = tl.rsqrt(tl.sum(square, 0) / NUM_IN + eps)
        y *= scale
        up *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + num_out + n, mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    num_rows, num_in = x.shape
    num_out = len(weight)
    block_k = min(512, triton.next_power_of_2(num_in))
    num_warps = max(1, min(4, block_k // 32))
    _add_product_kernel[(triton.cdiv(num_out, 8),)](
        residual,
        x,
        weight,
        num_rows,
        num_out,
        x.stride(0),
        residual.stride(0),
        NUM_IN=num_in,
        BLOCK_M=16,
        BLOCK_N=8,
        BLOCK_K=block_k,
        SPLITS=num_warps,
        num_warps=num_warps,
        num_stages=4,
    )
    return residual


@triton.jit(do_not_specialize=["num_rows"])
def _add_product_kernel(
    out_ptr,  # [num_rows, num_out], is added to
    x_ptr,  # [num_rows, NUM_IN]
    weight_ptr,  # [num_out, NUM_IN]
    num_rows,
    num_out,
    x_stride,
    out_stride,
    NUM_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: BLOCK_N outputs of every row; each warp sums a share of every BLOCK_K."""
    SHARE: tl.constexpr = BLOCK_K // SPLITS
    EVEN: tl.constexpr = NUM_IN % BLOCK_K == 0
    # [SPLITS, BLOCK_M or BLOCK_N, SHARE]
    share = tl.arange(0, SPLITS)[:, None, None] * SHARE + tl.arange(0, SHARE)[None, None, :]
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (m < num_rows)[None, :, None]
    is_out = (n < num_out)[None, :, None]
    weight_rows = weight_ptr + n[None, :, None] * NUM_IN
    x_rows = x_ptr + m[None, :, None] * x_stride
    acc = tl.zeros([SPLITS, BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        k = start + share
        in_x, in_weight = is_row, is_out
        if not EVEN:
            in_x, in_weight = is_row & (k < NUM_IN), is_out & (k < NUM_IN)
        weight = tl.load(weight_rows + k, mask=in_weight, other=0.0)
        x = tl.load(x_rows + k, mask=in_x, other=0.0)
        acc += tl.dot(x, tl.trans(weight, 0, 2, 1), input_precision="ieee")
    offset = m[:, None] * out_stride + n
    mask = (m < num_rows)[:, None] & (n < num_out)[None, :]
    y = tl.sum(acc, 0) + tl.load(out_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Shape: [T, K], rows dense -> [T, K]."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        out, x, norm.weight, norm.eps, x.stride(0), width, BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(out_ptr, x_ptr, weight_ptr, eps, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + k, mask=k < width, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + row * width + k, y.to(out_ptr.dtype.element_ty), mask=k < width)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Shape: [T, 2 N], dense -> [T, N]."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](out, gate_up, width, BLOCK=block)
    return out


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = gate_up_ptr + row * 2 * width + n
    gate = tl.load(gate_ptr, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=n < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + n, y.to(out_ptr.dtype.element_ty), mask=n < width)
