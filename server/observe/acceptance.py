"""How many drafts of a sequence were accepted, step by step."""

from collections import Counter

from outrider.engine.api import RequestOutput

from ..api.protocol import SpeculationMetrics


class Acceptance:
    """Counts for one sequence, from the totals in its outputs."""

    def __init__(self) -> None:
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        # Of the drafts from the request's prediction:
        self.num_predicted_accepted = self.num_predicted_rejected = 0
        self._steps_by_accepted: Counter[int] = Counter()

    def observe(self, output: RequestOutput) -> None:
        """Take in one step."""
        if output.num_draft_tokens > self.num_draft_tokens:
            num_drafts = output.num_draft_tokens - self.num_draft_tokens
            num_accepted = output.num_accepted_tokens - self.num_accepted_tokens
            if output.is_predicted:
                self.num_predicted_accepted += num_accepted
                self.num_predicted_rejected += num_drafts - num_accepted
            self._steps_by_accepted[num_accepted] += 1
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_tokens = output.num_accepted_tokens

    def metrics(self, num_speculative_tokens: int) -> SpeculationMetrics | None:
        """The metrics in vLLM's terms; None if nothing was drafted."""
        if not (num_steps := self._steps_by_accepted.total()):
            return None
        return SpeculationMetrics(
            mean_acceptance_length=1 + self.num_accepted_tokens / num_steps,
            draft_acceptance_rate=self.num_accepted_tokens / self.num_draft_tokens,
            acceptance_histogram=[
                self._steps_by_accepted[j] for j in range(num_speculative_tokens + 1)
            ],
            num_spec_steps=num_steps,
            num_accepted_draft_tokens=self.num_accepted_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_spec_tokens=num_speculative_tokens,
        )
