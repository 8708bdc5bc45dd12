"""A mixture of experts, gated MLPs whose matrices have 4 bits a number (MXFP4):

    y += sum over a row's experts of weight * down(glu(gate_up(x)))
    glu = (up' + 1) * gate' * sigmoid(alpha * gate'),  gate' = min(gate, limit), |up'| <= limit

A program multiplies a tile of rows that share an expert by some outputs of it. Codes and scales
become numbers of x's dtype, which holds them exactly, on their way to the tensor cores; sums are
float32. An output adds up its inputs in one order, whatever the tile, so the bits of a row do not
depend on the batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .expert_matrix import ExpertMatrix, Experts, expert_of
from .experts_product import experts_product
from .rms_norm import Norm, rms_norm_reference
from .routing import Routing
from .split_product import store_and_normalise


def add_experts(
    residual: Tensor, x: Tensor, routing: Routing, experts: Experts, norm: Norm | None = None
) -> Tensor | None:
    """Add the output of each row's experts to the residual in place; returns norm(residual), or
    None without a norm.

    Shape: residual [T, H] dense, x [T, H], rows dense -> [T, H]
    """
    if not uses_triton(x):
        add_experts_reference(residual, x, routing, experts)
        return rms_norm_reference(residual, norm) if norm is not None else None
    gated = experts_product(x, routing, experts.gate_up, experts)
    outputs = experts_product(gated, routing, experts.down, None)
    return combine(residual, outputs, routing, experts.down, norm)


def add_experts_reference(residual: Tensor, x: Tensor, routing: Routing, experts: Experts) -> None:
    """Unpacks one expert at a time, and only those that some row has."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for expert in routing.ids.unique().tolist():
        row, choice = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up, bias = expert_of(experts.gate_up, expert, x.dtype)
        gate, up = F.linear(x[row], gate_up, bias).float().chunk(2, 1)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        gated = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
        down, bias = expert_of(experts.down, expert, x.dtype)
        y = F.linear(gated.to(x.dtype), down, bias).float()
        total.index_add_(0, row, routing.weights[row, choice, None] * y)
    residual.add_(total.to(residual.dtype))


def combine(
    residual: Tensor, outputs: Tensor, routing: Routing, layer: ExpertMatrix, norm: Norm | None
) -> Tensor | None:
    """Add each row's weighted sum of its experts' outputs to the residual in place.

    Returns norm(residual), or None without a norm.
    Shape: residual [T, H] dense, outputs [T * k, H] float32, before the layer's bias -> [T, H]
    """
    num_rows, width = residual.shape
    assert residual.is_contiguous()
    out = torch.empty_like(residual) if norm is not None else None
    block = triton.next_power_of_2(width)
    _combine_kernel[(num_rows,)](
        residual,
        out,
        outputs,
        routing.ids,
        routing.weights,
        layer.bias,
        norm.weight if norm is not None else None,
        norm.eps if norm is not None else 0.0,
        width,
        TOP_K=routing.ids.shape[1],
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        enable_fp_fusion=False,
        **dependent_launch(residual.device),
    )
    return out


@triton.jit
def _combine_kernel(
    residual_ptr,  # [num_rows, width]
    out_ptr,  # as residual, or None
    outputs_ptr,  # [num_rows, TOP_K, width] float32
    ids_ptr,  # [num_rows, TOP_K]
    weights_ptr,  # [num_rows, TOP_K]
    bias_ptr,  # [experts, width]
    norm_ptr,  # [width] or None
    eps,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < width
    norm = None
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + n, mask=mask, other=0.0).to(tl.float32)
    at = row * width + n
    wait_for_inputs(DEPENDENT)
    y = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + row * TOP_K + c)
        out = tl.load(outputs_ptr + (row * TOP_K + c) * width + n, mask=mask, other=0.0)
        out += tl.load(bias_ptr + expert * width + n, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * TOP_K + c) * out
    normed = store_and_normalise(residual_ptr, y + total, at, mask, norm, eps, width)
    if out_ptr is not None:
        tl.store(out_ptr + at, normed, mask=mask)
