"""Drafts with a draft model, one token a pass, k_i drafts for each sequence."""

from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from outrider.kernels.verify import cpu

from ..api import ReportProgress
from ..logit_edits import LogitEdits
from ..models.compiled_decoder import CompiledDecoder
from ..models.network import Network, Pass
from ..plan import Plan, ScheduledRequest, slots_of, wants_of
from ..request import Request
from ..state.batch import HostBatch
from ..state.slots import Slots
from .draws import Draws
from .proposer import Counts, Source


class _Reading(NamedTuple):
    """What the draft model computes of a sequence before it drafts for it."""

    scheduled: ScheduledRequest
    start: int  # relative to the end of the known tokens
    num_rows: int
    num_drafts: int  # 0: it only reads


class DraftModel(Source):
    """Drafts with a model of its own.

    Sequences that would outgrow the draft's context, or that need no drafts, decode plainly in the
    same step. Before it drafts, the draft model computes what it has missed: two tokens after a
    fully accepted step, a prompt in chunks, a long gap after plain decoding.
    """

    name = "draft_model"
    draws: Draws

    def __init__(
        self, draft: Network, slots: Slots, edits: LogitEdits, max_num_batched_tokens: int
    ) -> None:
        self.draws = Draws(slots, edits, draft)
        self.phases = (self.draws.phase,)
        self._slots = slots
        self._edits = edits
        self._draft = draft
        self.may_fail = not draft.has_followers
        self._is_compiled = isinstance(draft, CompiledDecoder) and cpu.takes(
            self.draws.distributions.logits
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
        report_graphs = partial(report, "capturing the draft's graphs")
        self.draws.capture(self._draft.capture(2, self._most_rows, False, report_graphs))

    def can_draft(self, requests: list[Request]) -> list[Request]:
        """Not behind drafts in flight that it has not read: nobody knows how many are accepted."""
        return [request for request in requests if not request.drafts_in_flight]

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        """Compute, in one ragged batch, what the draft has not computed yet, and then draft."""
        reading = self._missed(plan, wanted)
        if not reading:
            return {}
        batch = HostBatch.build(
            [each.scheduled.slot for each in reading],
            [each.start for each in reading],
            [each.num_rows for each in reading],
            [int(each.num_drafts > 0) for each in reading],
        )
        drafting = [each.scheduled for each in reading if each.num_drafts > 0]
        counts_np = np.array([each.num_drafts for each in reading if each.num_drafts > 0])
        if not drafting:
            self._draft.forward(batch)
        elif self._is_compiled and not wants_of(drafting).edits:
            counts_np = self._draft_in_one_call(drafting, counts_np, batch)
        else:
            counts_np = self._draft_pass_by_pass(drafting, counts_np, batch)
        for each in reading:
            each.scheduled.draft_end = each.start + each.num_rows
        for scheduled, k in zip(drafting, counts_np.tolist(), strict=True):
            scheduled.draft_end = k - 1  # the last draft is never computed
        return dict(zip((each.slot for each in drafting), counts_np.tolist(), strict=True))

    def _missed(self, plan: Plan, wanted: Counts) -> list[_Reading]:
        """The sequences to read, as far as their tokens fit into a pass.

        No drafts if not all of them fit; no more than the draft's context has room for.
        """
        num_rows_left = self._most_rows
        reading = []
        for scheduled in plan.scheduled:
            # k drafts need k - 1 positions after known tokens.
            room = self._draft.max_positions - scheduled.request.most_tokens + 1
            num_drafts = max(0, min(wanted.get(scheduled.slot, 0), room))
            reads_prompt = scheduled.is_drafted_for and not scheduled.emits and room > 0
            if num_drafts == 0 and not reads_prompt:
                continue
            first = _first_unseen(scheduled.request)
            num_wanted = scheduled.relative_end - first
            num_unseen = min(num_wanted, num_rows_left)
            num_rows_left -= num_unseen
            if num_unseen < num_wanted:
                num_drafts = 0
            if num_unseen > 0:
                reading.append(_Reading(scheduled, first, num_unseen, num_drafts))
        return reading

    def _draft_pass_by_pass(
        self, drafting: list[ScheduledRequest], counts_np: np.ndarray, batch: HostBatch
    ) -> np.ndarray:
        """Compute the batch, which ends with a row of logits for each sequence, and draft.

        Shape: counts_np, how many drafts are wanted and how many are made: [N] -> [N].
        """

        def logits_of(j: int, slots_np: np.ndarray, _: np.ndarray) -> tuple[Tensor, None]:
            rows = batch
            if j > 0:
                ones_np = np.ones_like(slots_np)
                rows = HostBatch.build(slots_np, (j - 1) * ones_np, ones_np, ones_np)
            return self._draft.forward(rows).logits, None

        return self.draws.in_turn(drafting, counts_np, logits_of)

    def _draft_in_one_call(
        self, drafting: list[ScheduledRequest], counts_np: np.ndarray, batch: HostBatch
    ) -> np.ndarray:
        """The same without the time that Python takes around each small pass. Compiled code alone
        does it, which knows no logit edits.
        """
        assert isinstance(self._draft, CompiledDecoder)
        drafts = cpu.LinesOfDrafts(
            self._slots.state,
            slots_of(drafting),
            counts_np,
            np.array([scheduled.least_chance for scheduled in drafting]),
            self._slots.vocab_size,
            self.draws.kept(wants_of(drafting).draws),
        )
        self._draft.draft_in_slots(batch, drafts)
        return drafts.counts_np


def _first_unseen(request: Request) -> int:
    """The first token that the draft has not computed, relative to the end of the known tokens.

    If drafts are in flight, the draft has computed all but the last one or two: compute two.
    """
    if request.num_drafts_in_flight:
        return -2
    return request.memory.num_draft_computed_tokens - request.least_tokens
