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

    def behind(self, num_tokens: Tensor) -> EditRows:
        """The rows as kernels take them, counted from the device's own `num_tokens`.

        Shape: num_tokens [num_slots].
        """
        num_rows = len(self.row_np)
        packed_np = np.zeros((3, aligned(num_rows)), dtype=np.int64)
        packed_np[:, :num_rows] = self
        row, slot, drafts = uploaded(packed_np, num_tokens.device)[:, :num_rows]
        return EditRows(row, slot, num_tokens[slot] + drafts)


class LogitEdit(ABC):
    """One edit: its state for each slot, and its kernel."""

    # Whether the host must know all tokens of a request before it can edit its logits.
    needs_host = False

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        """token_ids: [num_slots, width] int32."""
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._device = token_ids.device
        self._requests: dict[int, Request] = {}  # by slot, for edits that look at them later

    def _table(self, *shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """State for each slot. Shape: [num_slots, *shape]."""
        return torch.full((len(self._token_ids), *shape), fill, dtype=dtype, device=self._device)

    def _uploaded(self, values: ArrayLike, dtype: type[np.number[Any]]) -> Tensor:
        return uploaded(np.asarray(values, dtype), self._device)

    @abstractmethod
    def is_asked_by(self, params: SamplingParams) -> bool: ...

    def seat(self, request: Request) -> None:
        """Fill the slot of a request that asks for this edit; again after each preemption."""
        assert request.slot is not None
        self._requests[request.slot] = request

    def unseat(self, slot: int) -> None:
        """Forget the slot's request, if it had any; tables keep stale rows, which are not read."""
        self._requests.pop(slot, None)

    @abstractmethod
    def apply(self, logits: Tensor, rows: RequestRows, at: EditRows) -> None:
        """Edit the rows of requests that ask for this edit, in place; `at` has the same rows.

        Shape: logits [N, V'] float32.
        """
