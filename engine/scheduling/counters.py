"""Counters for the engine's statistics."""


class Counters:
    """Totals since the engine started."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0
        # [k] how often a draft at each position was proposed, and accepted
        self.drafted_per_position = [0] * num_speculative_tokens
        self.accepted_per_position = [0] * num_speculative_tokens

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        for j in range(num_drafts):
            self.drafted_per_position[j] += 1
        for j in range(num_accepted):
            self.accepted_per_position[j] += 1
