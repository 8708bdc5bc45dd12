"""What a layer keeps of a whole sequence: one state in each slot, however long the sequence is."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class SlotState(ABC):
    """The state of one layer. A row at position 0 begins a sequence, whatever its slot held before.

    A state cannot go back. After a pass it covers known tokens alone, and the rows behind these are
    kept beside it, at least `max_drafts` of drafts: the next pass takes those that were accepted.
    All of it lies in the bytes of its slot, so a copy of these lets another sequence go on there.
    """

    @abstractmethod
    def num_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """What it takes in a slot, of rows in this dtype."""

    @abstractmethod
    def bind(self, memory: Tensor, max_drafts: int, dtype: torch.dtype, start: int = 0) -> None:
        """Keep it here; the state of every slot is that in front of a row at position `start`.

        Shape: memory [num_slots, num_bytes] uint8, zeros, each row dense.
        """

    @abstractmethod
    def free(self) -> None: ...
