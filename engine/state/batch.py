"""One ragged batch: token ranges of several sequences, flattened for one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .host_copy import uploaded
from .phase import Shape
from .ragged import aligned


@dataclass(slots=True)
class HostBatch:
    """T rows of B sequences, flattened.

    The same shape serves prefill chunks, plain decodes, verifications and the draft's steps.

    Positions are relative to the end of a sequence's known tokens: the last known token is at -1,
    the first draft at 0. The device adds its own `num_tokens`, which it knows before the host does.
    So a batch can be built while the step before it still runs.
    """

    # [4, B] int64: slot; first position; number of rows; how many of the last of them get logits
    sequences_np: np.ndarray
    shape: Shape  # (sequences, rows, logits)
    # [N] How many more rows, with logits, the last sequences have. Only the device knows; the host
    # knows their sum, which `shape` includes.
    more: Tensor | None = None

    @staticmethod
    def build(
        slots: Sequence[int] | np.ndarray,
        starts: Sequence[int] | np.ndarray,
        query_lens: Sequence[int] | np.ndarray,
        num_logits: Sequence[int] | np.ndarray,
        more: Tensor | None = None,
        num_more: int = 0,
    ) -> "HostBatch":
        """Rows for positions `starts[i] : starts[i] + query_lens[i]` of each sequence.

        [B] each. The last `num_logits[i]` rows of sequence i get logits. `num_more` is the sum
        of `more`.
        """
        sequences_np = np.array((slots, starts, query_lens, num_logits), dtype=np.int64)
        _, _, num_rows, num_with_logits = sequences_np.sum(1).tolist()
        shape = len(slots), num_rows + num_more, num_with_logits + num_more
        return HostBatch(sequences_np, shape, more)

    @staticmethod
    def dummies(slot: int, lens: list[int], num_logits: int) -> "HostBatch":
        """Sequences of the given lengths, all at the start of the dummy slot.

        The last `num_logits` rows of the batch get logits.
        """
        lens_np = np.array(lens)
        behind_np = np.cumsum(lens_np[::-1])[::-1] - lens_np  # rows of the sequences behind each
        num_logits_np = (num_logits - behind_np).clip(0, lens_np)
        slots_np = np.full_like(lens_np, slot)
        return HostBatch.build(slots_np, np.zeros_like(lens_np), lens_np, num_logits_np)

    def packed(self, num_seqs: int, dummy_slot: int) -> np.ndarray:
        """What `ForwardBatch.unpack` reads, padded by sequences without rows in the dummy slot.

        Shape: [packed_len(num_seqs)].
        """
        packed_np = np.zeros((4, aligned(num_seqs)), dtype=np.int64)
        packed_np[0] = dummy_slot
        packed_np[:, : self.sequences_np.shape[1]] = self.sequences_np
        return packed_np.ravel()

    def integers(self, num_seqs: int, dummy_slot: int, device: torch.device) -> np.ndarray | Tensor:
        """As `packed`, with `more`: then on the device."""
        packed_np = self.packed(num_seqs, dummy_slot)
        if self.more is None:
            return packed_np
        packed, end = uploaded(packed_np, device), self.sequences_np.shape[1]
        packed.view(4, -1)[2:, end - len(self.more) : end] += self.more
        return packed


def packed_len(num_seqs: int) -> int:
    """Length of what `HostBatch.packed` returns."""
    return 4 * aligned(num_seqs)
