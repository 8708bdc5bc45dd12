"""Draws drafts, writes them into the slots, and keeps the distributions they were drawn from."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify import cpu
from outrider.kernels.verify.sampling import STATE_WIDTH
from outrider.kernels.verify.verify import draw_draft

from ..logit_edits import LogitEdits, RequestRows
from ..models.network import PagedLayers
from ..plan import DRAFTING_KINDS, ScheduledRequest, slots_of, wants_of
from ..state.host_copy import uploaded
from ..state.phase import Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP, aligned
from ..state.slots import DraftDistributions, Slots

# (j, slots, rows) -> logits of draft j for these slots and, from a confidence head, how likely it
# is accepted if the drafts before it are: [N]. `rows` are those of the previous call that continue.
LogitsOf = Callable[[int, np.ndarray, np.ndarray], tuple[Tensor, Tensor | None]]


def stops_early_on(device: torch.device) -> bool:
    """Whether drafts are looked at one by one."""
    return device.type == "cpu"


class Draws:
    """Draws one line of drafts for each sequence, with the request's own sampling parameters.

    With `stops_early`, as on a CPU, a sequence gets no more drafts once those so far are too
    unlikely to be accepted, if the plan says so. This depends only on the drafts so far, so every
    rule stays exact. The host must read each draft, which costs nothing on a CPU, but a wait on a
    GPU. There `log_odds` are kept, by which drafts are chosen that are verified.
    """

    def __init__(self, slots: Slots, edits: LogitEdits, source: PagedLayers) -> None:
        """`source` computes the logits."""
        self._slots = slots
        self._edits = edits
        self.stops_early = stops_early_on(slots.device)
        num_slots, device = slots.max_num_seqs + 1, slots.device
        shape = num_slots, slots.max_drawn, source.vocab_size
        self.distributions = DraftDistributions(
            torch.empty(*shape, dtype=source.dtype, device=device),
            torch.empty(num_slots, slots.max_drafts, STATE_WIDTH, device=device),
        )
        # [num_slots, K'] how sure the distribution of each draft is, see log_odds.py
        self.log_odds: Tensor | None = None
        if not self.stops_early:
            self.log_odds = torch.zeros(num_slots, slots.max_drawn, device=device)
        self.phase = Phase(self.draw, device)

    def pack(self, slots_np: np.ndarray, offset: int, size: int) -> np.ndarray:
        """The integers of `draw` for draft `offset` of these slots, padded with dummy rows.

        Shape: [B] -> [2, size or more].
        """
        packed = np.zeros((2, aligned(size)), dtype=np.int64)
        packed[0] = self._slots.dummy
        packed[0, : len(slots_np)] = slots_np
        packed[1, : len(slots_np)] = offset
        return packed

    def draw(self, integers: Tensor, shape: Shape, logits: Tensor) -> Tensor:
        """Draw one draft for each row, write it into its slot, and keep its distribution.

        `shape` is (rows, filters, draws, edits): with edits, the logits of slots that ask for some
        are overwritten. Shape: integers [2, N or more], for each row its slot and the number of
        drafts before this one; logits [N or more, V] -> [N].
        """
        size, filters, draws, edits = shape
        (slot, offset), logits = integers[:, :size].unbind(), logits[:size]
        if edits:
            self._edits.edit_drafts(logits, slot, offset)
        return draw_draft(
            logits,
            self._slots.state,
            slot,
            offset,
            self.kept(draws),
            self._slots.vocab_size,
            filters=bool(filters),
            draws=bool(draws),
            log_odds=self.log_odds,
        )

    def keep_confidence(self, integers: Tensor, confidence: Tensor) -> None:
        """A confidence head says how likely these drafts are to be accepted: the log odds of that
        are kept in place of the distributions' own. Integers as in `draw`. Shape: [N].
        """
        if self.log_odds is not None:
            slot, offset = integers[:, : len(confidence)]
            self.log_odds[slot, offset] = torch.logit(confidence.float(), 1e-6)

    def kept(self, draws: int) -> DraftDistributions | None:
        """Where distributions go; verifying greedy drafts does not need them."""
        return self.distributions if draws else None

    def capture(self, logits: Tensor) -> None:
        """Capture draws of one draft for each sequence. Shape: logits [max_num_seqs, V']."""
        for size in padded_sizes(self._slots.max_num_seqs):
            for kind in DRAFTING_KINDS:
                integers_np = self.pack(NONE_NP, 0, size)
                self.phase.capture(integers_np, (size, *kind), (logits[:size],))

    def warm_ups(self) -> Iterator[Callable[[], Tensor]]:
        """Dummy draws that together launch every sampling kernel."""
        logits = torch.zeros_like(self.distributions.logits[:2, 0])
        integers = uploaded(self.pack(NONE_NP, 0, 2), logits.device)
        for kind in DRAFTING_KINDS:
            yield partial(self.draw, integers, (2, *kind), logits)

    def in_turn(
        self, scheduled: list[ScheduledRequest], wanted_np: np.ndarray, logits_of: LogitsOf
    ) -> np.ndarray:
        """Draw up to k_i drafts for each sequence, one after another; returns their number.

        If a request has an edit that needs the host, the edits of all are made by themselves. How
        likely a draft is to be accepted follows from the head's confidence or else from the draft's
        own probabilities.
        Shape: wanted_np [N] -> [N].
        """
        slots_np, wants = slots_of(scheduled), wants_of(scheduled)
        least_np = np.array([s.least_chance for s in scheduled])
        looks = self.stops_early and least_np.any()
        num_drawn_np, chance_np = np.zeros_like(wanted_np), np.ones(len(scheduled))
        seqs_np = kept_np = np.arange(len(scheduled))  # those still drafted for
        for j in range(int(wanted_np.max())):
            logits, confidence = logits_of(j, slots_np[seqs_np], kept_np)
            kept_np = np.arange(len(seqs_np))
            if looks and confidence is not None:
                chance_np[seqs_np] *= confidence.cpu().numpy()
                kept_np = (chance_np[seqs_np] >= least_np[seqs_np]).nonzero()[0]
                if len(kept_np) == 0:
                    break
                seqs_np, logits = seqs_np[kept_np], logits[uploaded(kept_np, logits.device)]
            edits = wants.edits and bool(self._edits.asked_by(slots_np[seqs_np]).any())
            if edits and self._edits.needing_host(slots_np[seqs_np]).any():
                logits, edits = self._edited(logits, slots_np[seqs_np], j), False
            kind = wants.filters, wants.draws, edits
            token_ids = self._draw_each(slots_np[seqs_np], j, kind, logits)
            num_drawn_np[seqs_np] += 1
            goes_on_np = wanted_np[seqs_np] > j + 1
            if looks and confidence is None and goes_on_np.any():
                known = logits[:, : self._slots.vocab_size]
                chance_np[seqs_np] *= cpu.probabilities(known, token_ids)
                goes_on_np &= chance_np[seqs_np] >= least_np[seqs_np]
            if not goes_on_np.any():
                break
            seqs_np, kept_np = seqs_np[goes_on_np], kept_np[goes_on_np]
        return num_drawn_np

    def _draw_each(self, slots_np: np.ndarray, j: int, kind: Shape, logits: Tensor) -> Tensor:
        """Draw draft j in these slots. Shape: logits [N, V'] -> [N]."""
        shape = self.phase.padded((len(slots_np), *kind))
        integers_np = self.pack(slots_np, j, shape[0])
        return self.phase(integers_np, shape, logits)[: len(slots_np)]

    def _edited(self, logits: Tensor, slots_np: np.ndarray, j: int) -> Tensor:
        """The logits of draft j, with the edits of the rows' requests. Shape: [N, V'].

        Rounded as in `LogitEdits.edit_drafts`.
        """
        row_np = self._edits.asked_by(slots_np).nonzero()[0]
        rows = RequestRows(row_np, slots_np[row_np], np.full_like(row_np, j))
        packed = uploaded(rows.packed(len(row_np), self._slots.dummy), logits.device)
        at = RequestRows.unpack(packed, len(row_np), self._slots.num_tokens)
        edited = self._edits.apply(logits, at, rows)
        return logits.index_copy(0, at.row, edited.to(logits.dtype))
