"""The norm behind a delta net: of each head by itself, and gated."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .rms_norm import Norm, normed_row, rms_norm_reference
from .silu_mul import silu


def gated_norm(x: Tensor, norm: Norm, gate: Tensor) -> Tensor:
    """norm(x) silu(gate) of each head.

    Shape: x [T, heads, dim], dense; gate [T, heads * dim], each row dense -> [T, heads * dim].
    """
    num_rows, num_heads, dim = x.shape
    if not uses_triton(x):
        return gated_norm_reference(x, norm, gate)
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty(num_rows, num_heads * dim, dtype=x.dtype, device=x.device)
    _gated_norm_kernel[(num_rows, num_heads)](
        out, x, norm.weight, norm.eps, gate, gate.stride(0), DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out


def gated_norm_reference(x: Tensor, norm: Norm, gate: Tensor) -> Tensor:
    normed = rms_norm_reference(x.float(), norm._replace(weight=norm.weight.float()))
    return (normed.flatten(1) * F.silu(gate.float())).to(x.dtype)


@triton.jit
def _gated_norm_kernel(
    out_ptr,  # [T, heads, DIM]
    x_ptr,  # [T, heads, DIM]
    weight_ptr,  # [DIM]
    eps,
    gate_ptr,  # [T, heads * DIM]
    gate_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program: one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < DIM
    at = (row * tl.num_programs(1) + head) * DIM + d
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + head * DIM + d, mask=mask, other=0.0)
    y = normed_row(x, weight, eps, DIM) * silu(gate.to(tl.float32))
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
