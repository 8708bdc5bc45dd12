"""The matrices of a mixture of experts, with 4 bits a number (MXFP4)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .narrow_matrix import NarrowMatrix, dequantise

GROUP = 32  # inputs that share a scale


class ExpertMatrix(NamedTuple):
    """The same linear layer of every expert, stacked."""

    matrix: NarrowMatrix  # [E * N, K] fp4, scales e8m0 of 32 inputs
    bias: Tensor  # [E * N]
    num_experts: int  # E

    @property
    def num_out(self) -> int:
        """N"""
        return self.matrix.shape[0] // self.num_experts

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes + self.bias.nbytes


class Experts(NamedTuple):
    """The gated MLPs."""

    gate_up: ExpertMatrix  # [2 I, H] each: the gate's outputs, then those of `up`
    down: ExpertMatrix  # [H, I] each
    alpha: float
    limit: float


def expert_of(layer: ExpertMatrix, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrix and bias of one expert, dequantised. Shape: [N, K], [N]."""
    part = slice(expert * layer.num_out, (expert + 1) * layer.num_out)
    codes, scale = layer.matrix.codes[part], layer.matrix.scale[:, part]
    return dequantise(layer.matrix._replace(codes=codes, scale=scale), dtype), layer.bias[part]
