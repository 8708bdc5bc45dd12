"""What a linear layer multiplies by, in one format each. A new format is a class here or in a file
beside it, and an entry in `checkpoint.py`, which chooses by what the checkpoint holds.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.layers import compiled, product
from outrider.kernels.cpu.packing import BLOCK, Codes, Layout, PackedTiles, pack, unpack
from outrider.kernels.model.linear import add_linear, linear
from outrider.kernels.model.packed_linear import PackedWeight, pack_weight, packed_linear
from outrider.kernels.model.rms_norm import Norm, rms_norm_reference
from outrider.kernels.model.same_bits_linear import (
    add_same_bits_linear,
    library_rows,
    same_bits_linear,
)
from outrider.kernels.model.silu_mul import silu_mul_reference


class Weight(ABC):
    """The matrix of a linear layer, [N, K]."""

    shape: tuple[int, int]
    num_bytes: int  # that a product reads
    format: str = ""  # of its numbers, if that is not the model's dtype

    @abstractmethod
    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """rmsnorm(x) W^T + b; with `gated` silu of its first half times the second.

        With `out` the result of a plain product, x W^T, goes there.
        Shape: x [T, K] -> [T, N] or, gated, [T, N / 2].
        """

    @abstractmethod
    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> Tensor | None:
        """Add x W^T + b to the residual, in place, and apply `norm` to the sum on the way.

        Returns the normalised sum, or None if whatever reads the sum normalises it more cheaply.
        Shape: residual [T, N], x [T, K] -> [T, N]
        """

    @abstractmethod
    def dequantised(self) -> Tensor:
        """What this format stands for, in the model's dtype. Shape: [N, K]."""

    def with_same_bits(self, bias: Tensor | None) -> "Weight":
        """The same matrix on a GPU, whose products with a row, with this bias, are the same to the
        bit in any company.

        Raises ValueError if this format has none, or the GPU is unfit.
        """
        raise ValueError(f"weights in {self.format} have no such products")


class Dense(Weight):
    """A plain matrix. Our kernels multiply by it on a GPU, torch on a CPU."""

    def __init__(self, matrix: Tensor) -> None:
        """Shape: matrix [N, K], dense."""
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.num_bytes = matrix.nbytes

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        return linear(x, self.matrix, bias, norm=norm, gated=gated, out=out)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> Tensor | None:
        return add_linear(residual, x, self.matrix, bias, norm=norm)

    def dequantised(self) -> Tensor:
        return self.matrix

    def with_same_bits(self, bias: Tensor | None) -> "SameBits":
        return SameBits(self.matrix, bias)


class SameBits(Dense):
    """A plain matrix on a GPU, whose products with a row are the same to the bit in any company."""

    def __init__(self, matrix: Tensor, bias: Tensor | None) -> None:
        """Raises ValueError if this GPU is unfit. Shape: matrix [N, K], dense, bias [N]."""
        super().__init__(matrix)
        self._library = library_rows(matrix, bias)

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        return same_bits_linear(
            x, self.matrix, bias, self._library, norm=norm, gated=gated, out=out
        )

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> Tensor | None:
        return add_same_bits_linear(residual, x, self.matrix, bias, self._library, norm=norm)


class Packed(Weight):
    """A matrix that oneDNN reordered for a CPU, perhaps rounded to 8 bits."""

    def __init__(self, matrix: PackedWeight, shape: tuple[int, int]) -> None:
        self._matrix = matrix
        self.shape = shape
        self.num_bytes = (matrix.reordered if matrix.rounded is None else matrix.rounded).nbytes

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        if norm is not None:
            x = rms_norm_reference(x, norm)
        y = packed_linear(x, self._matrix, bias)
        if gated:
            y = silu_mul_reference(y)
        return y if out is None else out.copy_(y)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> Tensor | None:
        residual.add_(packed_linear(x, self._matrix, bias))
        return None

    def dequantised(self) -> Tensor:
        unit = torch.eye(self.shape[1], dtype=self._matrix.reordered.dtype)
        return packed_linear(unit, self._matrix).t()  # oneDNN's layout cannot be read otherwise


class Tiles(Weight):
    """A matrix of a CPU's compiled layers, of 4 or 8 bits a number.

    Inputs are taken, and sums made, in float32; what comes out is in the model's
    dtype.
    """

    def __init__(self, matrix: PackedTiles, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self.shape = matrix.shape
        self.num_bytes = matrix.data.nbytes
        self._dtype = dtype

    @staticmethod
    def rounded(matrix: Tensor) -> "Tiles | None":
        """A plain matrix in 8 bits, with a scale for every 32 inputs; None if they do not divide.

        Shape: [N, K].
        """
        if matrix.shape[1] % BLOCK:
            return None
        groups = matrix.float().unflatten(1, (-1, BLOCK))
        scale = (groups.abs().amax(2) / 127).half()
        # Of a scale too small for float16 nothing is left: nor is there of its numbers.
        codes = (groups / scale.float().clamp_min(1e-12)[..., None]).round().clamp(-127, 127)
        rounded = Codes(codes.to(torch.int8).flatten(1), scale)
        return Tiles(pack(rounded, Layout.EIGHT_HALF), matrix.dtype)

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        x = x.float()
        if norm is not None:
            x = rms_norm_reference(x, norm._replace(weight=norm.weight.float()))
        y = product(x, self.matrix, None if bias is None else bias.float())
        if gated:
            y = silu_mul_reference(y)
        return y.to(self._dtype) if out is None else out.copy_(y)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> Tensor | None:
        residual.add_(product(x.float(), self.matrix, None if bias is None else bias.float()))
        return None

    def dequantised(self) -> Tensor:
        return unpack(self.matrix).dequantised().to(self._dtype)


class Linear(NamedTuple):
    """A linear layer: x W^T + b."""

    weight: Weight
    bias: Tensor | None  # [N]

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.weight.multiply(x, self.bias, norm=norm, gated=gated, out=out)

    def add_to(self, residual: Tensor, x: Tensor, *, norm: Norm | None = None) -> Tensor | None:
        return self.weight.add_to(residual, x, self.bias, norm=norm)


def with_same_bits(linear: Linear) -> Linear:
    """The same layer on a GPU, with each row the same to the bit in any company.

    Raises ValueError if its format or this GPU is unfit.
    """
    return Linear(linear.weight.with_same_bits(linear.bias), linear.bias)


def packed(linear: Linear, *, rounds: bool) -> Linear:
    """The same layer as a CPU reads it best; with `rounds`, in 8 bits if that pays.

    It stays as it is if oneDNN lacks the dtype, or this torch the operator.
    """
    weight = linear.weight
    if not isinstance(weight, Dense):
        return linear
    if rounds and compiled() is not None:
        tiles = Tiles.rounded(weight.matrix)
        if tiles is not None:
            return Linear(tiles, linear.bias)
    matrix = pack_weight(weight.matrix, rounds=rounds)
    return linear if matrix is None else Linear(Packed(matrix, weight.shape), linear.bias)
