"""An MLP without a gate: down(max(up(x), 0)^2)."""

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.model.relu_squared import relu_squared
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows

from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..weights import Linear
from .base import Part


@dataclass(slots=True)
class PlainMLP(Part):
    """down(max(up(norm(x)), 0)^2)."""

    up: Linear
    down: Linear

    def __post_init__(self) -> None:
        self.norm = self.norm and self.up.weight.before(self.norm)

    @staticmethod
    def read(
        tensors: AnyCheckpoint, name: str, *, norm: Norm | None, width: int, inner: int
    ) -> "PlainMLP":
        """Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape."""
        return PlainMLP(
            norm=norm,
            up=tensors.linear(width, {f"{name}.up_proj": inner}, axis="outputs"),
            down=tensors.linear(inner, {f"{name}.down_proj": width}, axis="inputs"),
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        inner = self.up.of_normed(x, normed, self.norm)
        return self.add(x, self.down, relu_squared(inner), next_norm)

    def activations(self, normed: Tensor) -> Tensor:
        """What `down` multiplies. Shape: [T, hidden] -> [T, inner]."""
        return relu_squared(self.up(normed))
