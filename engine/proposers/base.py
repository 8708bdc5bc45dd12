"""What a proposer is: something that runs ahead of the target and says what it thinks will come."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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


@dataclass(slots=True)
class Proposals:
    """Drafts of a plan's sampled sequences; their tokens lie in the slots, behind the known ones.

    `distributions` is what each draft was drawn from, or None where drafts are one-hot.
    """

    # [B] k_i, at most what the plan asked for
    num_drafts_np: np.ndarray
    distributions: DraftDistributions | None = None

    @staticmethod
    def none(plan: Plan) -> "Proposals":
        return Proposals(np.zeros(len(plan.sampled), dtype=np.int64))


class Proposer(ABC):
    """Proposes up to `num_drafts` tokens for each sampled sequence of a plan, in the plan's order.

    Proposing fewer, or none, is always allowed: those sequences decode plainly in the same step.
    `distributions` is that of all its proposals.
    """

    distributions: DraftDistributions | None = None

    def propose(self, plan: Plan) -> Proposals:
        """Draft for the plan. A proposer that fails costs nobody more than its drafts."""
        try:
            return self._propose(plan)
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            return Proposals.none(plan)

    def propose_ahead(self, plan: Plan) -> None:
        """Draft for the step after this plan's while the host does not know yet what it drew.

        What comes of it is proposed by the next `propose`, where it still fits.
        """
        try:
            self._propose_ahead(plan)
        except Exception:
            log.exception("drafting ahead failed; the next step drafts later")

    def warm_ups(self) -> Iterable[Callable[[], Tensor]]:
        """Draws of nobody that launch every sampling kernel between them."""
        return ()

    def capture(self, report: ReportProgress) -> None:
        """Capture what it runs on a GPU."""
        return

    @abstractmethod
    def _propose(self, plan: Plan) -> Proposals: ...

    def _propose_ahead(self, plan: Plan) -> None:
        return


class NoProposer(Proposer):
    """Plain decoding."""

    def _propose(self, plan: Plan) -> Proposals:
        return Proposals.none(plan)
