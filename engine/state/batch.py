"""One ragged batch: token ranges of several sequences, flattened for one forward pass."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .phase import Shape
from .ragged import aligned, ragged_arange


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

    @staticmethod
    def build(
        slots_np: np.ndarray,
        starts_np: np.ndarray,
        query_lens_np: np.ndarray,
        num_logits_np: np.ndarray,
    ) -> "HostBatch":
        """Rows for positions `starts[i] : starts[i] + query_lens[i]` of each sequence.

        Arrays: [B]. The last `num_logits[i]` rows of sequence i get logits.
        """
        sequences_np = np.array((slots_np, starts_np, query_lens_np, num_logits_np), dtype=np.int64)
        _, _, num_rows, num_logits = sequences_np.sum(1).tolist()
        return HostBatch(sequences_np, (len(slots_np), num_rows, num_logits))

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

    def packed(self, shape: Shape, dummy_slot: int) -> np.ndarray:
        """What `ForwardBatch.unpack` reads, in one array, padded to a shape.

        Padding rows belong to no sequence and stand at position 0 of the dummy slot, whose
        `num_tokens` stays 0; padding sequences have no rows.
        """
        slots_np, starts_np, lens_np, num_logits_np = self.sequences_np
        ends_np = lens_np.cumsum()
        _, num_rows, _ = self.shape
        fields = (
            (slots_np.repeat(lens_np), dummy_slot),
            (ragged_arange(starts_np, lens_np), 0),
            (slots_np, dummy_slot),
            (starts_np + lens_np, 0),
            (np.concatenate(([0], ends_np)), num_rows),
            (ragged_arange(ends_np - num_logits_np, num_logits_np), 0),
        )
        return np.concatenate(
            [
                _pad(array, aligned(length), fill)
                for (array, fill), length in zip(fields, packed_lens(shape), strict=True)
            ]
        )


def packed_lens(shape: Shape) -> list[int]:
    """Lengths of the fields of `HostBatch.packed`, each of which is padded by `aligned`."""
    num_seqs, num_rows, num_logits = shape
    return [num_rows, num_rows, num_seqs, num_seqs, num_seqs + 1, num_logits]


def packed_len(shape: Shape) -> int:
    """Length of what `HostBatch.packed` returns for this shape."""
    return sum(aligned(length) for length in packed_lens(shape))


def _pad(array: np.ndarray, length: int, value: int) -> np.ndarray:
    padded = np.full(length, value, dtype=np.int64)
    padded[: len(array)] = array
    return padded


class BatchRows(NamedTuple):
    """Where the rows of a batch stand, whichever model computes them."""

    slot_of_row: Tensor  # [T]
    positions: Tensor  # [T] absolute
    slot_mapping: Tensor  # [T] where each row's KV goes: page * page_size + offset
    slots: Tensor  # [B], rows of the block table
    seq_lens: Tensor  # [B]
    cu_seqlens_q: Tensor  # [B + 1]
