"""Drafts token by token with a head whose row for a draft reads the output of the row before.

The drafts of a step start from the row of the sequence's last accepted token, which the device
finds by itself.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.model.rows import keep_last_rows

from ..models.attention import ForwardBatch
from ..models.heads.head import AutoregressiveHead
from ..state.batch import BatchRows, HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Shape
from ..state.ragged import aligned
from .draws import LogitsOf
from .head import HeadProposer


class AutoregressiveReading(HeadProposer):
    """What the head makes of the target's passes, however it drafts after them."""

    _head: AutoregressiveHead

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # [num_slots, hidden] output y of each sequence's last row
        self._last_rows = torch.zeros(
            self._slots.max_num_seqs + 1,
            self._head.hidden_size,
            dtype=self._head.dtype,
            device=self._slots.device,
        )

    def _read(self, integers: Tensor, shape: Shape, taps: Tensor, *rows: Tensor) -> Tensor:
        """Compute the rows, and keep each sequence's last one, from which its drafts start."""
        batch = ForwardBatch.of_next_tokens(BatchRows(*rows), self._slots)
        y = self._head(self._head.fused(taps), batch.input_ids, self._as_target(batch))
        slots, seq_lens, bounds = batch.rows.slots, batch.rows.seq_lens, batch.rows.cu_seqlens_q
        keep_last_rows(self._last_rows, y, slots, seq_lens, bounds, self._slots.num_tokens)
        return y

    def _as_target(self, batch: ForwardBatch) -> ForwardBatch:
        """The head attends as its target does, so that the target's kernels serve both."""
        batch.batch_invariant = self._target.batch_invariant
        return batch


class AutoregressiveProposer(AutoregressiveReading):
    """Computes one row for each sequence and draft."""

    def _draft(self, integers: Tensor, shape: Shape) -> Tensor:
        size, k, filters, samples = shape
        batch_shape = (size, size, size)
        batch_len, draws_len = packed_len(batch_shape), 2 * aligned(size)
        y = drawn = integers
        for j in range(k):
            draws, integers = integers[:draws_len].view(2, -1), integers[draws_len:]
            if j == 0:
                y = self._last_rows[draws[0, :size]]
            else:
                y = self._advance(integers[:batch_len], batch_shape, y)
                integers = integers[batch_len:]
            drawn = self._draw(draws, (size, filters, samples), self._logits(y))
        return drawn

    def _pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """For each of k drafts: the rows before it (except for the first) and its draws, for the
        sequences that have so many drafts.
        """
        parts = []
        for j in range(k):
            slots_np = slots_np[: np.count_nonzero(num_drafts_np > j)]
            parts.append(self._pack_draws(slots_np, j, size).ravel())
            if j > 0:
                batch = self._rows_of(slots_np, j)
                parts.append(batch.packed((size, size, size), self._slots.dummy))
        return np.concatenate(parts)

    def _line(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> LogitsOf:
        device = self._slots.device
        y = self._last_rows[uploaded(slots_np, device)]

        def logits_of(j: int, slots_np: np.ndarray, kept_np: np.ndarray) -> tuple[Tensor, None]:
            nonlocal y
            if j > 0:
                batch = self._rows_of(slots_np, j)
                packed = batch.packed(batch.shape, self._slots.dummy)
                kept = y[uploaded(kept_np, device)]
                y = self._advance(uploaded(packed, device), batch.shape, kept)
            return self._logits(y), None

        return logits_of

    def _rows_of(self, slots_np: np.ndarray, j: int) -> HostBatch:
        """The rows that predict draft j > 0. With n known tokens, draft j is token n + j, and row
        n + j - 2 predicts it.
        """
        ones_np = np.ones_like(slots_np)
        return HostBatch.build(slots_np, (j - 2) * ones_np, ones_np, ones_np)

    def _advance(self, packed: Tensor, shape: Shape, y: Tensor) -> Tensor:
        """Compute each sequence's next row, from its newest draft and the row before.

        Shape: y [N, hidden] -> [N, hidden].
        """
        batch = ForwardBatch.unpack(packed, shape, self._slots, ahead=1)
        return self._head(self._head.recycled(y), batch.input_ids, self._as_target(batch))

    def _logits(self, y: Tensor) -> Tensor:
        """Shape: [N, hidden] -> [N, V]."""
        return self._head.widened(self._head.logits(y))
