"""A rank's share of a model whose layers several ranks compute together.

A layer is shared along its own axis: of `outputs` a rank has a range of rows of the matrix, of
`inputs` a range of columns. What has no axis every rank has whole.
"""

from typing import NamedTuple

from torch import Tensor

from .weights import Axis

_DIMS: dict[Axis, int] = {"outputs": 0, "inputs": 1}


class Share(NamedTuple):
    """The part of rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, tensor: Tensor, axis: Axis | None) -> Tensor:
        """This rank's range of a matrix [N, K] or, along `outputs`, of a vector [N]; a view."""
        if axis is None or self.size == 1:
            return tensor
        each = tensor.shape[_DIMS[axis]] // self.size
        return tensor.narrow(_DIMS[axis], self.rank * each, each)

    def whole(self, shape: tuple[int, ...], axis: Axis | None) -> tuple[int, ...]:
        """The shape of what `of` gives a rank this shape of."""
        if axis is None:
            return shape
        dim = _DIMS[axis]
        return (*shape[:dim], shape[dim] * self.size, *shape[dim + 1 :])


WHOLE = Share()
