"""When another k than the usual one is tried, so that little time is lost by it."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

SPENT = 0.01  # of the time, at most
NUM_STEPS = 4  # of a trial
LEAST_LOSS = 0.5  # of a step: what a trial is taken to lose, at least


class Choice(NamedTuple):
    """What a step could do."""

    k: int  # drafts of a sequence that gets the most
    num_drafts: int  # of all sequences
    num_tokens: float  # of all sequences, that it is expected to bring
    cost: float

    @property
    def rate(self) -> float:
        return self.num_tokens / self.cost


class Trials:
    """A trial begins once its expected loss is a small part of the time since the one before."""

    def __init__(self) -> None:
        self._k = self._num_left = 0  # of the trial: its k, and how many steps are to come
        self._credit_s = 0.0  # may be lost
        self._usual_rate = 0.0  # tokens of all sequences for a cost of 1
        self._tries_more = False

    def next(
        self,
        usual: Choice,
        choices: Mapping[int, Choice],
        pace_s: float,
        *,
        may_begin: bool,
        speedup: float = 1.0,
    ) -> Choice | None:
        """What the next step tries; None: nothing. `choices` are by k. Lookups, which no step of a
        trial has, bring `speedup` times as many tokens in a time; inf: nobody knows yet, so nothing
        is tried.
        """
        if self._num_left == 0:  # those of a trial are held against the steps before it
            self._usual_rate = speedup * usual.rate
        if self._k == usual.k or self._k not in choices or speedup == inf:
            self._num_left = 0
        if self._num_left == 0 and may_begin and speedup < inf:
            self._begin(usual, choices, pace_s)
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return choices[self._k]

    def observe(
        self, elapsed_s: float, num_tokens: int, pace_s: float, *, is_trial: bool, late_s: float
    ) -> None:
        """Learn from a step. `late_s` of its time went into reading what the draft had missed."""
        self._credit_s += SPENT * elapsed_s
        if not is_trial or not self._usual_rate:
            return
        gained_s = num_tokens / self._usual_rate * pace_s - (elapsed_s - late_s)
        self._credit_s += min(0.0, gained_s) - late_s

    def _begin(self, usual: Choice, choices: Mapping[int, Choice], pace_s: float) -> None:
        """Try the most promising k above the usual one; the next time, the best below it."""
        above = [choice for k, choice in choices.items() if k > usual.k]
        below = [choice for k, choice in choices.items() if k < usual.k]
        candidates = above if above and (self._tries_more or not below) else below
        other = max(candidates, key=lambda choice: choice.rate)
        lost = NUM_STEPS * (other.cost - other.num_tokens / self._usual_rate)
        if self._credit_s >= max(lost, LEAST_LOSS * usual.cost) * pace_s:
            self._k, self._num_left = other.k, NUM_STEPS
            self._credit_s = 0.0
            self._tries_more = not self._tries_more
