"""What a proposer is: something that runs ahead of the target and says what it thinks will come."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.engine.scheduler import Plan

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftDistributions:
    """What drafts were drawn from, as verification needs it; rows from k_i on are undefined."""

    # [B, K, V'] raw, in the head's dtype
    logits: Tensor
    # [B, K, 4] row states of the draft sampler
    state: Tensor


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
    """

    def propose(self, plan: Plan) -> Proposals:
        """Draft for the plan. A proposer that fails costs nobody more than its drafts."""
        try:
            return self._propose(plan)
        except Exception:
            log.exception("drafting failed; this step decodes plainly")
            return Proposals.none(plan)

    @abstractmethod
    def _propose(self, plan: Plan) -> Proposals: ...


class NoProposer(Proposer):
    """Plain decoding."""

    def _propose(self, plan: Plan) -> Proposals:
        return Proposals.none(plan)
