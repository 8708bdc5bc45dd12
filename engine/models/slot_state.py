"""What a layer keeps of a whole sequence: one state in each slot, however long the sequence is."""

from abc import ABC, abstractmethod

import torch

from ..memory.spec import SlotSpec


class SlotState(ABC):
    """The state of one layer. A row at position 0 begins a sequence, whatever its slot held before.

    A state cannot go back. After a pass it covers the known tokens, and at least `max_drafts` rows
    of drafts are kept beside it: the next pass takes those of them that were accepted.
    """

    @abstractmethod
    def spec(self, max_drafts: int, dtype: torch.dtype) -> SlotSpec:
        """What it keeps, of rows in this dtype."""

    @abstractmethod
    def bind(
        self,
        num_slots: int,
        max_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
        start: int = 0,
    ) -> None:
        """Allocate it; the state of every slot is that in front of a row at position `start`."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Let the sequence in one slot go on from what another slot holds, which must cover its
        known tokens alone.
        """

    @abstractmethod
    def free(self) -> None: ...
