"""The norm behind a layer with a state: of each head, or group of heads, by itself, and gated."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .rms_norm import Norm, normed_row, rms_norm_reference
from .silu_mul import silu


def gated_norm(x: Tensor, norm: Norm, gate: Tensor, *, gates_first: bool = False) -> Tensor:
    """norm(x) silu(gate) of each head or, with `gates_first`, norm(x silu(gate)).

    Heads have the same weights [dim], or each its own [heads, dim].
    Shape: x [T, heads, dim], dense; gate [T, heads * dim], each row dense -> [T, heads * dim].
    """
    num_rows, num_heads, dim = x.shape
    if not uses_triton(x):
        return gated_norm_reference(x, norm, gate, gates_first=gates_first)
    assert x.is_contiguous()
    assert norm.weight.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty(num_rows, num_heads * dim, dtype=x.dtype, device=x.device)
    _gated_norm_kernel[(num_rows, num_heads)](
        out, x, norm.weight, norm.eps, gate, gate.stride(0), DIM=dim,
        WEIGHT_STRIDE=dim if norm.weight.ndim == 2 else 0, GATES_FIRST=gates_first,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out


def gated_norm_reference(
    x: Tensor, norm: Norm, gate: Tensor, *, gates_first: bool = False
) -> Tensor:
    wide, factor = x.float(), F.silu(gate.float()).view_as(x)
    if gates_first:
        wide = wide * factor
    normed = rms_norm_reference(wide, norm._replace(weight=norm.weight.float()))
    if not gates_first:
        normed = normed * factor
    return normed.flatten(1).to(x.dtype)


@triton.jit
def _gated_norm_kernel(
    out_ptr,  # [T, heads, DIM]
    x_ptr,  # [T, heads, DIM]
    weight_ptr,  # [DIM], or of each head
    eps,
    gate_ptr,  # [T, heads * DIM]
    gate_stride,
    DIM: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program: one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < DIM
    at = (row * tl.num_programs(1) + head) * DIM + d
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight_at = weight_ptr + head * WEIGHT_STRIDE + d
    weight = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + head * DIM + d, mask=mask, other=0.0)
    factor = silu(gate.to(tl.float32))
    if GATES_FIRST:
        y = normed_row(x * factor, weight, eps, DIM)
    else:
        y = normed_row(x, weight, eps, DIM) * factor
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
