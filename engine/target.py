"""The target model's part of a step: score every proposal in one forward pass."""

import numpy as np
from torch import Tensor

from outrider.engine.batch import ForwardBatch
from outrider.engine.paged_model import PagedModel
from outrider.engine.prompt_logprobs import read_prompt_logprobs
from outrider.engine.proposers.base import Proposals
from outrider.engine.scheduler import Plan, slots_of
from outrider.engine.slots import Slots


class Target:
    """Prefill chunks, plain decodes and verifications of a plan, as one ragged batch."""

    def __init__(self, model: PagedModel, slots: Slots, vocab_size: int) -> None:
        self._model = model
        self._slots = slots
        self._vocab_size = vocab_size

    def score(self, plan: Plan, proposals: Proposals) -> Tensor:
        """Logits of the k_i + 1 last rows of each sampled sequence: [sum(k_i + 1), V].

        The plan's sequences get the logprobs of the prompt tokens that it scores.
        """
        starts_np = np.array([s.request.num_computed_tokens for s in plan.scheduled])
        query_lens_np = np.array([s.num_new_tokens for s in plan.scheduled])
        samples_np = np.array([s.samples for s in plan.scheduled])
        num_logits_np = np.array([s.num_prompt_logits for s in plan.scheduled])
        scores_prompts = num_logits_np.any()
        query_lens_np[samples_np] += proposals.num_drafts_np
        num_logits_np[samples_np] += proposals.num_drafts_np + 1
        batch = ForwardBatch.build(
            self._slots, slots_of(plan.scheduled), starts_np, query_lens_np, num_logits_np
        )
        logits = self._model.forward(batch)
        if scores_prompts:
            logits = read_prompt_logprobs(plan, logits, num_logits_np, self._vocab_size)
        return logits
