"""Drawing drafts: one a row, written behind its sequence, with what it was drawn from."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.slot_rows import read_slots, write_draft
from outrider.kernels.verify.verify import draft_sample

from ..state.host_copy import uploaded
from ..state.ragged import aligned
from ..state.slots import Slots
from .base import SAMPLING_KINDS, DraftDistributions

# Below it another draft pays less than it costs: measured with the default pair, where anything
# from 0.05 to 0.2 is within 2% of the best for a draft of 0.07 to 0.11 of the target's cost.
MIN_LIKELIHOOD = 0.1

Kind = tuple[bool, bool]  # an entry of SAMPLING_KINDS


class Draws:
    """Draws under each request's own sampling parameters, and keeps the distributions."""

    def __init__(self, slots: Slots, vocab_size: int, width: int, dtype: torch.dtype) -> None:
        """Logits are `width` wide; ids from `vocab_size` on are never drawn."""
        self._slots = slots
        self._vocab_size = vocab_size
        self.distributions = DraftDistributions.empty(
            slots.max_num_seqs + 1, slots.max_drafts, width, dtype, slots.device
        )

    def pack(self, slots_np: np.ndarray, offset: int, size: int) -> np.ndarray:
        """The integers of `draw` for these slots' drafts behind `offset` others, padded with rows
        of nobody to `size`. Shape: [B] -> [2, size or more].
        """
        packed = np.zeros((2, aligned(size)), dtype=np.int64)
        packed[0] = self._slots.dummy
        packed[0, : len(slots_np)] = slots_np
        packed[1, : len(slots_np)] = offset
        return packed

    def draw(
        self, integers: Tensor, kind: Kind, logits: Tensor, kept: DraftDistributions
    ) -> Tensor:
        """Draw one draft a row, write it to its slot, and keep what it was drawn from.

        Shape: integers [2, N or more], of each row its slot and how many of the step's drafts come
        before this one; logits [N, V] -> [N].
        """
        filters, samples = kind
        slot, offset = integers[:, : len(logits)].unbind()
        rows = read_slots(self._slots.state, slot, 0, offset)
        drawn = draft_sample(
            logits,
            rows.sampling,
            rows.position,
            rows.anchor,
            self._vocab_size,
            filters=filters,
            samples=samples,
        )
        # Greedy ones are verified without.
        kept_of_step = (kept.logits, kept.state) if samples else None
        write_draft(self._slots.state, slot, rows.position, offset, drawn, logits, kept_of_step)
        return drawn.token_ids

    def warm_ups(self) -> Iterator[Callable[[], Tensor]]:
        """Draws of nobody that launch every sampling kernel between them."""
        kept = self.distributions
        device = self._slots.device
        logits = torch.zeros(2, kept.logits.shape[2], dtype=kept.logits.dtype, device=device)
        integers = uploaded(self.pack(np.zeros(0, dtype=np.int64), 0, 2), device)
        for kind in SAMPLING_KINDS:
            yield partial(self.draw, integers, kind, logits, kept)


def likelihood(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """What whoever drafts gives these tokens. Shape: [N, V'], [N] -> [N]."""
    probs = torch.softmax(logits, dim=-1).gather(1, token_ids[:, None])
    of_row: np.ndarray = probs.squeeze(1).float().numpy()
    return of_row
