"""When another k than the usual one is tried, so that little time is lost by it."""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

# Of the time, at most. While some are drafted, how often the first are accepted is seen anyway, and
# later ones are mostly alike.
SPENT, SPENT_DRAFTING = 0.008, 0.002
# Steps of a trial: one shows how often drafts are accepted. The time of the first may contain what
# the draft had missed, so more are needed until a price is known.
SHORT, LONG = 1, 4
LEAST_LOSS = 1 / 8  # of each of its steps: what a trial is taken to lose, at least


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
        self._credit_s, self._spent = 0.0, SPENT  # may be lost; of the time that passes now
        self._usual_rate = 0.0  # tokens of all sequences for a cost of 1
        self._tries_more = False

    def next(
        self,
        usual: Choice,
        choices: Mapping[int, Choice],
        pace_s: float,
        *,
        may_begin: bool,
        has_price: Callable[[Choice], bool] = lambda _: False,
        speedup: float = 1.0,
    ) -> Choice | None:
        """What the next step tries; None: nothing. `choices` are by k. `has_price`: such steps were
        timed. Lookups, which no step of a trial has, bring `speedup` times as many tokens in a
        time; inf: nobody knows yet, so nothing is tried.
        """
        if self._num_left == 0:  # those of a trial are held against the steps before it
            self._usual_rate = speedup * usual.rate
            self._spent = SPENT_DRAFTING if usual.k else SPENT
        if self._k == usual.k or self._k not in choices or speedup == inf:
            self._num_left = 0
        if self._num_left == 0 and may_begin and speedup < inf:
            self._begin(usual, choices, pace_s, has_price)
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return choices[self._k]

    def observe(
        self, elapsed_s: float, num_tokens: int, pace_s: float, *, is_trial: bool, late_s: float
    ) -> None:
        """Learn from a step. `late_s` of its time went into reading what the draft had missed."""
        self._credit_s += self._spent * elapsed_s
        if not is_trial or not self._usual_rate:
            return
        gained_s = num_tokens / self._usual_rate * pace_s - (elapsed_s - late_s)
        self._credit_s += min(0.0, gained_s) - late_s

    def _begin(
        self,
        usual: Choice,
        choices: Mapping[int, Choice],
        pace_s: float,
        has_price: Callable[[Choice], bool],
    ) -> None:
        """Try the most promising k above the usual one. Fewer drafts than usual would only show
        what a step costs: so a k below is tried, in turns with those above, if it has no price.
        """
        least = LEAST_LOSS * usual.cost
        if self._credit_s < least * pace_s:
            return
        above = [choice for k, choice in choices.items() if k > usual.k]
        below = [choice for k, choice in choices.items() if k < usual.k and not has_price(choice)]
        candidates = above if above and (self._tries_more or not below) else below
        if not candidates:
            return
        other = max(candidates, key=lambda choice: choice.rate)
        num_steps = SHORT if has_price(other) else LONG
        lost = max(other.cost - other.num_tokens / self._usual_rate, least)
        if self._credit_s >= num_steps * lost * pace_s:
            self._k, self._num_left = other.k, num_steps
            self._credit_s = 0.0
            self._tries_more = not self._tries_more
