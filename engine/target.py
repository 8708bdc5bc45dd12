"""The target model's part of a step: score every proposal in one forward pass."""

import numpy as np
from torch import Tensor

from outrider.engine.batch import ForwardBatch
from outrider.engine.paged_model import PagedModel
from outrider.engine.proposers.base import Proposals
from outrider.engine.scheduler import Plan, slots_of
from outrider.engine.slots import Slots


class Target:
    """Prefill chunks, plain decodes and verifications of a plan, as one ragged batch."""

    def __init__(self, model: PagedModel, slots: Slots) -> None:
        self._model = model
        self._slots = slots

    def score(self, plan: Plan, proposals: Proposals) -> Tensor:
        """Logits of the k_i + 1 last rows of each sampled sequence: [sum(k_i + 1), V]."""
        starts_np = np.array([s.request.num_computed_tokens for s in plan.scheduled])
        query_lens_np = np.array([s.num_new_tokens for s in plan.scheduled])
        samples_np = np.array([s.samples for s in plan.scheduled])
        num_logits_np = np.zeros_like(query_lens_np)
        query_lens_np[samples_np] += proposals.num_drafts_np
        num_logits_np[samples_np] = proposals.num_drafts_np + 1
        batch = ForwardBatch.build(
            self._slots, slots_of(plan.scheduled), starts_np, query_lens_np, num_logits_np
        )
        return self._model.forward(batch)
