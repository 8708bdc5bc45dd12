"""RMSNorm: y_k = x_k w_k / sqrt(mean(x^2) + eps)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import (
    dependent_launch,
    start_next_kernel,
    wait_for_inputs,
)
from ..triton_or_none import tl, triton
from .narrow_matrix import RowFormat


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor  # [K]
    eps: float
    rounds: RowFormat | None = None  # what the layer behind it rounds its inputs to


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Shape: [T, K], rows dense -> [T, K]."""
    if not uses_triton(x):
        return rms_norm_reference(x, norm)
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        out, x, norm.weight, norm.eps, x.stride(0), width, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def rms_norm_reference(x: Tensor, norm: Norm) -> Tensor:
    """Shape: [..., K] -> [..., K].

    Uses torch's layer norm over x and -x together, whose mean is 0: one call on a CPU, where
    torch's RMSNorm makes a dozen.
    """
    width = x.shape[-1]
    both = F.layer_norm(torch.cat((x, -x), -1), (2 * width,), None, None, norm.eps)
    return both[..., :width] * norm.weight


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, eps, x_stride, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + k, mask=k < width, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + row * width + k, y.to(out_ptr.dtype.element_ty), mask=k < width)
