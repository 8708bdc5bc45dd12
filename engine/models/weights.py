"""The matrices of linear layers, one class for each format that they are kept in.

A new format is a class here, or in a file beside this one, and an entry in `checkpoint.py`, which
chooses the format by what the checkpoint holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.cpu.layers import compiled, tiles_product, unpacked_tiles
from outrider.kernels.cpu.packing import BLOCK, Codes, Layout, PackedTiles, pack_tiles
from outrider.kernels.model.batch_invariant_linear import (
    LibraryRows,
    add_batch_invariant_linear,
    batch_invariant_linear,
    library_rows,
)
from outrider.kernels.model.linear import add_linear, linear
from outrider.kernels.model.narrow_matrix import RowFormat
from outrider.kernels.model.packed_linear import PackedWeight, pack_weight, packed_linear
from outrider.kernels.model.product import product
from outrider.kernels.model.rms_norm import Norm, rms_norm, rms_norm_reference
from outrider.kernels.model.row_codes import Rows, plain, rounded_rows
from outrider.kernels.model.silu_mul import silu_mul, silu_mul_reference

Axis = Literal["outputs", "inputs"]
W = TypeVar("W", bound="Weight", covariant=True)


class Fused(TypedDict, total=False):
    """What a product may do besides multiplying; it does only those that are given."""

    norm: Norm | None  # applied to the inputs
    gated: bool  # silu of the first half of the outputs, times the second half
    out: Tensor | None  # takes the result; given only for a plain product, x W^T


class Weight(ABC):
    """The numbers of a layer, in whatever format."""

    shape: tuple[int, int]
    num_bytes: int  # read to compute one row
    format: str = ""  # of the numbers; "" if they are in the model's dtype
    batch_invariant: bool = False  # whether the bits of a row do not depend on the batch
    input_eps: float = 0.0  # how far a layer may be off because its inputs are rounded
    row_format: RowFormat | None = None  # of codes, if it multiplies by those of rows

    def before(self, norm: Norm) -> Norm:
        """The norm in front of this layer; it also rounds its result if the layer wants codes."""
        return norm._replace(rounds=self.row_format)

    @abstractmethod
    def dequantised(self) -> Tensor:
        """The numbers in the model's dtype. Shape: as `shape`."""

    @abstractmethod
    def as_batch_invariant(self, bias: Tensor | None) -> "Weight":
        """The same on a GPU, with products whose rows do not depend on the batch.

        A row's product, plus this bias, is the same to the bit whatever other rows come with it.
        Raises ValueError if this format or this GPU cannot do that.
        """

    def as_batch_dependent(self) -> "Weight":
        """The opposite: as it was before."""
        return self

    @abstractmethod
    def packed(self, *, rounds: bool) -> "Weight":
        """The same in the format that is fastest on a CPU; `rounds` allows rounding to 8 bits.

        Returns itself if oneDNN lacks the dtype, or this torch the operator.
        """


class Matrix(Weight):
    """The matrix of a linear layer, [N, K]."""

    @abstractmethod
    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        """x W^T + b. Shape: x [T, K] -> [T, N] or, gated, [T, N / 2]."""

    @abstractmethod
    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        """Add x W^T + b to the residual in place. Returns norm(residual) if that comes cheaply.

        Otherwise returns None, and the layer that reads the residual must apply `norm`.
        Shape: residual [T, N], x [T, K] -> [T, N]
        """

    def pieces(
        self, x: Rows, bias: Tensor | None, norm: Norm | None, sizes: Sequence[int]
    ) -> Sequence[Tensor]:
        """norm(x) W^T + b in pieces of so many outputs. Shape: [T, size] each, rows dense."""
        return torch.split(self.multiply(x, bias, norm=norm), [*sizes], 1)

    def reordered(self, order: Tensor) -> "Matrix":
        """The same with its outputs in this order. Shape: [N] int64"""
        raise TypeError(f"{type(self).__name__} has its outputs in one order")

    def taken(self, x: Tensor, output: int) -> Tensor:
        """The inputs that this output is computed from: x, or x rounded. Shape: [T, K]."""
        return x

    def as_batch_invariant(self, bias: Tensor | None) -> "Matrix":
        raise ValueError(f"weights in {self.format} have no such products")

    def packed(self, *, rounds: bool) -> "Matrix":
        return self


