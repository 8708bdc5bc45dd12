"""A rank's share of a model whose layers several ranks compute together.

A layer is shared along its own axis: of `outputs` a rank has a range of rows of the matrix, of
`inputs` a range of columns. What has no axis every rank has whole.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.kernels.model.narrow_matrix import (
    NarrowMatrix,
    columns_of,
    rows_of,
    stack,
    why_not_columns,
)

from .weights import Axis

_DIMS: dict[Axis, int] = {"outputs": 0, "inputs": 1}


class Section(NamedTuple):
    """One of the things that lie one after the other along an axis, such as q, k and v."""

    size: int  # in a rank's share
    copies: int = 1  # how many ranks, one after the other, have the same range of it


# Outputs of a layer, or of each of the layers that the file has as one.
Outputs = int | tuple[Section, ...]


def sections_of(size: Outputs) -> tuple[Section, ...]:
    return (Section(size),) if isinstance(size, int) else size


def num_outputs(size: Outputs) -> int:
    """In a rank's share."""
    return sum(section.size for section in sections_of(size))


class Cut(NamedTuple):
    """How a tensor is shared: matrices [.., N, K] or, along `outputs`, vectors [N]."""

    axis: Axis | None
    sections: tuple[Section, ...] = ()  # a rank has its range of each. Empty: it is one
    lead: int = 0  # dimensions in front, such as that of experts


class Ranks(Protocol):
    """All that share a model, as one of them reaches the others."""

    rank: int

    def gather(self, x: Tensor) -> Tensor:
        """The x of all ranks, in their order. Shape: [T, N] -> [size, T, N]."""


class Share(NamedTuple):
    """The part of rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, tensor: Tensor, cut: Cut | None) -> Tensor:
        """This rank's ranges of a tensor; a view if it is one range."""
        if cut is None or cut.axis is None or self.size == 1:
            return tensor
        dim = cut.lead + _DIMS[cut.axis]
        found = [
            tensor.narrow(dim, first, count)
            for first, count in self._ranges(tensor.shape[dim], cut.sections)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def of_narrow(self, matrix: NarrowMatrix, cut: Cut) -> NarrowMatrix:
        """The same of a matrix in 4 or 8 bits. Raises ValueError if its scales would be cut."""
        if cut.axis is None or self.size == 1:
            return matrix
        take = rows_of if cut.axis == "outputs" else columns_of
        ranges = self._ranges(matrix.shape[_DIMS[cut.axis]], cut.sections)
        stacked = stack([take(matrix, first, count) for first, count in ranges])
        assert stacked is not None
        return stacked

    def _ranges(self, num: int, sections: tuple[Section, ...]) -> list[tuple[int, int]]:
        """(first, count) of each section, of `num` rows or columns in all."""
        begin, found = 0, []
        for count, copies in sections or (Section(num // self.size),):
            found.append((begin + self.rank // copies * count, count))
            begin += count * self.size // copies
        return found

    def whole(self, shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        """The shape of what `of` gives a rank this shape of."""
        if cut is None or cut.axis is None:
            return shape
        dim = cut.lead + _DIMS[cut.axis]
        sections = cut.sections or (Section(shape[dim]),)
        num = sum(section.size * self.size // section.copies for section in sections)
        return (*shape[:dim], num, *shape[dim + 1 :])


def why_cut(layer: str, size: int, num_in: int, group: int, *, has_order: bool) -> str | None:
    """Why so many ranks cannot share the inputs of a quantised layer, of which each `group` have a
    scale; None: they can.
    """
    count = num_in // size
    reason = why_not_columns(num_in, group, count, count, has_order=has_order)
    return f"{layer} cannot be shared by {size}: {reason}" if size > 1 and reason else None


WHOLE = Share()
