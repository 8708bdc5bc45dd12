"""Weights in 4 or 8 bits a number that a GPU multiplies by directly."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Unpack

import torch
from torch import Tensor

from outrider.kernels._dispatch import converts_fp8, uses_triton
from outrider.kernels.model.narrow_linear import add_narrow_linear, narrow_linear
from outrider.kernels.model.narrow_matrix import (
    NarrowMatrix,
    dequantise,
    reordered_rows,
    round_to_fp8,
)
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows, plain, round_rows, rounded_rows
from outrider.kernels.model.scaled_linear import add_scaled_linear, scaled_linear
from outrider.kernels.model.scaled_trial import try_scaled_product

from .admission import UnsupportedModelError
from .weights import Dense, Fused, Linear, Matrix, finished, normed


class Narrow(Matrix):
    """A matrix in 4 or 8 bits, dequantised within each product."""

    def __init__(
        self, matrix: NarrowMatrix, dtype: torch.dtype, *, batch_invariant: bool = False
    ) -> None:
        """`dtype` is the model's. If `batch_invariant`, a row's bits do not depend on the batch."""
        self.matrix, self._dtype, self.batch_invariant = matrix, dtype, batch_invariant
        self.shape = matrix.shape
        self.num_bytes = matrix.num_bytes
        self.format = matrix.kind

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        return narrow_linear(
            plain(x), self.matrix, bias, batch_invariant=self.batch_invariant, **fused
        )

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        return add_narrow_linear(
            residual, plain(x), self.matrix, bias, norm=norm, batch_invariant=self.batch_invariant
        )

    def dequantised(self) -> Tensor:
        return dequantise(self.matrix, self._dtype)

    def reordered(self, order: Tensor) -> "Narrow":
        return type(self)(reordered_rows(self.matrix, order), self._dtype)

    def as_batch_invariant(self, bias: Tensor | None) -> "Narrow":
        return Narrow(self.matrix, self._dtype, batch_invariant=True)


class Scaled(Narrow):
    """A matrix of 8 bits whose inputs are rounded to 8 bits too, each row by itself (W8A8)."""

    input_eps = 2**-8

    def __init__(self, matrix: NarrowMatrix, dtype: torch.dtype) -> None:
        """`dtype` is the model's. Finds out by which kernel many rows are multiplied."""
        assert matrix.row_format is not None
        super().__init__(matrix, dtype, batch_invariant=True)
        self.format = f"{matrix.kind} (inputs too)"
        self.row_format = matrix.row_format
        try_scaled_product(matrix, dtype)

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        return scaled_linear(x, self.matrix, bias, **fused)

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        return add_scaled_linear(residual, x, self.matrix, bias, norm=norm)

    def taken(self, x: Tensor, output: int) -> Tensor:
        assert self.row_format is not None
        return rounded_rows(x, self.row_format)

    def as_batch_invariant(self, bias: Tensor | None) -> "Scaled":
        return self


def in_fp8(layer: Linear) -> Linear:
    """The same layer in FP8, its inputs rounded too, if its matrix is a plain one."""
    if not isinstance(layer.weight, Dense):
        return layer
    matrix = layer.weight.matrix
    rounded = round_to_fp8(matrix, rounds_inputs=True)
    return layer._replace(weight=Scaled(rounded, matrix.dtype))


class Stacked(Matrix):
    """Matrices of different formats, stacked as one: each has its own product."""

    def __init__(self, weights: list[Matrix]) -> None:
        self._weights = weights
        self._sizes = [weight.shape[0] for weight in weights]
        self.shape = (sum(self._sizes), weights[0].shape[1])
        self.num_bytes = sum(weight.num_bytes for weight in weights)
        self.format = "mixed"
        self.batch_invariant = all(weight.batch_invariant for weight in weights)
        self.input_eps = max(weight.input_eps for weight in weights)
        formats = [weight.row_format for weight in weights]
        of_codes = {each for each in formats if each is not None}
        if len(of_codes) == 1:
            self.row_format = of_codes.pop()._replace(keeps_rows=None in formats)

    def reordered(self, order: Tensor) -> "Stacked":
        firsts = [0, *accumulate(self._sizes)]
        each = zip(self._weights, firsts, order.split(self._sizes), strict=False)
        return Stacked([weight.reordered(part - first) for weight, first, part in each])

    def as_batch_invariant(self, bias: Tensor | None) -> "Stacked":
        parts = zip(self._weights, self._biases(bias), strict=True)
        return Stacked([weight.as_batch_invariant(part) for weight, part in parts])

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        return finished(torch.cat(self._products(x, bias, fused.get("norm")), 1), **fused)

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        residual.add_(torch.cat(self._products(x, bias, None), 1))
        return None

    def pieces(
        self, x: Rows, bias: Tensor | None, norm: Norm | None, sizes: Sequence[int]
    ) -> Sequence[Tensor]:
        return [*_cut(self._products(x, bias, norm), sizes)]

    def _products(self, x: Rows, bias: Tensor | None, norm: Norm | None) -> list[Tensor]:
        """Those of its matrices, which lie side by side."""
        if isinstance(x, Tensor):
            if self.row_format is not None and uses_triton(x):
                x = round_rows(x, self.row_format, norm)
            else:
                x = normed(x, norm)
        pairs = zip(self._weights, self._biases(bias), strict=True)
        return [
            weight.multiply(plain(x) if weight.row_format is None else x, part)
            for weight, part in pairs
        ]

    def taken(self, x: Tensor, output: int) -> Tensor:
        for weight, size in zip(self._weights, self._sizes, strict=True):
            if output < size:
                return weight.taken(x, output)
            output -= size
        raise IndexError("the matrix has fewer outputs")

    def _biases(self, bias: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(self._sizes) if bias is None else bias.split(self._sizes)

    def dequantised(self) -> Tensor:
        return torch.cat([weight.dequantised() for weight in self._weights])


def _cut(side_by_side: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[Tensor]:
    """Pieces of so many columns; one is a copy only if it has columns of several tensors."""
    left = list(side_by_side)
    for size in sizes:
        parts, missing = [], size
        while missing:
            first = left.pop(0)
            if first.shape[1] > missing:
                first, rest = first.tensor_split([missing], 1)
                left.insert(0, rest)
            parts.append(first)
            missing -= first.shape[1]
        yield parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def check_fp8(kind: str, device: torch.device) -> None:
    """Raises UnsupportedModelError if it is a GPU without instructions for weights in FP8."""
    if kind == "fp8" and device.type == "cuda" and not converts_fp8(device):
        raise UnsupportedModelError(
            f"its weights are in FP8, and {torch.cuda.get_device_name(device)} has no instructions "
            "for that (compute capability 8.9 or newer has): take a checkpoint in 16 bits, INT8 "
            "or INT4"
        )
