"""How many drafts of a sequence were accepted, step by step."""

from collections import Counter
from collections.abc import Sequence

from outrider.engine.api import RequestOutput

from .protocol import SpeculationMetrics


class AcceptanceCounts:
    """Counts for one sequence, from the totals in its outputs."""

    def __init__(self) -> None:
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        # Of the drafts from the request's prediction:
        self.num_predicted_accepted = self.num_predicted_rejected = 0
        self.steps_by_accepted: Counter[int] = Counter()

    def observe(self, output: RequestOutput) -> None:
        """Count the drafts of one step, from the totals in its output."""
        if output.num_draft_tokens > self.num_draft_tokens:
            num_drafts = output.num_draft_tokens - self.num_draft_tokens
            num_accepted = output.num_accepted_tokens - self.num_accepted_tokens
            if output.source == "prediction":
                self.num_predicted_accepted += num_accepted
                self.num_predicted_rejected += num_drafts - num_accepted
            self.steps_by_accepted[num_accepted] += 1
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_tokens = output.num_accepted_tokens


def speculation_metrics(
    each: Sequence[AcceptanceCounts], num_speculative_tokens: int
) -> SpeculationMetrics:
    """How the drafts of these sequences fared, in vLLM's terms; zeros if there were none, and a
    length of 1, as of plain decoding.
    """
    steps_by_accepted = sum((one.steps_by_accepted for one in each), Counter[int]())
    num_steps = steps_by_accepted.total()
    num_drafted = sum(one.num_draft_tokens for one in each)
    num_accepted = sum(one.num_accepted_tokens for one in each)
    return SpeculationMetrics(
        mean_acceptance_length=1 + num_accepted / max(1, num_steps),
        draft_acceptance_rate=num_accepted / max(1, num_drafted),
        acceptance_histogram=[steps_by_accepted[j] for j in range(num_speculative_tokens + 1)],
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=num_speculative_tokens,
    )
