"""The interface of a proposer, which guesses the tokens that the target will produce next."""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from ..api import ReportProgress
from ..models.network import Pass
from ..scheduling.plan import Plan, ScheduledRequest

log = logging.getLogger(__name__)


# (whether any sequence filters, whether any samples): kernels leave out what is not needed.
SAMPLING_KINDS = ((True, True), (False, True), (False, False))


def sampling_kind(sampled: list[ScheduledRequest]) -> tuple[bool, bool]:
    """The SAMPLING_KINDS entry of these sequences."""
    filters = any(s.request.params.is_filtered for s in sampled)
    return filters, any(s.request.params.temperature > 0 for s in sampled)


class DraftDistributions(NamedTuple):
    """The distributions that the drafts in each slot were drawn from; undefined from row k_i on."""

    # [num_slots, K, V'] raw logits, in the draft's dtype
    logits: Tensor
    # [num_slots, K, 4] row states of the draft sampler
    state: Tensor


class Proposer:
    """Proposes up to `num_drafts` tokens for each sampled sequence of a plan.

    It writes the drafts into the slots, after the known tokens, and lowers the plan's `num_drafts`
    to how many there are. Proposing fewer, or none, is always allowed: such sequences decode
    plainly in the same step. `distributions` holds what the drafts were drawn from; None: they are
    one-hot. This class itself proposes none.
    """

    distributions: DraftDistributions | None = None
    needs_host = False  # whether the host must know all tokens before it can draft
    stops_early = False  # whether it heeds the plan's `least_chance`

    def propose(self, plan: Plan) -> None:
        """Draft for the plan. If the proposer fails, the step decodes plainly."""
        try:
            self._propose(plan)
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            for scheduled in plan.scheduled:
                scheduled.num_drafts = 0

    def follow(self, plan: Plan, scored: Pass) -> None:
        """Called with the target's pass after a step is verified, and before the next sequence is
        seated. If the proposer fails, the plan's sequences decode plainly from then on.
        """
        try:
            self._follow(plan, scored)
        except Exception:
            log.exception("the proposer could not follow this step; its sequences decode plainly")
            for scheduled in plan.scheduled:
                scheduled.request.speculates = False

    def warm_ups(self) -> Iterable[Callable[[], Tensor]]:
        """Dummy draws that together launch every sampling kernel."""
        return ()

    def rehearse(self, scored: Pass) -> None:
        """Run the largest passes that drafting may need over padding, after the target's."""
        return

    def rehearse_short(self, num_seqs: int, num_rows: int, scored: Pass) -> None:
        """Draft for dummy sequences of `num_rows` rows each, after the target's pass over them."""
        return

    def capture(self, report: ReportProgress) -> None:
        """Capture its passes as CUDA graphs."""
        return

    def _propose(self, plan: Plan) -> None:
        return

    def _follow(self, plan: Plan, scored: Pass) -> None:
        return
