"""Linear layers with what stands around them: RMSNorm before, silu(gate) * up or a residual behind.

    y = epilogue(rmsnorm(x) W^T + b),     rmsnorm(x)_k = x_k w_k / sqrt(mean(x^2) + eps)

Decoding has few rows, so a layer's time is that of reading W once, and every launch beside it
counts. For one row, or two where W is small, one launch does it all. Up to 32 rows kernels of ours
read W still, unless it is neither small nor large and its product added to a residual; for the rest
the library's matrix product is ahead.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels._dispatch import num_programs, uses_triton
from outrider.kernels.dependent_launch import (
    dependent_launch,
    start_next_kernel,
    wait_for_inputs,
)
from outrider.kernels.packed_linear import PackedWeight, packed_linear
from outrider.kernels.rms_norm import Norm, rms_norm, rms_norm_reference
from outrider.kernels.silu_mul import silu_mul, silu_mul_reference
from outrider.kernels.split_product import add_split_product

# Measured on an H200; between the two sizes, and beyond these rows, the library is ahead.
_MAX_ROWS = 32
_MAX_SMALL_WEIGHTS = 1 << 22
_MIN_LARGE_WEIGHTS = 1 << 24
_SPLIT_ROWS = range(_MAX_ROWS + 1, 257)
_MAX_PAIR_WEIGHTS = 1 << 23  # that two rows are multiplied with as one is


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
    num_rows, num_weights = len(x), weight.numel()
    if num_rows == 1 or (num_rows == 2 and num_weights <= _MAX_PAIR_WEIGHTS):
        return _fused(x, weight, bias, norm, gated, residual)
    if norm is not None:
        x = rms_norm(x, norm)
    if num_rows <= _MAX_ROWS and bias is None:
        if residual is not None and num_weights <= _MAX_SMALL_WEIGHTS:
            return _add_product(residual, x, weight)
        is_large = num_weights >= _MIN_LARGE_WEIGHTS
        if weight.element_size() == 2 and (is_large or residual is None):
            return _product(x, weight, gated, residual)
    if residual is not None and bias is None:
        return residual.addmm_(x, weight.t())
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul(y)
    return y if residual is None else residual.add_(y)


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
) -> Tensor | None:
    """Add a linear layer to the residual, in place, and apply `norm` to the sum on the way.

    Returns the normalised sum, or None where it is cheaper to leave that to what reads the sum.
    Shape: residual [T, N], x [T, K], weight [N, K] -> [T, N]
    """
    num_splits = _num_splits(x, weight) if bias is None else 1
    if num_splits > 1:
        assert isinstance(weight, Tensor)
        return add_split_product(residual, x, weight, num_splits, norm)
    linear(x, weight, bias, residual=residual)
    return None


def _num_splits(x: Tensor, weight: Tensor | PackedWeight) -> int:
    if not isinstance(weight, Tensor) or not uses_triton(x) or len(x) not in _SPLIT_ROWS:
        return 1
    num_splits = 2 if weight.numel() >= _MIN_LARGE_WEIGHTS else 4
    return num_splits if weight.shape[1] % (8 * num_splits) == 0 else 1


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


def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    num_rows, num_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_rows, num_out) if residual is None else residual
    # Measured: as many weights a program as registers hold, all asked for at once.
    block_k = min(4096, triton.next_power_of_2(num_in))
    num_at_once = 4096 if num_rows == 1 and weight.numel() <= _MAX_PAIR_WEIGHTS else 8192
    block_n = max(1, num_at_once // block_k // (2 if gated else 1))
    _fused_kernel[(triton.cdiv(num_out, block_n),)](
        out,
        x,
        weight,
        bias,
        norm.weight if norm is not None else None,
        residual,
        num_out,
        norm.eps if norm is not None else 0.0,
        x.stride(0),
        out.stride(0),
        NUM_ROWS=num_rows,
        NUM_IN=num_in,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATED=gated,
        num_warps=max(1, min(4, num_rows * block_k // 1024)),
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def _fused_kernel(
    out_ptr,  # [NUM_ROWS, num_out]
    x_ptr,  # [NUM_ROWS, NUM_IN]
    weight_ptr,  # [num_out or 2 * num_out, NUM_IN]
    bias_ptr,  # [num_out or 2 * num_out] or None
    norm_ptr,  # [NUM_IN] or None
    residual_ptr,  # as out, or None
    num_out,
    eps,
    x_stride,
    out_stride,
    NUM_ROWS: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N outputs of every row, a block of weights asked for ahead of its use."""
    start_next_kernel(DEPENDENT)
    # [NUM_ROWS, BLOCK_N, BLOCK_K]
    row = tl.arange(0, NUM_ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    is_out = (n < num_out)[None, :, None]
    weight_at = weight_ptr + n.to(tl.int64)[None, :, None] * NUM_IN + k
    up_at = weight_at + num_out.to(tl.int64) * NUM_IN
    weight = tl.load(weight_at, mask=is_out & (k < NUM_IN), other=0.0)
    up_weight = weight
    if GATED:
        up_weight = tl.load(up_at, mask=is_out & (k < NUM_IN), other=0.0)
    norm = 1.0
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    at = row[:, None] * out_stride + n[None, :]
    inside = (n < num_out)[None, :]
    wait_for_inputs(DEPENDENT)
    residual = 0.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.zeros([NUM_ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([NUM_ROWS, BLOCK_N], tl.float32)
    square = tl.zeros([NUM_ROWS, 1], tl.float32)
    for start in tl.static_range(0, NUM_IN, BLOCK_K):
        in_x = start + k < NUM_IN
        x_at = x_ptr + row[:, None, None] * x_stride + start + k
        x = tl.load(x_at, mask=in_x, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            if start > 0:
                norm = tl.load(norm_ptr + start + k, mask=in_x, other=0.0).to(tl.float32)
            square += tl.sum(x * x, 2)
            x *= norm
        terms = weight.to(tl.float32) * x
        up_terms = terms
        if GATED:
            up_terms = up_weight.to(tl.float32) * x
        if start + BLOCK_K < NUM_IN:
            in_next = is_out & (start + BLOCK_K + k < NUM_IN)
            weight = tl.load(weight_at + start + BLOCK_K, mask=in_next, other=0.0)
            if GATED:
                up_weight = tl.load(up_at + start + BLOCK_K, mask=in_next, other=0.0)
        y += tl.sum(terms, 2)
        if GATED:
            up += tl.sum(up_terms, 2)
    if norm_ptr is not None:
        # A row's own scale is a factor of the whole sum: it can wait until here.
        scale = tl.rsqrt(square / NUM_IN + eps)
        y *= scale
        up *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + num_out + n[None, :], mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out_ptr + at, (y + residual).to(out_ptr.dtype.element_ty), mask=inside)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    num_rows, num_in = x.shape
    num_out = len(weight)
    block_m = 16 if num_rows <= 16 else 32
    bytes_at_once = 2048 if block_m == 16 else 1024
    block_k = min(bytes_at_once // weight.element_size(), triton.next_power_of_2(num_in))
    num_warps = max(1, min(8, block_k // 128))
    _add_product_kernel[(triton.cdiv(num_out, 8),)](
        residual,
        x,
        weight,
        num_rows,
        num_out,
        x.stride(0),
        residual.stride(0),
        NUM_IN=num_in,
        BLOCK_M=block_m,
        BLOCK_N=8,
        BLOCK_K=block_k,
        SPLITS=num_warps,
        num_warps=num_warps,
        num_stages=4,
        **dependent_launch(x.device),
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
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N outputs of every row; each warp sums a share of every BLOCK_K."""
    start_next_kernel(DEPENDENT)
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
    offset = m[:, None] * out_stride + n
    mask = (m < num_rows)[:, None] & (n < num_out)[None, :]
    wait_for_inputs(DEPENDENT)
    residual = tl.load(out_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        k = start + share
        in_x, in_weight = is_row, is_out
        if not EVEN:
            in_x, in_weight = is_row & (k < NUM_IN), is_out & (k < NUM_IN)
        weight = tl.load(weight_rows + k, mask=in_weight, other=0.0)
        x = tl.load(x_rows + k, mask=in_x, other=0.0)
        acc += tl.dot(x, tl.trans(weight, 0, 2, 1), input_precision="ieee")
    y = tl.sum(acc, 0) + residual
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=mask)


def _product(x: Tensor, weight: Tensor, gated: bool, residual: Tensor | None) -> Tensor:
    num_rows, num_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_rows, num_out) if residual is None else residual
    grid = triton.cdiv(len(weight), 64)
    # Programs that are fewer than multiprocessors must each have more under way.
    few = grid <= num_programs(x.device, 1)
    _product_kernel[(grid,)](
        out,
        x,
        weight,
        residual,
        num_rows,
        num_out,
        x.stride(0),
        out.stride(0),
        NUM_IN=num_in,
        BLOCK_M=16 if num_rows <= 16 else 32,
        BLOCK_N=64,
        GATED=gated,
        BLOCK_K=256 if few else 128,
        num_warps=4,
        num_stages=4 if few else 3,
        **dependent_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    out_ptr,  # [num_rows, num_out]
    x_ptr,  # [num_rows, NUM_IN]
    weight_ptr,  # [num_out or 2 * num_out, NUM_IN]
    residual_ptr,  # as out, or None
    num_rows,
    num_out,
    x_stride,
    out_stride,
    NUM_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N products with every row, outputs along the tensor cores' long side."""
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    m = tl.arange(0, BLOCK_M)[None, :]
    i = tl.arange(0, BLOCK_N)[:, None]
    n = tl.program_id(0) * OUTS + i % OUTS
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = m < num_rows, n < num_out
    # Gated, the block's second half are the rows of `up` that belong to the gate's before them.
    weight_row = n.to(tl.int64) + i // OUTS * num_out
    weight_at = weight_ptr + weight_row * NUM_IN + k[None, :]
    x_at = x_ptr + m * x_stride + k[:, None]
    at = m * out_stride + n
    mask = is_row & is_out
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(DEPENDENT)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        inside = start + k < NUM_IN
        x = tl.load(x_at + start, mask=is_row & inside[:, None], other=0.0)
        weight = tl.load(weight_at + start, mask=is_out & inside[None, :], other=0.0)
        y = tl.dot(weight, x, y)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OUTS, BLOCK_M]), (1, 2, 0)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[:, None]
        at, mask = m * out_stride + n, (m < num_rows) & (n < num_out)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
