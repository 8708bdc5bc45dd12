"""The interface of a logit edit, and the rows that it is applied to."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows

from ..api import SamplingParams
from ..request import Request
from ..state.host_copy import uploaded
from ..state.ragged import aligned, ragged_arange
from ..state.slots import Slots


class RequestRows(NamedTuple):
    """M rows of logits, as the host knows them. Those of a request come in order. All: [M]."""

    row_np: np.ndarray  # row of the logits
    slot_np: np.ndarray  # slot of its request
    drafts_np: np.ndarray  # how many drafts come before it

    @staticmethod
    def in_turn(slots_np: np.ndarray, num_rows_np: np.ndarray) -> "RequestRows":
        """The rows of these slots, slot by slot, after 0, 1, … drafts each. Arrays: [B]."""
        drafts_np = ragged_arange(np.zeros_like(num_rows_np), num_rows_np)
        return RequestRows(np.arange(len(drafts_np)), slots_np.repeat(num_rows_np), drafts_np)

    def take(self, index_np: np.ndarray) -> "RequestRows":
        return RequestRows(*(of_each[index_np] for of_each in self))

    def packed(self, size: int, dummy: int) -> np.ndarray:
        """What `unpack` reads, padded with rows of the dummy slot. Shape: [3, size or more]."""
        packed_np = np.zeros((3, aligned(size)), dtype=np.int64)
        packed_np[1] = dummy
        packed_np[:, : len(self.row_np)] = self
        return packed_np

    @staticmethod
    def unpack(packed: Tensor, size: int, num_tokens: Tensor) -> EditRows:
        """The rows as kernels take them, counted from the device's own `num_tokens`.

        Shape: packed [3, size or more], num_tokens [num_slots].
        """
        row, slot, drafts = packed[:, :size]
        return EditRows(row, slot, num_tokens[slot] + drafts)


class LogitEdit(ABC):
    """One edit: its state for each slot."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @abstractmethod
    def is_asked_by(self, params: SamplingParams) -> bool: ...


class HostEdit(LogitEdit):
    """The host must know all tokens of a request before it can edit its logits."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: RequestRows) -> None:
        """Edit the rows of requests that ask for this edit, in place. Shape: logits [N, V']
        float32.
        """


class DeviceEdit(LogitEdit):
    """Kernels that find in tables, by slot, what to edit: they leave alone the rows of slots that
    do not ask for it, so they can be captured for any rows.
    """

    def _table(self, *shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """State for each slot. Shape: [num_slots, *shape]."""
        shape = (len(self._slots.token_ids), *shape)
        return torch.full(shape, fill, dtype=dtype, device=self._slots.device)

    def _uploaded(self, values: ArrayLike, dtype: type[np.number[Any]]) -> Tensor:
        return uploaded(np.asarray(values, dtype), self._slots.device)

    @abstractmethod
    def seat(self, request: Request) -> None:
        """Fill the slot of a request that asks for this edit; again after each preemption."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Have a slot ask for nothing, as all do at first: a request that does not gets it."""

    def count(self, slots: Tensor) -> None:
        """Take the known tokens of these slots into the tables. Shape: [B] int32."""
        return

    @abstractmethod
    def apply(self, logits: Tensor, at: EditRows) -> None:
        """Edit these rows in place. Shape: logits [N, V'] float32."""
