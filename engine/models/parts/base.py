"""What a block is made of: parts that add their output to the residual stream x, in place.

    x += part(norm(x)),     or x += post_norm(part(norm(x)));     some have no norm in front

If the part before has already applied this norm, the result is passed as `normed`. In the same way
a part applies the norm of the next part if that is cheap, and returns the result; otherwise it
returns None.

A part declares all that others must know of it: its linear layers, what it keeps of a sequence, and
how compiled layers compute it. Whoever loads, packs, binds or compares goes through the parts of a
model and asks them, and knows no kinds.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.row_codes import Rows

from ..attention import ForwardBatch, KeptRows, PagedAttention, Rope
from ..shares import Ranks
from ..slot_state import SlotState
from ..weights import Layered, Linear


class Compiled(NamedTuple):
    """A part as compiled layers take it: fields of structures in `kernels/cpu/layers.py`."""

    shape: dict[str, float]  # alike in all layers
    layer: dict[str, Linear | Tensor | int | None]
    rope: Rope | None = None


@dataclass(slots=True)
class Part(Layered, ABC):
    """A part of a block; each of its linear layers has the axis along which ranks share it."""

    norm: Norm | None
    post_norm: Norm | None = field(default=None, kw_only=True)  # of its output
    factor: float = field(default=1.0, kw_only=True)  # of what it adds
    # What it keeps of every token, in pages, and of a whole sequence, in its slot, if it does.
    attention: PagedAttention | None = field(default=None, kw_only=True)
    state: SlotState | None = field(default=None, kw_only=True)
    # The module of transformers' that makes its choices, if it makes any. Rounding may turn a
    # choice between two that are nearly equal; so a comparison of outputs takes choices from there,
    # and compares them by themselves.
    chooser: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        """Add the part's outputs to the residual stream x, in place.

        `normed` is norm(x), or None: then the part applies its norm. Returns next_norm(x), for the
        part behind, if that comes cheaply, else None. Shape: x, normed [T, hidden].
        """

    @property
    def keeps_rows(self) -> bool:
        """Whether it keeps something of every row."""
        return self.attention is not None or self.state is not None

    def of_rows(
        self, kept: KeptRows, x: Tensor, normed: Rows | None, batch: ForwardBatch
    ) -> Tensor:
        """x behind the part, of these rows alone, once it has kept what it keeps of every row.

        Shape: x, normed [T, hidden] -> [N, hidden]
        """
        self(x, normed, None, batch)
        return x[kept.rows]

    def add(self, x: Tensor, layer: Linear, y: Rows, next_norm: Norm | None) -> Rows | None:
        """Add what its last layer makes of y to x; returns next_norm(x) or None.

        Shape: x [T, hidden], y [T, inputs of the layer].
        """
        if self.post_norm is None and self.factor == 1:
            return layer.add_to(x, y, norm=next_norm)
        added = layer(y)
        if self.post_norm is not None:
            added = rms_norm(added, self.post_norm)
        x.add_(added, alpha=self.factor)
        return None

    def over_ranks(self, ranks: Ranks) -> Self:
        """The same part, if it has to know more of other ranks than sums of its linear layers."""
        return self

    def compiled(self) -> Compiled | None:
        """None if compiled layers cannot compute it."""
        return None

    def chooses(self, *chosen: Tensor) -> bool:
        """Whether it chooses alike, given the inputs and outputs of its chooser."""
        raise NotImplementedError

    def choosing(self, *chosen: Tensor) -> Self:
        """The same part with these choices."""
        raise NotImplementedError
