"""What a proposer is: something that runs ahead of the target and says what it thinks will come."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.verify.sampling import STATE_WIDTH

from ..api import ReportProgress
from ..scheduling.plan import Plan, ScheduledRequest

log = logging.getLogger(__name__)


# (whether any sequence filters, whether any samples): what the kernels may leave out
SAMPLING_KINDS = ((True, True), (False, True), (False, False))


def sampling_kind(sampled: list[ScheduledRequest]) -> tuple[bool, bool]:
    """The SAMPLING_KINDS entry of these sequences."""
    filters = any(s.request.params.is_filtered for s in sampled)
    return filters, any(s.request.params.temperature > 0 for s in sampled)


class DraftDistributions(NamedTuple):
    """What the drafts in each slot were drawn from; rows from k_i on are undefined."""

    # [num_slots, K, V'] raw, in the head's dtype
    logits: Tensor
    # [num_slots, K, 4] row states of the draft sampler
    state: Tensor

    @staticmethod
    def empty(
        num_slots: int, num_drafts: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> "DraftDistributions":
        return DraftDistributions(
            torch.empty(num_slots, num_drafts, width, dtype=dtype, device=device),
            torch.empty(num_slots, num_drafts, STATE_WIDTH, device=device),
        )


class Proposer(ABC):
    """Proposes up to `num_drafts` tokens for each sampled sequence of a plan.

    The drafts go into the slots, behind the known tokens, and the plan's `num_drafts` come down to
    how many they are. To propose fewer, or none, is always allowed: those sequences decode plainly
    in the same step. `distributions` is what drafts were drawn from; None: they are one-hot.
    """

    distributions: DraftDistributions | None = None
    needs_host = False  # whether it can draft only behind tokens that the host knows

    def propose(self, plan: Plan) -> None:
        """Draft for the plan. A proposer that fails costs nobody more than its drafts."""
        try:
            self._propose(plan)
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            for scheduled in plan.scheduled:
                scheduled.num_drafts = 0

    def follow(self, plan: Plan) -> None:
        """Take in what a step computed, once its tokens are drawn and before anybody is seated."""
        try:
            self._follow(plan)
        except Exception:
            log.exception("the drafts' source lost the thread; its sequences decode plainly")

    def warm_ups(self) -> Iterable[Callable[[], Tensor]]:
        """Draws of nobody that launch every sampling kernel between them."""
        return ()

    def rehearse(self) -> None:
        """Run the largest passes that drafting takes, on padding alone."""
        return

    def rehearse_short(self, num_seqs: int, num_rows: int) -> None:
        """Draft for so many sequences of nobody, of so many rows each."""
        return

    def capture(self, report: ReportProgress) -> None:
        """Capture what it runs on a GPU."""
        return

    @abstractmethod
    def _propose(self, plan: Plan) -> None: ...

    def _follow(self, plan: Plan) -> None:
        return


class NoProposer(Proposer):
    """Plain decoding."""

    def _propose(self, plan: Plan) -> None:
        for scheduled in plan.scheduled:
            scheduled.num_drafts = 0
