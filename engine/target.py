"""The target model's part of a step: score every proposal in one forward pass."""

from functools import partial

import numpy as np
from torch import Tensor

from outrider.engine.api import ReportProgress
from outrider.engine.batch import HostBatch
from outrider.engine.paged_model import PagedModel
from outrider.engine.plan import Plan, slots_of
from outrider.engine.prompt_logprobs import read_prompt_logprobs
from outrider.engine.proposers.base import Proposals


class Target:
    """Prefill chunks, plain decodes and verifications of a plan, as one ragged batch."""

    def __init__(self, model: PagedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def capture(self, num_speculative_tokens: int, report: ReportProgress) -> Tensor:
        """Capture plain decodes and verifications of every k; returns logits as they will come."""
        rows_per_seq = tuple(range(1, num_speculative_tokens + 2))
        stage = "capturing the target's graphs"
        return self._model.capture(rows_per_seq, True, partial(report, stage))

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
        batch = HostBatch.build(slots_of(plan.scheduled), starts_np, query_lens_np, num_logits_np)
        logits = self._model.forward(batch)
        if scores_prompts:
            logits = read_prompt_logprobs(plan, logits, num_logits_np, self._vocab_size)
        return logits
