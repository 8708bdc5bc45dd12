"""The target's pass over a step: it scores every draft at once."""

import torch

from ..api import MAX_LOGPROBS
from ..models.network import Network, Pass
from ..plan import MAX_PROMPT_LOGITS, Plan
from ..state.batch import HostBatch
from .logprobs import gather, score_prompts


class Scorer:
    """Runs the prefill chunks, plain decodes and verifications of a plan as one ragged batch."""

    def __init__(self, target: Network, vocab_size: int) -> None:
        self._target = target
        self._vocab_size = vocab_size

    def rehearse(self, num_rows: int, num_logits: int) -> Pass:
        """Score `num_rows` dummy rows, with as many prompt logprobs as a step may have; what it
        returns has `num_logits` rows of logits.
        """
        num_prompt = max(0, min(MAX_PROMPT_LOGITS, num_rows - num_logits))
        if 1 < num_rows == num_prompt + num_logits:
            # With one fewer, rows with logits are gathered in front of the last MLP.
            self._target.rehearse(num_rows, num_rows - 1)
        scored = self._target.rehearse(num_rows, num_prompt + num_logits)
        # Two at least: where verification may read all rows, few of a step still score its prompt.
        rows = scored.logits[: max(2, num_prompt), : self._vocab_size]
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        num_top = min(MAX_LOGPROBS, self._vocab_size)
        for part in (rows[:1], rows[1:]):  # the second may not start at 16 bytes
            gather(part, token_ids[: len(part)], num_top)
        return scored._replace(logits=scored.logits[:num_logits])

    def score(self, plan: Plan) -> Pass:
        """A pass with logits of the last k_i + 1 rows of each emitting sequence: [sum(k_i + 1), V].

        Also starts copying to the host the prompt logprobs that this step scores.
        """
        scheduled, chosen = plan.scheduled, plan.chosen
        batch = HostBatch.build(
            [s.slot for s in scheduled],
            [s.start for s in scheduled],
            [s.num_new_tokens + s.num_drafts for s in scheduled],
            [s.num_prompt_logits + (s.num_drafts + 1 if s.emits else 0) for s in scheduled],
            None if chosen is None else chosen.counts,
            0 if chosen is None else chosen.num_drafts,
        )
        scored = self._target.forward(batch)
        if plan.num_prompt_logits:
            num_logits_np = batch.sequences_np[3].copy()
            if chosen is not None:  # behind all rows that score prompts
                num_logits_np[-1] += chosen.num_drafts
            logits = score_prompts(plan, scored.logits, num_logits_np, self._vocab_size)
            return scored._replace(logits=logits)
        return scored
