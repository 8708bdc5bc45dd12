"""Parts with a state of a whole sequence, and what they keep of it in its slot.

See `kernels/model/state_layer.py`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.state_layer import StateHeads, StateMemory, StateWeights, rows_kept
from outrider.kernels.model.state_trial import try_cells

from ..slot_state import SlotState
from ..weights import Linear
from .base import Part

_ALIGNMENT = 128  # bytes, of each layer's fields


@dataclass(slots=True)
class HeadStates(SlotState):
    """The matrices of all value heads, and the latest rows."""

    heads: StateHeads
    num_taps: int  # of the convolution
    memory: StateMemory | None = None

    def num_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        return sum(self._sizes(max_drafts, dtype))

    def _sizes(self, max_drafts: int, dtype: torch.dtype) -> list[int]:
        """Bytes in a slot of each field of its memory."""
        heads = self.heads
        num_numbers = heads.num_value_heads * heads.key_dim * heads.value_dim
        num_rows = rows_kept(self.num_taps, max_drafts)
        fields = (num_numbers * 4, num_rows * heads.row_width * dtype.itemsize, 8)
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in fields]

    def bind(self, memory: Tensor, max_drafts: int, dtype: torch.dtype, start: int = 0) -> None:
        """Keep it here, and find out by which kernel rows pass through it.

        Shape: memory [slots, bytes of a slot].
        """
        heads = self.heads
        try_cells(heads, dtype, memory.device)
        state, ring, num_rows = memory.split(self._sizes(max_drafts, dtype), 1)
        shape = heads.num_value_heads, heads.key_dim, heads.value_dim
        ring_shape = rows_kept(self.num_taps, max_drafts), heads.row_width
        self.memory = StateMemory(
            _as(state, torch.float32, *shape),
            _as(ring, dtype, *ring_shape),
            _as(num_rows, torch.int64).fill_(start),
        )

    def free(self) -> None:
        self.memory = None

    @property
    def bound(self) -> StateMemory:
        assert self.memory is not None, "a layer before its state was bound"
        return self.memory


@dataclass(slots=True)
class StatePart(Part):
    """output(gated norm of what rows read from states), between two linear layers."""

    inputs: Linear
    output: Linear
    weights: StateWeights
    gated_norm: Norm  # of each value head, or of each group of them: [groups, dim]
    state: HeadStates

    def __post_init__(self) -> None:
        self.norm = self.norm and self.inputs.weight.before(self.norm)
        self.gated_norm = self.output.weight.before(self.gated_norm)


def _as(memory: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """The first numbers of each slot. Shape: [num_slots, bytes] uint8 -> [num_slots, *shape]."""
    return memory.view(dtype)[:, : math.prod(shape)].view(len(memory), *shape)
