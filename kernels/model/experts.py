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
from .expert_matrix import Experts, expert_of
from .experts_product import experts_product
from .rms_norm import Norm
from .routing import Routing
from .row_codes import Normed
from .split_product import add_parts


def add_experts(
    residual: Tensor, x: Tensor, routing: Routing, experts: Experts, norm: Norm | None = None
) -> Normed | None:
    """Add the output of each row's experts to the residual in place. Returns norm(residual) if that
    comes cheaply.

    Otherwise returns None, and the layer that reads the residual must apply `norm`.
    Shape: residual [T, H] dense, x [T, H], rows dense -> [T, H]
    """
    if not uses_triton(x):
        add_experts_reference(residual, x, routing, experts)
        return None
    gated = experts_product(x, routing, experts.gate_up, experts)
    return add_parts(residual, experts_product(gated, routing, experts.down, None), norm)


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
