"""Drafts a block in one pass with a head, k_i drafts for each sequence: DFlash, DSpark, P-EAGLE.

The length of a sequence's block depends on its own k_i alone, not on other sequences. Without a
Markov head no draft depends on those before it, and all are drawn at once. With one, they are drawn
one after another, from logits that were computed together.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.attention import ForwardBatch
from ..models.heads.block_head import BlockHead, ConfidenceHead, MarkovHead
from ..models.heads.eagle3 import Eagle3Head
from ..scheduling.plan import ScheduledRequest
from ..state.batch import BatchRows, HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Shape
from ..state.ragged import aligned
from .autoregressive import AutoregressiveReading
from .draws import LogitsOf
from .head import HeadProposer

# On a GPU: verifying fewer rows takes the target just as long, so it would not pay for the host to
# wait and look at confidences.
MIN_ROWS_TO_CUT = 128


class BlockDrafting(HeadProposer):
    """Computes the logits of a whole block at once, and then draws drafts from them.

    Drafts that a confidence head finds unlikely are not proposed.
    """

    _markov: MarkovHead | None = None
    _confidence: ConfidenceHead | None = None

    @abstractmethod
    def _rows_of(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> HostBatch:
        """The rows of these sequences' blocks."""

    @abstractmethod
    def _shape(self, size: int, k: int) -> Shape:
        """The shape of a batch of `size` sequences with up to k drafts each."""

    @abstractmethod
    def _computed(self, packed: Tensor, shape: Shape, k: int) -> "_Block":
        """The blocks of a batch packed to this shape."""

    def _draft_together(self, scheduled: list[ScheduledRequest]) -> Tensor:
        confidence = super()._draft_together(scheduled)
        num_rows = sum(s.num_drafts + 1 for s in scheduled)
        least_np = np.array([s.least_chance for s in scheduled])
        if self._confidence is not None and least_np.any() and num_rows >= MIN_ROWS_TO_CUT:
            chance_np = confidence[:, : len(scheduled)].cpu().numpy().cumprod(0)
            num_likely_np = (chance_np >= least_np).sum(0)
            for each, num_likely in zip(scheduled, num_likely_np.tolist(), strict=True):
                each.num_drafts = min(each.num_drafts, num_likely)
        return confidence

    def _draft(self, integers: Tensor, shape: Shape) -> Tensor:
        """Returns the confidence in each draft, if there is a confidence head. Shape: [k, N]."""
        size, k, filters, samples = shape
        batch_shape = self._shape(size, k)
        batch_len = packed_len(batch_shape)
        block = self._computed(integers[:batch_len], batch_shape, k)
        draws = integers[batch_len:].view(2, -1)
        if self._draws_at_once:
            logits = self._head.widened(block.logits.flatten(0, 1))
            return self._draw(draws, (k * size, filters, samples), logits)
        told, width = [], aligned(size)
        previous = self._before(block.slots, 0)
        for j in range(k):
            logits, confidence = self._at(block, j, previous)
            its_draws = draws[:, j * width : (j + 1) * width]
            previous = self._draw(its_draws, (size, filters, samples), logits)
            told.append(previous if confidence is None else confidence)
        return torch.stack(told)

    def _before(self, slots: Tensor, j: int) -> Tensor | None:
        """The token before draft j in each slot, if there is a Markov head. Shape: [N] -> [N]."""
        if self._markov is None:
            return None
        return self._slots.token_ids[slots, self._slots.num_tokens[slots] + j - 1].long()

    def _at(self, block: "_Block", j: int, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits of draft j, and the confidence in it; a Markov head needs the tokens before it.

        Shape: previous [N'] -> [N', V], [N']
        """
        h, logits, embedded = block.h[j], block.logits[j], None
        if block.seqs is not None:
            h, logits = h[block.seqs], logits[block.seqs]
        if self._markov is not None:
            assert previous is not None
            embedded = F.embedding(previous, self._markov.embedding)
            latent, block.state = self._markov.step(h, embedded, block.state)
            logits = logits + self._markov.output(latent)
        confidence = None if self._confidence is None else self._confidence(h, embedded)
        return self._head.widened(logits), confidence

    @property
    def _draws_at_once(self) -> bool:
        return self._markov is None and self._confidence is None

    def _pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """The rows of the blocks; then, for each draft, the integers of its draws."""
        width = size if self._draws_at_once else aligned(size)
        draws = np.zeros((2, aligned(k * width)), dtype=np.int64)
        draws[0] = self._slots.dummy
        for j in range(k):
            goes_on_np = slots_np[: np.count_nonzero(num_drafts_np > j)]
            draws[0, j * width : j * width + len(goes_on_np)] = goes_on_np
            draws[1, j * width : (j + 1) * width] = j
        rows = self._rows_of(slots_np, num_drafts_np)
        packed = rows.packed(self._shape(size, k), self._slots.dummy)
        return np.concatenate((packed, draws.ravel()))

    def _line(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> LogitsOf:
        device = self._slots.device
        rows = self._rows_of(slots_np, num_drafts_np)
        num_seqs, num_rows, _ = rows.shape
        shape = (num_seqs, max(num_seqs, num_rows), 0)
        packed = uploaded(rows.packed(shape, self._slots.dummy), device)
        block = self._computed(packed, shape, int(num_drafts_np.max()))

        def logits_of(j: int, _: np.ndarray, kept_np: np.ndarray) -> tuple[Tensor, Tensor | None]:
            if j > 0:
                block.keep(uploaded(kept_np, device))
            return self._at(block, j, self._before(block.slots, j))

        return logits_of


@dataclass(slots=True)
class _Block:
    """The drafts of a block for N sequences, of which fewer and fewer continue."""

    slots: Tensor  # [N'] of those that continue
    logits: Tensor  # [k, N, V'], without the Markov head's
    h: Tensor  # [k, N, hidden]
    seqs: Tensor | None = None  # [N'] those that continue; None: all
    state: Tensor | None = None  # [N', r] of the Markov head

    def keep(self, kept: Tensor) -> None:
        """Continue only with these rows of the present ones. Shape: [N']."""
        self.slots = self.slots[kept]
        self.seqs = kept if self.seqs is None else self.seqs[kept]
        self.state = None if self.state is None else self.state[kept]


class BlockProposer(BlockDrafting):
    """DFlash and DSpark.

    A sequence of n + 1 known tokens gets the rows n to n + k_i, or one fewer if its head predicts
    from the anchor.
    """

    _head: BlockHead

    def __init__(self, head: BlockHead, *args: Any, **options: Any) -> None:
        self._markov, self._confidence = head.markov, head.confidence
        super().__init__(head, *args, **options)

    def _read(self, integers: Tensor, shape: Shape, taps: Tensor, *rows: Tensor) -> Tensor:
        batch = ForwardBatch.of_next_tokens(BatchRows(*rows), self._slots)
        self._head.read(taps, batch)
        return batch.rows.positions

    def _shape(self, size: int, k: int) -> Shape:
        return size, size * (k + self._head.num_leading_rows), 0

    def _rows_of(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> HostBatch:
        """The anchor, which is the last known token, and the mask tokens after it."""
        zeros_np = np.zeros_like(slots_np)
        num_rows_np = num_drafts_np + self._head.num_leading_rows
        return HostBatch.build(slots_np, zeros_np - 1, num_rows_np, zeros_np)

    def _computed(self, packed: Tensor, shape: Shape, k: int) -> _Block:
        head, slots = self._head, self._slots
        batch = ForwardBatch.unpack(packed, shape, slots)
        is_anchor = batch.rows.positions + 1 == slots.num_tokens[batch.rows.slot_of_row]
        x = head(torch.where(is_anchor, batch.input_ids, head.mask_token_id), batch)
        rows = rows_of_drafts(batch.rows, k, head.num_leading_rows)
        h = head.states(x[rows.flatten()])
        logits = head.head(h).view(*rows.shape, -1)
        return _Block(batch.rows.slots, logits, h.view(*rows.shape, -1))


class ParallelEagleProposer(BlockDrafting, AutoregressiveReading):
    """P-EAGLE: the row of the last accepted token predicts the first draft, masks the others.

    With n known tokens this is row n - 2, which is computed already; masks take rows n - 1 and on.
    """

    _head: Eagle3Head

    def _shape(self, size: int, k: int) -> Shape:
        return size, size * max(1, k - 1), 0

    def _rows_of(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> HostBatch:
        zeros_np = np.zeros_like(slots_np)
        return HostBatch.build(slots_np, zeros_np - 1, num_drafts_np - 1, zeros_np)

    def _computed(self, packed: Tensor, shape: Shape, k: int) -> _Block:
        batch = ForwardBatch.unpack(packed, shape, self._slots)
        y = self._last_rows[batch.rows.slots][None]  # [1, N, hidden]
        if k > 1:
            masks = self._head.of_masks(self._as_target(batch))
            y = torch.cat((y, masks[rows_of_drafts(batch.rows, k - 1, 0)]))
        logits = self._head.logits(y.flatten(0, 1)).view(*y.shape[:2], -1)
        return _Block(batch.rows.slots, logits, y)


def rows_of_drafts(rows: BatchRows, k: int, num_leading: int) -> Tensor:
    """The row of each draft, after `num_leading` rows of its sequence. Beyond a sequence's k_i it
    is an arbitrary row, whose draw goes to the dummy slot. Shape: [k, N].
    """
    offset = torch.arange(k, device=rows.positions.device)[:, None] + num_leading
    return (rows.cu_seqlens_q[:-1] + offset).clamp_max(len(rows.positions) - 1)
