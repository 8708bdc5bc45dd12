"""The matrices of a mixture of experts: plain, or with 4 or 8 bits a number."""

import math
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from .narrow_matrix import STEP, NarrowMatrix, RowFormat, dequantise, without_rounding

MXFP4_GROUP = 32  # inputs that share a scale in MXFP4


class ExpertMatrix(NamedTuple):
    """The same linear layer of every expert, stacked."""

    matrix: Tensor | NarrowMatrix  # [E * N, K]; narrow: inputs in order, scales within an expert
    bias: Tensor | None  # [E * N]
    num_experts: int  # E

    @property
    def num_out(self) -> int:
        """N"""
        return self.matrix.shape[0] // self.num_experts

    @property
    def num_bytes(self) -> int:
        matrix = self.matrix
        num_bytes = matrix.num_bytes if isinstance(matrix, NarrowMatrix) else matrix.nbytes
        return num_bytes + (0 if self.bias is None else self.bias.nbytes)


class Glu(NamedTuple):
    """(up' + shift) * gate' * sigmoid(alpha * gate'),  gate' = min(gate, limit), |up'| <= limit."""

    alpha: float
    limit: float
    shift: float


SILU = Glu(1.0, math.inf, 0.0)  # silu(gate) * up
RELU_SQUARED: Final = "relu_squared"  # max(up, 0)^2, of experts without a gate
Activation = Glu | Literal["relu_squared"]


def layers_in_first(activation: Activation) -> int:
    """How many layers an expert's first is made of: gate and up, or up alone."""
    return 2 if isinstance(activation, Glu) else 1


def expert_of(layer: ExpertMatrix, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Matrix and bias of one expert, dequantised. Shape: [N, K], [N]."""
    bias = None if layer.bias is None else layer.bias.view(layer.num_experts, -1)[expert]
    matrix = part_of(layer.matrix, expert, layer.num_experts)
    if isinstance(matrix, NarrowMatrix):
        return dequantise(matrix, dtype), bias
    return matrix.to(dtype), bias


def part_of(matrix: Tensor | NarrowMatrix, expert: int, num_experts: int) -> Tensor | NarrowMatrix:
    """A view of one expert's matrix. Shape: [E * N, K] -> [N, K]."""
    num_out = matrix.shape[0] // num_experts
    part = slice(expert * num_out, (expert + 1) * num_out)
    if not isinstance(matrix, NarrowMatrix):
        return matrix[part]
    scale = matrix.scale[:, part.start // matrix.rows : -(-part.stop // matrix.rows)]
    zero = None if matrix.zero is None else matrix.zero[:, part]
    factor = None if matrix.factor is None else matrix.factor[part]
    return matrix._replace(codes=matrix.codes[part], scale=scale, zero=zero, factor=factor)


def for_expert(matrix: NarrowMatrix) -> NarrowMatrix:
    """A matrix of a checkpoint as an expert takes it.

    Inputs are rounded if the format rounds them by blocks of FP8. Others stay as they are: the
    bytes of weights take the time of few rows, and a group is all inputs.
    """
    is_block = matrix.kind == "fp8" and matrix.group == STEP and matrix.rows > 1
    return matrix if is_block else without_rounding(matrix)


def row_format_of(layer: ExpertMatrix) -> RowFormat | None:
    """What its inputs are rounded to, if they are."""
    return layer.matrix.row_format if isinstance(layer.matrix, NarrowMatrix) else None


def is_mxfp4(matrix: NarrowMatrix) -> bool:
    """Whether its scales are powers of two, of 32 inputs, stored as exponents."""
    is_power = matrix.scale.dtype == torch.float8_e8m0fnu
    return matrix.kind == "fp4" and matrix.group == MXFP4_GROUP and is_power
