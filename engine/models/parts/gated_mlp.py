"""The MLP of most models: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.cpu.packing import TILE
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows

from ..attention import ForwardBatch
from ..checkpoint import AnyCheckpoint
from ..shares import Outputs, Section
from ..weights import Linear
from .base import Compiled, Part


@dataclass(slots=True)
class GatedMLP(Part):
    """down(silu(gate(norm(x))) * up(norm(x)))."""

    gate_up: Linear  # the gate's outputs, then those of `up`
    down: Linear

    def __post_init__(self) -> None:
        self.norm = self.norm and self.gate_up.weight.before(self.norm)

    @staticmethod
    def read(
        tensors: AnyCheckpoint,
        name: str,
        *,
        norm: Norm | None,
        width: int,
        inner: int,
        fused: str | None = None,
        down: str = "down_proj",
        post_norm: Norm | None = None,
        factor: float = 1.0,
    ) -> "GatedMLP":
        """`fused`: the name of the layer that gate and up are in the checkpoint, if they are one.

        Raises KeyError naming a tensor that is missing, ValueError naming a wrong shape.
        """
        sizes: dict[str, Outputs] = {"gate_proj": inner, "up_proj": inner}
        if fused is not None:
            sizes = {fused: (Section(inner), Section(inner))}
        return GatedMLP(
            norm=norm,
            gate_up=tensors.linear(
                width, {f"{name}.{part}": size for part, size in sizes.items()}, axis="outputs"
            ),
            down=tensors.linear(inner, {f"{name}.{down}": width}, axis="inputs"),
            post_norm=post_norm,
            factor=factor,
        )

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        gated = self.gate_up.of_normed(x, normed, self.norm, gated=True)
        return self.add(x, self.down, gated, next_norm)

    def activations(self, normed: Tensor) -> Tensor:
        """What `down` multiplies. Shape: [T, hidden] -> [T, inner]."""
        return self.gate_up(normed, gated=True)

    def compiled(self) -> Compiled | None:
        if self.norm is None or self.post_norm or self.gate_up.weight.shape[0] % (2 * TILE):
            return None
        return Compiled(
            shape={"intermediate": self.down.weight.shape[1]},
            layer={"mlp_norm": self.norm.weight, "gate_up": self.gate_up, "down": self.down},
        )
