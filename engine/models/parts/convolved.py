"""A part of a DFlash2 head: attention or an MLP, between two convolutions over rows of a block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.model.block_convolution import block_convolution
from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.row_codes import Rows

from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..weights import Dense, Linear
from .base import Part


@dataclass(slots=True)
class Convolved(Part):
    """conv_1(part(conv_0(n))), n = norm(x); the taps of both convolutions depend on n."""

    part: Part  # without a norm of its own
    base: Tensor  # [2, taps, hidden]
    projection: Linear  # of [2 * taps * groups, hidden]

    @staticmethod
    def read(
        tensors: AnyCheckpoint, name: str, part: Part, *, norm: Norm, taps: int, group: int
    ) -> "Convolved":
        """With `group` channels to a group.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """
        width = len(norm.weight)
        base = tensors.tensor(f"{name}.base_kernel", 2, taps, width)
        # In the model's own dtype even in a head that is rounded: taps are sensitive, and few.
        size = 2 * taps * (width // group)
        matrix = tensors.tensor(f"{name}.kernel_projection.weight", size, width)
        projection = Linear(Dense(matrix), None)
        return Convolved(
            norm=norm, part=part, base=base, projection=projection, attention=part.attention
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        assert normed is None
        assert self.norm is not None
        n = rms_norm(x, self.norm)
        num_taps = self.base.shape[1]
        delta = self.projection(n).view(len(x), 2, num_taps, -1)
        where = batch.rows, batch.num_tokens
        y = torch.zeros_like(x)  # to which the part adds
        self.part(y, block_convolution(n, self.base[0], delta[:, 0], *where), None, batch)
        block_convolution(y, self.base[1], delta[:, 1], *where, residual=x)
        return None
