"""The draft model runs ahead, one token a pass, each sequence for its own k_i."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.slot_rows import read_slots, write_draft
from outrider.kernels.verify.verify import draft_sample

from ..api import ReportProgress
from ..logit_edits import LogitEdits, RequestRows
from ..models.paged_model import PagedModel
from ..request import Request
from ..scheduling.plan import Plan, ScheduledRequest, slots_of
from ..state.batch import HostBatch
from ..state.host_copy import uploaded
from ..state.phase import Phase, Shape, padded_size, padded_sizes
from ..state.ragged import aligned
from ..state.slots import Slots
from .base import (
    SAMPLING_KINDS,
    DraftDistributions,
    Proposer,
    sampling_kind,
)

# Below it another draft pays less than it costs: measured with the default pair, where anything
# from 0.05 to 0.2 is within 2% of the best for a draft of 0.07 to 0.11 of the target's cost.
_MIN_LIKELIHOOD = 0.1


class Top1Proposer(Proposer):
    """Drafts one line of tokens per sequence from a draft model, under the request's own sampling.

    Sequences that would outgrow the draft's context, or are not to be drafted for, are left out:
    they decode plainly in the same step and keep their place in its order. The draft's KV catches
    up with whatever it has not seen: two tokens after a fully accepted step, a prompt in chunks, a
    long gap after plain decoding.

    With `stops_early` a sequence gets no further draft once the draft model itself holds those it
    has for unlikely. Whether there is a next draft hangs on those before it alone, so that every
    rule stays exact. It reads each draft at once: nothing on a CPU, a wait on a GPU.
    """

    def __init__(
        self,
        draft: PagedModel,
        slots: Slots,
        edits: LogitEdits,
        vocab_size: int,
        max_num_batched_tokens: int,
        *,
        stops_early: bool = False,
    ) -> None:
        self._draft = draft
        self._slots = slots
        self._edits = edits
        self._vocab_size = vocab_size
        # Of one pass: a step's, and the two that each seat may not have seen.
        self._most_rows = max_num_batched_tokens + 2 * slots.max_num_seqs
        self._stops_early = stops_early
        self._phase = Phase(self._draw, slots.device)
        self._sizes: list[int] = []  # captured, ascending
        self.distributions: DraftDistributions = DraftDistributions.empty(
            slots.max_num_seqs + 1, slots.max_drafts, draft.vocab_size, draft.dtype, slots.device
        )

    def warm_ups(self) -> Iterator[Callable[[], Tensor]]:
        device = self._slots.device
        logits = torch.zeros(2, self._draft.vocab_size, dtype=self._draft.dtype, device=device)
        integers = uploaded(self._pad(np.zeros((2, 0), dtype=np.int64), 2), device)
        for kind in SAMPLING_KINDS:
            yield partial(self._draw, integers, (2, *kind), logits, *self.distributions)

    def rehearse(self, num_rows: int) -> None:
        num_seqs = self._slots.max_num_seqs
        logits = self._draft.rehearse(max(num_rows, self._most_rows), num_seqs)
        self._edits.rehearse(logits, RequestRows.of_nobody(self._slots.dummy, len(logits)))

    def rehearse_short(self, num_seqs: int, num_rows: int) -> None:
        self._draft.rehearse_short(num_seqs, num_rows)

    def capture(self, report: ReportProgress) -> None:
        """Capture the draft's passes, of one row or two a sequence, and its draws."""
        progress = partial(report, "capturing the draft's graphs")
        logits = self._draft.capture(2, self._most_rows, False, progress)
        sizes = padded_sizes(self._slots.max_num_seqs)
        for size in sizes:
            for kind in SAMPLING_KINDS:
                integers_np = self._pad(np.zeros((2, 0), dtype=np.int64), size)
                tensors = (logits[:size], *self.distributions)
                self._phase.capture(integers_np, (size, *kind), tensors)
        self._sizes = sizes[::-1]

    def _propose(self, plan: Plan) -> None:
        drafting, logits = self._catch_up(plan)
        if drafting:
            num_drawn_np = self._draft_for(drafting, logits)
            for scheduled, num_drawn in zip(drafting, num_drawn_np.tolist(), strict=True):
                scheduled.num_drafts = num_drawn

    def _catch_up(self, plan: Plan) -> tuple[list[ScheduledRequest], Tensor]:
        """Compute what the draft has not seen, in one ragged batch.

        Returns the sequences to draft for, and the logits behind their last known tokens: [B, V'].
        """
        num_rows_left = self._most_rows
        reading, starts, lens = [], [], []
        for scheduled in plan.scheduled:
            # The last draft is never fed back, so k drafts take k - 1 positions behind the known.
            room = self._draft.max_positions - scheduled.request.most_tokens + 1
            scheduled.num_drafts = max(0, min(scheduled.num_drafts, room))
            reads_prompt = scheduled.is_drafted_for and not scheduled.samples and room > 0
            if scheduled.num_drafts == 0 and not reads_prompt:
                continue
            first, end = (
                _first_unseen(scheduled.request),
                scheduled.start + scheduled.num_new_tokens,
            )
            num_unseen = min(end - first, num_rows_left)
            num_rows_left -= num_unseen
            if num_unseen < end - first:
                scheduled.num_drafts = 0
            if num_unseen > 0:
                reading.append(scheduled)
                starts.append(first)
                lens.append(num_unseen)
        drafting = [scheduled for scheduled in reading if scheduled.num_drafts > 0]
        if not reading:
            return drafting, torch.empty(0)
        logits = self._forward(
            slots_of(reading),
            np.array(starts),
            np.array(lens),
            np.array([int(scheduled.num_drafts > 0) for scheduled in reading]),
        )
        for scheduled, first, num_unseen in zip(reading, starts, lens, strict=True):
            request = scheduled.request
            if not request.num_drafts_in_flight:  # else it hangs on how many of them stand
                request.num_draft_computed_tokens = request.least_tokens + first + num_unseen
        return drafting, logits

    def _draft_for(self, scheduled: list[ScheduledRequest], logits: Tensor) -> np.ndarray:
        """Draw up to k_i drafts for each sequence, writing them behind its known tokens.

        Shape: logits [B, V'], behind the known tokens; returns how many were drawn: [B].
        """
        slots_np = slots_of(scheduled)
        num_drafts_np = np.array([s.num_drafts for s in scheduled])
        num_drawn_np, likelihood_np = np.zeros_like(num_drafts_np), np.ones(len(scheduled))
        seqs_np = np.arange(len(scheduled))  # that are still drafted for
        kind = sampling_kind(scheduled)
        for j in range(int(num_drafts_np.max())):
            offsets_np = np.full_like(slots_np, j)
            self._edit(logits, slots_np, offsets_np)
            size = padded_size(len(slots_np), self._sizes)
            integers_np = self._pad(np.stack((slots_np, offsets_np)), size)
            token_ids = self._phase(integers_np, (size, *kind), logits, *self.distributions)
            num_drawn_np[seqs_np] += 1
            goes_on_np = num_drafts_np[seqs_np] > j + 1
            if self._stops_early and goes_on_np.any():
                likelihood_np[seqs_np] *= _likelihood(logits, token_ids)
                goes_on_np &= likelihood_np[seqs_np] >= _MIN_LIKELIHOOD
            if not goes_on_np.any():
                break
            seqs_np, slots_np = seqs_np[goes_on_np], slots_np[goes_on_np]
            ones_np = np.ones_like(slots_np)
            logits = self._forward(slots_np, j * ones_np, ones_np, ones_np)
        return num_drawn_np

    def _draw(
        self,
        integers: Tensor,
        shape: Shape,
        logits: Tensor,
        kept_logits: Tensor,
        kept_state: Tensor,
    ) -> Tensor:
        """Draw one draft a row, write it to its slot, and keep what it was drawn from.

        Shape: integers [2, N or more], of each row its slot and how many of the step's drafts come
        before this one; logits [N, V']; kept_logits [num_slots, K, V'], kept_state [num_slots, K,
        4].
        """
        size, filters, samples = shape
        slot, offset = integers[:, :size].unbind()
        rows = read_slots(self._slots.state, slot, 0, offset)
        drawn = draft_sample(
            logits,
            rows.sampling,
            rows.position,
            rows.anchor,
            self._vocab_size,
            filters=bool(filters),
            samples=bool(samples),
        )
        kept = (kept_logits, kept_state) if samples else None  # greedy ones are verified without
        write_draft(self._slots.state, slot, rows.position, offset, drawn, logits, kept)
        return drawn.token_ids

    def _pad(self, integers_np: np.ndarray, size: int) -> np.ndarray:
        """Shape: [2, N] -> [2, size or more]; the rows behind are those of nobody."""
        padded = np.zeros((2, aligned(size)), dtype=np.int64)
        padded[0] = self._slots.dummy
        padded[:, : integers_np.shape[1]] = integers_np
        return padded

    def _edit(self, logits: Tensor, slots_np: np.ndarray, drafts_np: np.ndarray) -> None:
        """In place, if the requests of the rows want it. Shape: [N, V'], drafts_np [N] before them.

        Rounding is no harm: drafts are drawn from what is then there, and that is what is kept.
        """
        edited_np = self._edits.asked_by(slots_np)
        if edited_np.any():
            rows = RequestRows.one_each(slots_np, drafts_np).take(edited_np)
            edited = self._edits.apply(logits, rows).to(logits.dtype)
            logits[uploaded(rows.first_rows_np, logits.device)] = edited

    def _forward(
        self,
        slots_np: np.ndarray,
        starts_np: np.ndarray,
        query_lens_np: np.ndarray,
        num_logits_np: np.ndarray,
    ) -> Tensor:
        batch = HostBatch.build(slots_np, starts_np, query_lens_np, num_logits_np)
        return self._draft.forward(batch).logits


def _first_unseen(request: Request) -> int:
    """The first token that the draft has not computed; the last known one is at -1.

    Behind drafts that the host has not read yet it has seen all but one or two: it computes two.
    """
    if request.num_drafts_in_flight:
        return -2
    return request.num_draft_computed_tokens - request.least_tokens


def _likelihood(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """What the draft model gives these tokens. Shape: [N, V'], [N] -> [N]."""
    probs = torch.softmax(logits, dim=-1).gather(1, token_ids[:, None])
    of_row: np.ndarray = probs.squeeze(1).float().numpy()
    return of_row
