"""The gate of a gated MLP: silu(gate) * up."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Shape: [T, 2 N], dense -> [T, N], dense."""
    if not uses_triton(gate_up):
        y = silu_mul_reference(gate_up)
        return y if out is None else out.copy_(y)
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
        out, gate_up, width, BLOCK=block, **dependent_launch(gate_up.device)
    )
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Shape: [T, 2 N] -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def limited_glu(gate, up, alpha, limit, shift):
    """As `Glu` says. Comparisons keep what is not a number, which tl.minimum would not."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + shift) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = gate_up_ptr + row * 2 * width + n
    gate = tl.load(gate_ptr, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=n < width, other=0.0).to(tl.float32)
    y = silu(gate) * up
    tl.store(out_ptr + row * width + n, y.to(out_ptr.dtype.element_ty), mask=n < width)
