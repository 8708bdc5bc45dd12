"""What an edit of logits is, and how it is told which rows to edit."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows

from ..api import SamplingParams
from ..request import Request
from ..state.host_copy import uploaded
from ..state.ragged import aligned, ragged_arange


@dataclass(slots=True)
class RequestRows:
    """Rows of logits of B requests; request i has `num_rows[i]` rows, one after another, the first
    of them behind `first_drafts[i]` drafts. All: [B].
    """

    slots_np: np.ndarray
    first_rows_np: np.ndarray
    num_rows_np: np.ndarray
    first_drafts_np: np.ndarray

    @staticmethod
    def one_each(slots_np: np.ndarray, drafts_np: np.ndarray) -> "RequestRows":
        """Row i is request i's, behind so many drafts."""
        return RequestRows(slots_np, np.arange(len(slots_np)), np.ones_like(slots_np), drafts_np)

    @staticmethod
    def of_nobody(slot: int, num_rows: int) -> "RequestRows":
        return RequestRows.one_each(np.full(num_rows, slot), np.zeros(num_rows, dtype=np.int64))

    def take(self, index_np: np.ndarray) -> "RequestRows":
        return RequestRows(
            self.slots_np[index_np],
            self.first_rows_np[index_np],
            self.num_rows_np[index_np],
            self.first_drafts_np[index_np],
        )

    def packed(self) -> "RequestRows":
        """The same rows where there are no others between them."""
        ends_np = np.cumsum(self.num_rows_np)
        return replace(self, first_rows_np=ends_np - self.num_rows_np)

    def each_np(self) -> np.ndarray:
        """Of every single row its number, its slot and the drafts before it. Shape: [3, M]."""
        each = (
            ragged_arange(self.first_rows_np, self.num_rows_np),
            np.repeat(self.slots_np, self.num_rows_np),
            ragged_arange(self.first_drafts_np, self.num_rows_np),
        )
        return np.stack(each)

    def behind(self, num_tokens: Tensor) -> EditRows:
        """Row by row, as kernels take them, behind what the device knows: one copy to it.

        Shape: num_tokens [num_slots].
        """
        each_np = self.each_np()
        num_rows = each_np.shape[1]
        packed_np = np.zeros((3, aligned(num_rows)), dtype=np.int64)
        packed_np[:, :num_rows] = each_np
        row, slot, drafts = uploaded(packed_np, num_tokens.device)[:, :num_rows]
        return EditRows(row, slot, num_tokens[slot] + drafts)


class LogitEdit(ABC):
    """One edit: its state by slot, and its kernel."""

    # Whether the host has to know a request's tokens before it can edit the logits behind them.
    needs_host = False

    def __init__(self, token_ids: Tensor, num_tokens: Tensor, vocab_size: int) -> None:
        """token_ids: [num_slots, width] int32, the sequences in their slots; num_tokens:
        [num_slots], how many of them are known.
        """
        self._token_ids = token_ids
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._device = token_ids.device

    def _table(self, *shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """State by slot. Shape: [num_slots, *shape]."""
        return torch.full((len(self._token_ids), *shape), fill, dtype=dtype, device=self._device)

    def _uploaded(self, values: ArrayLike, dtype: type[np.number[Any]]) -> Tensor:
        return uploaded(np.asarray(values, dtype), self._device)

    @abstractmethod
    def is_asked_by(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def seat(self, request: Request) -> None:
        """Fill the slot of a request that asks for this edit, also when it comes back to one."""

    def unseat(self, slot: int) -> None:
        """Let go of the slot's request; the tables may keep what nobody reads."""
        return

    @abstractmethod
    def apply(self, logits: Tensor, rows: RequestRows) -> None:
        """Edit the rows of requests that ask for this edit, in place; logits: [N, V'] float32."""
