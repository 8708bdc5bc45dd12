"""Heads whose row for a draft reads the output of the row before: EAGLE and MTP.

The drafts of a step start from the row of the sequence's last accepted token, which the device
finds by itself.
"""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.model.rows import BatchRows, keep_last_rows, last_known_rows

from ..models.attention import ForwardBatch
from ..models.heads.head import AutoregressiveHead
from ..models.network import Network
from ..state.batch import HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Shape
from ..state.ragged import aligned
from ..state.slots import Slots
from .draws import Draws, LogitsOf
from .head import Drafter


class LastRows:
    """What such a head makes of the target's passes: of each sequence, the output of its last row,
    from which its drafts start.
    """

    def __init__(self, head: AutoregressiveHead, target: Network, slots: Slots) -> None:
        self._head = head
        self._target = target
        self._slots = slots
        # [num_slots, hidden]
        self._y = torch.zeros(
            slots.max_num_seqs + 1, head.hidden_size, dtype=head.dtype, device=slots.device
        )

    def read(self, integers: Tensor, shape: Shape, taps: Tensor, *rows: Tensor) -> Tensor:
        """Compute the head's rows for a pass of the target, and keep each sequence's last one.

        If the pass holds a prompt, the last layer computes no others.
        """
        batch = self._as_target(ForwardBatch.of_next_tokens(BatchRows(*rows), self._slots))
        its, kept = batch.rows, None
        known = its.slots, its.seq_lens, its.cu_seqlens_q, self._slots.num_tokens
        if batch.holds_prompt:
            last, seq_lens = last_known_rows(*known)
            bounds = torch.arange(len(last) + 1, device=last.device)
            kept = batch.keeping(last, seq_lens, bounds)
        y = self._head(self._head.fused(taps), batch.input_ids, batch, kept)
        keep_last_rows(self._y, y, *known, are_last=kept is not None)
        return y

    def of(self, slots: Tensor) -> Tensor:
        """Shape: [N] -> [N, hidden]."""
        return self._y[slots]

    def unpack(self, packed: Tensor, shape: Shape, ahead: int = 0) -> ForwardBatch:
        """A batch of the head's own rows."""
        return self._as_target(ForwardBatch.unpack(packed, shape, self._slots, ahead))

    def _as_target(self, batch: ForwardBatch) -> ForwardBatch:
        """The head attends as its target does, so that the target's kernels serve both."""
        batch.batch_invariant = self._target.batch_invariant
        return batch


class TokenByToken(Drafter):
    """Computes one row for each sequence and draft."""

    def __init__(
        self, head: AutoregressiveHead, last_rows: LastRows, draws: Draws, slots: Slots
    ) -> None:
        self._head, self._last_rows, self._draws = head, last_rows, draws
        self._slots, self.read = slots, last_rows.read

    def draft(self, integers: Tensor, shape: Shape) -> Tensor:
        size, k, *kind = shape
        batch_shape = (size, size, size)
        batch_len, draws_len = packed_len(size), 2 * aligned(size)
        y = drawn = integers
        for j in range(k):
            at, integers = integers[:draws_len].view(2, -1), integers[draws_len:]
            if j == 0:
                y = self._last_rows.of(at[0, :size])
            else:
                y = self._advance(integers[:batch_len], batch_shape, y)
                integers = integers[batch_len:]
            drawn = self._draws.draw(at, (size, *kind), self._logits(y))
        return drawn

    def pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """For each of k drafts: the rows before it (except for the first) and its draws, for the
        sequences that have so many drafts.
        """
        parts = []
        for j in range(k):
            slots_np = slots_np[: np.count_nonzero(num_drafts_np > j)]
            parts.append(self._draws.pack(slots_np, j, size).ravel())
            if j > 0:
                batch = self._rows_of(slots_np, j)
                parts.append(batch.packed(size, self._slots.dummy))
        return np.concatenate(parts)

    def line(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> LogitsOf:
        device = self._slots.device
        y = self._last_rows.of(uploaded(slots_np, device))

        def logits_of(j: int, slots_np: np.ndarray, kept_np: np.ndarray) -> tuple[Tensor, None]:
            nonlocal y
            if j > 0:
                batch = self._rows_of(slots_np, j)
                packed = batch.packed(len(slots_np), self._slots.dummy)
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
        batch = self._last_rows.unpack(packed, shape, ahead=1)
        return self._head(self._head.recycled(y), batch.input_ids, batch)

    def _logits(self, y: Tensor) -> Tensor:
        """Shape: [N, hidden] -> [N, V]."""
        return self._head.widened(self._head.logits(y))
