"""Verifies sequences whose logits are edited: on copies of their rows, some sequences at once."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..logit_edits import LogitEdits, RequestRows
from ..plan import SAMPLING_KINDS
from ..state.host_copy import uploaded
from ..state.phase import Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP, aligned
from ..state.slots import Slots

# Rows of sequences with all the drafts of a model that are edited at once: with more, graphs would
# keep more memory, and it would hardly be faster.
EDITED_ROWS = 128


class EditedVerification:
    """Copies rows, edits the copies, and verifies these as `Verifier` does other rows.

    The logits themselves stay as they are, for logprobs are those of the raw ones.
    """

    def __init__(
        self,
        slots: Slots,
        edits: LogitEdits,
        run: Callable[[Tensor, Shape, Tensor], Tensor],
        pack: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
    ) -> None:
        """`run` and `pack`: those of `Verifier`, for rows as they are."""
        self._slots, self._edits = slots, edits
        self._run_plain, self._pack_plain = run, pack
        self.phase = Phase(self._run, slots.device)
        most = max(1, EDITED_ROWS // (slots.max_drawn + 1))
        self._most_edited = min(most, slots.max_num_seqs)  # sequences at once

    def rehearse(self, logits: Tensor) -> Tensor:
        """Verify as many dummies as are edited at once. Shape: logits [T, V]."""
        shape = self._largest(self._most_edited)
        return self._run(uploaded(self._dummies(shape), logits.device), shape, logits)

    def capture(self, logits: Tensor) -> None:
        """Capture what reads this `logits` tensor. Shape: [max_num_seqs or more, V]."""
        for size in padded_sizes(self._most_edited):
            shape = self._largest(size)
            self.phase.capture(self._dummies(shape), shape, (logits,))

    def _largest(self, size: int) -> Shape:
        """The shape of `_run` for so many sequences with the most drafts."""
        return (size, self._most_drafts(size), *SAMPLING_KINDS[0])

    def _most_drafts(self, size: int) -> int:
        """How many drafts so many sequences have that are edited at once: all that a model draws,
        and the longest that may be looked up for one.
        """
        return size * self._slots.max_drawn + self._slots.max_drafts

    def __call__(
        self,
        drawn: Tensor,
        slots_np: np.ndarray,
        num_drafts_np: np.ndarray,
        edited_np: np.ndarray,
        kind: Shape,
        logits: Tensor,
    ) -> None:
        """Verify those requests of a step that have logit edits, and write in `drawn` what `run`
        returns for them. Edits that need the host are launched one by one, while the GPU still
        scores.

        Shape: drawn [B, K + 2]; slots_np, num_drafts_np and edited_np (bool) [B], of all requests.
        """
        needs_host_np = self._edits.needing_host(slots_np)
        first_rows_np = np.cumsum(num_drafts_np + 1) - (num_drafts_np + 1)
        for needs_host in (False, True):
            seqs_np = (edited_np & (needs_host_np == needs_host)).nonzero()[0]
            for piece_np in self._pieces(seqs_np, num_drafts_np):
                of_piece = slots_np[piece_np], num_drafts_np[piece_np]
                rows = RequestRows.in_turn(of_piece[0], of_piece[1] + 1)
                first_np = first_rows_np[piece_np].repeat(of_piece[1] + 1)
                rows = rows._replace(row_np=first_np + rows.drafts_np)
                shape = len(piece_np), int(of_piece[1].sum()), *kind
                padded = self.phase.padded(shape)
                if not needs_host and self.phase.holds(padded, len(logits)):
                    packed_np = self._pack(rows, *of_piece, padded)
                    its = self.phase(packed_np, padded, logits)[: len(piece_np)]
                else:
                    packed = uploaded(self._pack(rows, *of_piece, shape), logits.device)
                    its = self._run(packed, shape, logits, rows if needs_host else None)
                drawn[uploaded(piece_np, drawn.device)] = its

    def _pieces(self, seqs_np: np.ndarray, num_drafts_np: np.ndarray) -> list[np.ndarray]:
        """These sequences, divided into those that are edited at once.

        Shape: seqs_np [N]; num_drafts_np [B], of all.
        """
        most = self._most_edited
        pieces: list[list[int]] = []
        num_drafts = 0  # of the last piece
        for seq in seqs_np.tolist():
            num_drafts += num_drafts_np[seq]
            if not pieces or len(pieces[-1]) == most or num_drafts > self._most_drafts(most):
                pieces.append([])
                num_drafts = num_drafts_np[seq]
            pieces[-1].append(seq)
        return [np.array(piece) for piece in pieces]

    def _run(
        self, integers: Tensor, shape: Shape, logits: Tensor, rows: RequestRows | None = None
    ) -> Tensor:
        """Verify edited copies of rows of the logits, as `run` does. `rows` are given if their
        edits need the host.

        `shape` is (requests, most drafts of all of them, filters, draws).
        Shape: integers, see `_pack`; logits [T, V] -> [B, K + 2].
        """
        size, num_drafts, *_ = shape
        num_rows = size + num_drafts
        of_rows, of_requests = integers.tensor_split([3 * aligned(num_rows)])
        at = RequestRows.unpack(of_rows.view(3, -1), num_rows, self._slots.num_tokens)
        packed = of_requests.view(torch.int32).view(3, -1)
        self._edits.count(packed[1, :size])
        return self._run_plain(packed, shape, self._edits.apply(logits, at, rows))

    def _pack(
        self, rows: RequestRows, slots_np: np.ndarray, num_drafts_np: np.ndarray, shape: Shape
    ) -> np.ndarray:
        """Pack the integers of `_run`: the rows, and then those of the plain one."""
        size, num_drafts, *_ = shape
        of_rows_np = rows.packed(size + num_drafts, self._slots.dummy)
        of_requests_np = self._pack_plain(slots_np, num_drafts_np, size)
        return np.concatenate((of_rows_np.ravel(), of_requests_np.ravel().view(np.int64)))

    def _dummies(self, shape: Shape) -> np.ndarray:
        return self._pack(RequestRows.in_turn(NONE_NP, NONE_NP), NONE_NP, NONE_NP, shape)
