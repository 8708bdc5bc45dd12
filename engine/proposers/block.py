"""Heads that draft a block in one pass, k_i drafts for each sequence: DFlash, DFlash2, DSpark,
P-EAGLE.

The length of a sequence's block depends on its own k_i alone, not on other sequences. Without a
chain no draft depends on those before it, and all are drawn at once. With one, or with edits of
logits, they are drawn one after another, from what was computed together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.model.rows import BatchRows

from ..models.attention import ForwardBatch
from ..models.heads.block_head import BlockHead
from ..models.heads.eagle3 import Eagle3Head
from ..models.heads.head import Head
from ..state.batch import HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Shape
from ..state.ragged import aligned
from ..state.slots import Slots
from .draws import Draws, LogitsOf
from .head import Drafter
from .token_by_token import LastRows


@dataclass(slots=True)
class DraftedBlock:
    """The drafts of a block for N sequences, of which fewer and fewer continue."""

    slots: Tensor  # [N'] of those that continue
    logits: Tensor  # [k, N, V'], without the chain's part
    h: Tensor  # [k, N, hidden]
    seqs: Tensor | None = None  # [N'] those that continue; None: all

    def keep(self, kept: Tensor) -> None:
        """Continue only with these rows of the present ones. Shape: [N']."""
        self.slots = self.slots[kept]
        self.seqs = kept if self.seqs is None else self.seqs[kept]


class MasksAfterAnchor:
    """DFlash, DFlash2 and DSpark.

    A sequence of n + 1 known tokens gets the rows n to n + k_i, or one fewer if its head predicts
    from the anchor: the last known token, and mask tokens after it.
    """

    def __init__(self, head: BlockHead, slots: Slots) -> None:
        self._head, self._slots = head, slots
        self.num_more_rows = head.num_leading_rows  # of a block than it has drafts

    def read(self, integers: Tensor, shape: Shape, taps: Tensor, *rows: Tensor) -> Tensor:
        """Store the head's keys and values for a pass of the target."""
        batch = ForwardBatch.of_next_tokens(BatchRows(*rows), self._slots)
        self._head.read(taps, batch)
        return batch.rows.positions

    def __call__(self, packed: Tensor, shape: Shape, k: int) -> DraftedBlock:
        head, slots = self._head, self._slots
        batch = ForwardBatch.unpack(packed, shape, slots)
        is_anchor = batch.rows.positions + 1 == slots.num_tokens[batch.rows.slot_of_row]
        input_ids = torch.where(is_anchor, batch.input_ids, head.mask_token_id)
        rows = rows_of_drafts(batch.rows, k, head.num_leading_rows)
        h = head(input_ids, batch, rows.flatten())
        logits = head.logits(h).view(*rows.shape, -1)
        return DraftedBlock(batch.rows.slots, logits, h.view(*rows.shape, -1))


class MasksAfterLastRow:
    """P-EAGLE: the row of the last accepted token predicts the first draft, masks the others.

    With n known tokens this is row n - 2, which is computed already; masks take rows n - 1 and on.
    """

    num_more_rows = -1

    def __init__(self, head: Eagle3Head, last_rows: LastRows) -> None:
        self._head, self._last_rows, self.read = head, last_rows, last_rows.read

    def __call__(self, packed: Tensor, shape: Shape, k: int) -> DraftedBlock:
        batch = self._last_rows.unpack(packed, shape)
        y = self._last_rows.of(batch.rows.slots)[None]  # [1, N, hidden]
        if k > 1:
            masks = self._head.of_masks(batch)
            y = torch.cat((y, masks[rows_of_drafts(batch.rows, k - 1, 0)]))
        logits = self._head.logits(y.flatten(0, 1)).view(*y.shape[:2], -1)
        return DraftedBlock(batch.rows.slots, logits, y)


class BlockByBlock(Drafter):
    """Computes the logits of a whole block at once, and then draws drafts from them."""

    def __init__(
        self,
        head: Head,
        blocks: MasksAfterAnchor | MasksAfterLastRow,
        draws: Draws,
        slots: Slots,
    ) -> None:
        self._head, self._blocks, self._draws = head, blocks, draws
        self._slots, self.read = slots, blocks.read

    def draft(self, integers: Tensor, shape: Shape) -> Tensor:
        size, k, *kind = shape
        batch_shape = self._shape(size, k)
        batch_len = packed_len(size)
        block = self._blocks(integers[:batch_len], batch_shape, k)
        width = aligned(size)
        at = integers[batch_len:].view(2, k, width)
        has_edits = kind[-1]
        if self._head.chain is None and self._head.confidence is None and not has_edits:
            logits = self._head.widened(block.logits.flatten(0, 1))
            every = at[:, :, :size].flatten(1).contiguous()
            return self._draws.draw(every, (k * size, *kind), logits)
        previous, prepared = self._before(block.slots, 0), self._prepared(block)
        for j in range(k):
            logits, confidence = self._at(block, prepared, j, previous)
            its = at[:, j]
            previous = self._draws.draw(its, (size, *kind), logits)
            if confidence is not None:
                self._draws.keep_confidence(its, confidence)
        return previous

    def pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """The rows of the blocks; then, for each draft, the integers of its draws."""
        at_np = np.zeros((2, k, aligned(size)), dtype=np.int64)
        at_np[0] = self._slots.dummy
        for j in range(k):
            goes_on_np = slots_np[: np.count_nonzero(num_drafts_np > j)]
            at_np[0, j, : len(goes_on_np)] = goes_on_np
            at_np[1, j] = j
        rows = self._rows_of(slots_np, num_drafts_np)
        packed = rows.packed(size, self._slots.dummy)
        return np.concatenate((packed, at_np.ravel()))

    def line(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> LogitsOf:
        device = self._slots.device
        rows = self._rows_of(slots_np, num_drafts_np)
        num_seqs, num_rows, _ = rows.shape
        shape = (num_seqs, max(num_seqs, num_rows), 0)
        packed = uploaded(rows.packed(num_seqs, self._slots.dummy), device)
        block = self._blocks(packed, shape, int(num_drafts_np.max()))
        prepared = self._prepared(block)

        def logits_of(j: int, _: np.ndarray, kept_np: np.ndarray) -> tuple[Tensor, Tensor | None]:
            if j > 0:
                block.keep(uploaded(kept_np, device))
            return self._at(block, prepared, j, self._before(block.slots, j))

        return logits_of

    def _shape(self, size: int, k: int) -> Shape:
        return size, size * max(1, k + self._blocks.num_more_rows), 0

    def _rows_of(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> HostBatch:
        zeros_np = np.zeros_like(slots_np)
        num_rows_np = num_drafts_np + self._blocks.num_more_rows
        return HostBatch.build(slots_np, zeros_np - 1, num_rows_np, zeros_np)

    def _before(self, slots: Tensor, j: int) -> Tensor:
        """The token before draft j in each slot. Shape: [N] -> [N]."""
        return self._slots.token_ids[slots, self._slots.num_tokens[slots] + j - 1].long()

    def _prepared(self, block: DraftedBlock) -> tuple[Tensor, ...]:
        """What the logits of all drafts are made of. Shape: [k, N, …] each."""
        if self._head.chain is None:
            return (block.logits,)
        return self._head.chain.prepared(block.h, block.logits, self._slots.vocab_size)

    def _at(
        self, block: DraftedBlock, prepared: tuple[Tensor, ...], j: int, previous: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of draft j, behind these tokens, and the confidence in it.

        Shape: previous [N'] -> [N', V], [N']
        """
        h, *its = (
            every[j] if block.seqs is None else every[j][block.seqs]
            for every in (block.h, *prepared)
        )
        logits = its[0] if self._head.chain is None else self._head.chain(previous, *its)
        confidence = None if self._head.confidence is None else self._head.confidence(h, previous)
        return self._head.widened(logits), confidence


def rows_of_drafts(rows: BatchRows, k: int, num_leading: int) -> Tensor:
    """The row of each draft, after `num_leading` rows of its sequence. Beyond a sequence's k_i it
    is an arbitrary row, whose draw goes to the dummy slot. Shape: [k, N].
    """
    offset = torch.arange(k, device=rows.positions.device)[:, None] + num_leading
    return (rows.cu_seqlens_q[:-1] + offset).clamp_max(len(rows.positions) - 1)