class Unfused(Matrix):
    """A format whose kernel does a product and no more: torch adds norm, gate and residual."""

    @abstractmethod
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b. Shape: [T, K] -> [T, N]."""

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        return finished(self._product(normed(plain(x), fused.get("norm")), bias), **fused)

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        residual.add_(self._product(plain(x), bias))
        return None


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm)


def finished(y: Tensor, **fused: Unpack[Fused]) -> Tensor:
    """What is to be made of a product. Shape: [T, N] -> [T, N] or, gated, [T, N / 2]"""
    if fused.get("gated"):
        y = silu_mul(y)
    out = fused.get("out")
    return y if out is None else out.copy_(y)


class Dense(Matrix):
    """A plain matrix. Our kernels multiply by it on a GPU, torch does on a CPU."""

    def __init__(self, matrix: Tensor, library: LibraryRows | None = None) -> None:
        """With `library`, from `library_rows`, a row's bits do not depend on the batch.

        Shape: matrix [N, K], dense.
        """
        self.matrix, self._library = matrix, library
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.num_bytes = matrix.nbytes
        self.batch_invariant = library is not None

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        x = plain(x)
        if self._library is not None:
            return batch_invariant_linear(x, self.matrix, bias, self._library, **fused)
        return linear(x, self.matrix, bias, **fused)

    def add_to(
        self, residual: Tensor, x: Rows, bias: Tensor | None, norm: Norm | None
    ) -> Rows | None:
        x = plain(x)
        if self._library is not None:
            return add_batch_invariant_linear(
                residual, x, self.matrix, bias, self._library, norm=norm
            )
        return add_linear(residual, x, self.matrix, bias, norm=norm)

    def dequantised(self) -> Tensor:
        return self.matrix

    def reordered(self, order: Tensor) -> "Dense":
        return Dense(self.matrix[order])

    def as_batch_invariant(self, bias: Tensor | None) -> "Dense":
        return Dense(self.matrix, library_rows(self.matrix, bias))

    def as_batch_dependent(self) -> "Dense":
        return Dense(self.matrix)

    def packed(self, *, rounds: bool) -> Matrix:
        if rounds and compiled() is not None:
            tiles = Tiles.rounded(self.matrix)
            if tiles is not None:
                return tiles
        matrix = pack_weight(self.matrix)
        return self if matrix is None else Packed(matrix, self.shape)


class Unrounded(Unfused):
    """A plain matrix whose products are float32, as some routers take them."""

    def __init__(self, matrix: Tensor, wide: Matrix | None = None) -> None:
        """`wide`: the same in float32, where our kernels do not multiply by 16 bits."""
        self._matrix = matrix
        self._is_own = uses_triton(matrix) and matrix.element_size() == 2
        self._wide = None if self._is_own else wide or Dense(matrix.float())
        self.shape, self.num_bytes = (matrix.shape[0], matrix.shape[1]), matrix.nbytes
        self.batch_invariant = self._is_own if self._wide is None else self._wide.batch_invariant

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._wide is not None:
            return self._wide.multiply(x.float(), bias)
        out = torch.empty(len(x), len(self._matrix), dtype=torch.float32, device=x.device)
        return product(x, self._matrix, bias, out=out)

    def dequantised(self) -> Tensor:
        return self._matrix

    def as_batch_invariant(self, bias: Tensor | None) -> "Unrounded":
        library_rows(self._matrix, bias)  # raises if not even our own products sum alike
        return self

    def packed(self, *, rounds: bool) -> Matrix:
        wide = self._wide and self._wide.packed(rounds=False)
        return Unrounded(self._matrix, wide)


class Packed(Unfused):
    """A matrix that oneDNN has reordered for a CPU."""

    batch_invariant = True

    def __init__(self, matrix: PackedWeight, shape: tuple[int, int]) -> None:
        self._matrix = matrix
        self.shape = shape
        self.num_bytes = matrix.reordered.nbytes

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear(x, self._matrix, bias)

    def dequantised(self) -> Tensor:
        unit = torch.eye(self.shape[1], dtype=self._matrix.reordered.dtype)
        return packed_linear(unit, self._matrix).t()  # oneDNN's layout cannot be read otherwise


class Tiles(Unfused):
    """A matrix for the compiled CPU layers, in 4 or 8 bits a number.

    Inputs and sums are float32, through norm and gate; only the output has the model's dtype.
    Where products are in integers, inputs have 16 bits, and each 32 of them a scale.
    """

    batch_invariant = True
    input_eps = 2**-14  # of a layer, whose attention enlarges the 2**-16 of its products

    def __init__(self, matrix: PackedTiles, dtype: torch.dtype, format: str) -> None:
        self.matrix, self.format = matrix, format
        self.shape = matrix.shape
        self.num_bytes = matrix.data.nbytes
        self._dtype = dtype

    @staticmethod
    def rounded(matrix: Tensor) -> "Tiles | None":
        """Round a plain matrix to 8 bits, with a scale for every BLOCK inputs.

        Returns None if BLOCK does not divide K. Shape: [N, K].
        """
        if matrix.shape[1] % BLOCK:
            return None
        groups = matrix.float().unflatten(1, (-1, BLOCK))
        scale = (groups.abs().amax(2) / 127).half()
        # A scale too small for float16 becomes 0, and so do the numbers that it scales.
        codes = (groups / scale.float().clamp_min(1e-12)[..., None]).round().clamp(-127, 127)
        rounded = Codes(codes.to(torch.int8).flatten(1), scale)
        return Tiles(pack_tiles(rounded, Layout.EIGHT_HALF), matrix.dtype, "8-bit")

    def multiply(self, x: Rows, bias: Tensor | None, **fused: Unpack[Fused]) -> Tensor:
        norm, out, x = fused.get("norm"), fused.get("out"), plain(x).float()
        if norm is not None:
            x = rms_norm_reference(x, norm._replace(weight=norm.weight.float()))
        y = self._product(x, bias)
        if fused.get("gated"):
            y = silu_mul_reference(y)
        return y.to(self._dtype) if out is None else out.copy_(y)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return tiles_product(x.float(), self.matrix, None if bias is None else bias.float())

    def dequantised(self) -> Tensor:
        return unpacked_tiles(self.matrix).to(self._dtype)


class RoundedInputs(Unfused):
    """A weight whose inputs are rounded first, where no kernel multiplies codes by codes."""

    input_eps = 2**-8

    def __init__(self, weight: Matrix, row_format: RowFormat) -> None:
        self.weight, self._rounded_to = weight, row_format
        self.shape, self.num_bytes = weight.shape, weight.num_bytes
        self.format, self.batch_invariant = weight.format, weight.batch_invariant

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.weight.multiply(self.taken(x, 0), bias)

    def dequantised(self) -> Tensor:
        return self.weight.dequantised()

    def reordered(self, order: Tensor) -> "RoundedInputs":
        return RoundedInputs(self.weight.reordered(order), self._rounded_to)

    def taken(self, x: Tensor, output: int) -> Tensor:
        return rounded_rows(x, self._rounded_to)

    def packed(self, *, rounds: bool) -> Matrix:
        return RoundedInputs(self.weight.packed(rounds=rounds), self._rounded_to)


class Layer(NamedTuple, Generic[W]):
    """A weight with its bias."""

    weight: W
    bias: Tensor | None  # [N]
    axis: Axis | None = None  # along which ranks share it; None: each has the whole

    def as_batch_invariant(self) -> Self:
        """The same layer on a GPU; the bits of a row do not depend on the batch.

        Raises ValueError if its format or this GPU cannot do that.
        """
        weight: Any = self.weight.as_batch_invariant(self.bias)  # of the same kind
        return self._replace(weight=weight)

    def packed(self, *, rounds: bool) -> Self:
        """The same layer in the format that is fastest on a CPU; `rounds` allows 8 bits."""
        weight: Any = self.weight.packed(rounds=rounds)  # of the same kind
        return self if weight is self.weight else self._replace(weight=weight)


class Linear(Layer[Matrix]):
    """A linear layer: x W^T + b."""

    def __call__(self, x: Rows, **fused: Unpack[Fused]) -> Tensor:
        return self.weight.multiply(x, self.bias, **fused)

    def of_normed(
        self, x: Tensor, normed: Rows | None, norm: Norm | None, *, gated: bool = False
    ) -> Tensor:
        """The layer of norm(x), or of `normed` if that is there. Shape: x, normed [T, K]."""
        if normed is None:
            return self(x, norm=norm, gated=gated)
        return self(normed, gated=gated)

    def pieces_of_normed(
        self, x: Tensor, normed: Rows | None, norm: Norm | None, sizes: Sequence[int]
    ) -> Sequence[Tensor]:
        """`of_normed` in pieces of so many outputs. Shape: [T, size] each, rows dense."""
        if normed is None:
            return self.weight.pieces(x, self.bias, norm, sizes)
        return self.weight.pieces(normed, self.bias, None, sizes)

    def add_to(self, residual: Tensor, x: Rows, *, norm: Norm | None = None) -> Rows | None:
        return self.weight.add_to(residual, x, self.bias, norm)


# Makes the same layer in another format; of one kind, the same kind.
Change = Callable[[Any], Any]


class Layered:
    """A dataclass some of whose fields are layers, or again such dataclasses."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def linears(self) -> dict[str, Layer[Weight]]:
        """All of its linear layers, by the names of fields, such as `down` or `shared.down`."""
        found: dict[str, Layer[Weight]] = {}
        for own, value in self._layers.items():
            if isinstance(value, Layer):
                found[own] = value
            else:
                found |= {f"{own}.{name}": layer for name, layer in value.linears.items()}
        return found

    def changed(self, change: Change) -> Self:
        """The same with its linear layers replaced, one by one in their order."""
        changed: dict[str, Any] = {
            name: change(value) if isinstance(value, Layer) else value.changed(change)
            for name, value in self._layers.items()
        }
        return replace(self, **changed)

    @property
    def _layers(self) -> "dict[str, Layer[Weight] | Layered]":
        """Those of its fields that are layers, or made of them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {n: value for n, value in values.items() if isinstance(value, (Layer, Layered))}
