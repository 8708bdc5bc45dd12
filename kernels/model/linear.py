"""Linear layers with an RMSNorm before, and silu(gate) * up or a residual after them.

    y = epilogue(rmsnorm(x) W^T + b),     rmsnorm(x)_k = x_k w_k / sqrt(mean(x^2) + eps)

Decoding has few rows. So a layer takes as long as reading W once, and every extra launch counts.
One row, or two if W is small, take a single launch. Up to 32 rows the product is our own, and with
few outputs up to 256; for more, the library's is faster. Up to 256 rows, a product that is added to
a residual is split over K, and the kernel that adds the parts also normalises the sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .product import is_ahead, product
from .rms_norm import Norm, rms_norm, rms_norm_reference
from .row_codes import Rows
from .silu_mul import silu_mul, silu_mul_reference
from .split_product import add_split_product, can_split
from .tiles import MAX_SPLIT_ROWS

# Measured on an H200.
_MAX_PAIR_WEIGHTS = 1 << 23  # up to this size, two rows take the single launch too


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A linear layer, with the norm before it and the gate after it.

    Parameters
    ----------
    x
        Shape: [T, K], rows dense.
    weight
        Shape: [N, K]; with `gated` [2 N, K], the gate's rows before those of `up`.
    bias
        Shape: [N] or, with `gated`, [2 N].
    norm
        Applied to x first.
    gated
        Return silu(first half) * second half of the result.
    out
        Takes the result, which must be a plain product, x W^T. Shape: [T, N], dense.

    Returns: [T, N]
    """
    if out is not None:
        is_plain = bias is None and norm is None and not gated
        assert is_plain
        if uses_triton(x) and is_ahead(x, weight):
            return product(x, weight, out=out)
        return torch.mm(x, weight.t(), out=out)
    if not uses_triton(x):
        return linear_reference(x, weight, bias, norm=norm, gated=gated)
    assert x.stride(-1) == 1
    assert weight.is_contiguous()
    if _takes_one_launch(x, weight):
        return _fused(x, weight, bias, norm=norm, gated=gated)
    if norm is not None:
        x = rms_norm(x, norm)
    if is_ahead(x, weight):
        return product(x, weight, bias, gated=gated)
    y = F.linear(x, weight, bias)
    return silu_mul(y) if gated else y


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
) -> Rows | None:
    """Add a linear layer to the residual in place. Returns norm(residual) if that comes cheaply.

    Otherwise returns None, and the layer that reads the residual must apply `norm`.
    Shape: residual [T, N], x [T, K], weight [N, K] -> [T, N]
    """
    if not uses_triton(x):
        linear_reference(x, weight, bias, residual=residual)
    elif _takes_one_launch(x, weight):
        _fused(x, weight, bias, residual=residual)
    elif len(x) <= MAX_SPLIT_ROWS and can_split(x, weight):
        return add_split_product(residual, x, weight, bias, norm)
    elif bias is None:
        residual.addmm_(x, weight.t())
    else:
        residual.add_(F.linear(x, weight, bias))
    return None


def _takes_one_launch(x: Tensor, weight: Tensor) -> bool:
    return len(x) == 1 or (len(x) == 2 and weight.numel() <= _MAX_PAIR_WEIGHTS)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = rms_norm_reference(x, norm)
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul_reference(y)
    return y if residual is None else residual.add_(y)


def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    num_rows, num_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_rows, num_out) if residual is None else residual
    # Measured: best if a program loads as many weights at once as its registers hold.
    block_k = min(4096, triton.next_power_of_2(num_in))
    num_at_once = 4096 if num_rows == 1 and weight.numel() <= _MAX_PAIR_WEIGHTS else 8192
    block_n = max(1, num_at_once // block_k // (2 if gated else 1))
    _fused_kernel[(triton.cdiv(num_out, block_n),)](
        out, x, weight, bias, norm.weight if norm is not None else None, residual, num_out,
        norm.eps if norm is not None else 0.0, x.stride(0), out.stride(0),
        NUM_ROWS=num_rows, NUM_IN=num_in, BLOCK_N=block_n, BLOCK_K=block_k, GATED=gated,
        num_warps=max(1, min(4, num_rows * block_k // 1024)), **dependent_launch(x.device),
    )  # fmt: skip
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
    """Each program: BLOCK_N outputs of every row; loads weights one block ahead."""
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
        # The norm's scale is a factor of a row's whole sum, so it can be applied last.
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
