"""Drafts with a draft model, one token a pass, k_i drafts for each sequence."""

from functools import partial

import numpy as np
from torch import Tensor

from outrider.kernels.verify import cpu

from ..api import ReportProgress
from ..logit_edits import LogitEdits
from ..models.compiled_decoder import CompiledDecoder
from ..models.network import Network, Pass
from ..request import Request
from ..scheduling.plan import Plan, ScheduledRequest, slots_of
from ..state.batch import HostBatch
from ..state.phase import padded_sizes
from ..state.ragged import NONE_NP
from ..state.slots import Slots
from .base import SAMPLING_KINDS, sampling_kind
from .draws import DrawingProposer


class Top1Proposer(DrawingProposer):
    """Drafts with a model of its own.

    Sequences that would outgrow the draft's context, or that need no drafts, decode plainly in the
    same step. Before it drafts, the draft model computes what it has missed: two tokens after a
    fully accepted step, a prompt in chunks, a long gap after plain decoding.
    """

    def __init__(
        self, draft: Network, slots: Slots, edits: LogitEdits, max_num_batched_tokens: int
    ) -> None:
        super().__init__(slots, edits, draft)
        self._draft = draft
        self._is_compiled = isinstance(draft, CompiledDecoder) and cpu.takes(
            self.distributions.logits
        )
        # Rows of one pass: those of a step, and two that each slot may have missed.
        self._most_rows = max_num_batched_tokens + 2 * slots.max_num_seqs

    def rehearse(self, scored: Pass) -> None:
        drafted = self._draft.rehearse(self._most_rows, self._slots.max_num_seqs)
        self._edits.rehearse(drafted.logits)

    def rehearse_short(self, num_seqs: int, num_rows: int, scored: Pass) -> None:
        self._draft.rehearse_short(num_seqs, num_rows)

    def capture(self, report: ReportProgress) -> None:
        """Capture the draft's passes of one or two rows a sequence, and its draws."""
        progress = partial(report, "capturing the draft's graphs")
        logits = self._draft.capture(2, self._most_rows, False, progress)
        for size in padded_sizes(self._slots.max_num_seqs):
            for kind in SAMPLING_KINDS:
                integers_np = self._pack_draws(NONE_NP, 0, size)
                self._draws.capture(integers_np, (size, *kind), (logits[:size],))

    def _propose(self, plan: Plan) -> None:
        """Compute, in one ragged batch, what the draft has not computed yet, and then draft."""
        reading, starts, lens = self._missed(plan)
        if not reading:
            return
        drafting = [scheduled for scheduled in reading if scheduled.num_drafts > 0]
        batch = HostBatch.build(
            slots_of(reading),
            np.array(starts),
            np.array(lens),
            np.array([int(scheduled.num_drafts > 0) for scheduled in reading]),
        )
        if not drafting:
            self._draft.forward(batch)
        elif self._is_compiled and not self._edits.asked_by(slots_of(drafting)).any():
            self._draft_in_one_call(drafting, batch)
        else:
            self._draft_pass_by_pass(drafting, batch)
        for scheduled, first, num_unseen in zip(reading, starts, lens, strict=True):
            request = scheduled.request
            if not request.num_drafts_in_flight:  # otherwise it depends on how many of them stand
                request.num_draft_computed_tokens = request.least_tokens + first + num_unseen

    def _missed(self, plan: Plan) -> tuple[list[ScheduledRequest], list[int], list[int]]:
        """The sequences to read, where they go on, and how many tokens of each fit into a pass.

        Lowers `num_drafts` to what the draft's context has room for; 0 if tokens do not fit.
        """
        num_rows_left = self._most_rows
        reading, starts, lens = [], [], []
        for scheduled in plan.scheduled:
            # The last draft is never computed: k drafts need k - 1 positions after known tokens.
            room = self._draft.max_positions - scheduled.request.most_tokens + 1
            scheduled.num_drafts = max(0, min(scheduled.num_drafts, room))
            reads_prompt = scheduled.is_drafted_for and not scheduled.samples and room > 0
            if scheduled.num_drafts == 0 and not reads_prompt:
                continue
            first = _first_unseen(scheduled.request)
            num_wanted = scheduled.start + scheduled.num_new_tokens - first
            num_unseen = min(num_wanted, num_rows_left)
            num_rows_left -= num_unseen
            if num_unseen < num_wanted:
                scheduled.num_drafts = 0
            if num_unseen > 0:
                reading.append(scheduled)
                starts.append(first)
                lens.append(num_unseen)
        return reading, starts, lens

    def _draft_pass_by_pass(self, drafting: list[ScheduledRequest], batch: HostBatch) -> None:
        """Compute the batch, which ends with a row of logits for each sequence, and draft."""

        def logits_of(j: int, slots_np: np.ndarray, _: np.ndarray) -> tuple[Tensor, None]:
            rows = batch
            if j > 0:
                ones_np = np.ones_like(slots_np)
                rows = HostBatch.build(slots_np, (j - 1) * ones_np, ones_np, ones_np)
            return self._draft.forward(rows).logits, None

        self._draw_in_turn(drafting, logits_of)

    def _draft_in_one_call(self, drafting: list[ScheduledRequest], batch: HostBatch) -> None:
        """The same without the time that Python takes around each small pass. Compiled code alone
        does it, which knows no logit edits.
        """
        assert isinstance(self._draft, CompiledDecoder)
        _, samples = sampling_kind(drafting)
        drafts = cpu.LinesOfDrafts(
            self._slots.state,
            slots_of(drafting),
            np.array([scheduled.num_drafts for scheduled in drafting]),
            np.array([scheduled.least_chance for scheduled in drafting]),
            self._slots.vocab_size,
            self._kept(samples),
        )
        self._draft.draft_in_slots(batch, drafts)
        for scheduled, num_drawn in zip(drafting, drafts.counts_np.tolist(), strict=True):
            scheduled.num_drafts = num_drawn


def _first_unseen(request: Request) -> int:
    """The first token that the draft has not computed, relative to the end of the known tokens.

    If drafts are in flight, the draft has computed all but the last one or two: compute two.
    """
    if request.num_drafts_in_flight:
        return -2
    return request.num_draft_computed_tokens - request.least_tokens
