"""How many looked-up drafts a step has: as many as are worth the rows that verify them."""

from collections.abc import Sequence


class Worth:
    """What a step is expected to bring, and what it costs; grows with the drafts that it takes."""

    def __init__(self, num_tokens: float, row_cost: float, any_cost: float = 0.0) -> None:
        """`num_tokens`: of all sequences, before any draft is looked up. `row_cost`: of another
        row, as a share of the step so far; `any_cost` of those that follow together.
        """
        self.num_tokens, self._cost, self._row_cost = num_tokens, 1.0, row_cost
        self._num_without, self._any_cost = num_tokens, any_cost

    @property
    def pays(self) -> bool:
        """Whether all that was taken is worth what it costs together."""
        return self.speedup > 1

    @property
    def speedup(self) -> float:
        """How many times as many tokens in a time as without what was taken."""
        return self.num_tokens / self._num_without / (self._cost + self._any_cost)

    def best(self, chances: Sequence[float]) -> tuple[int, float]:
        """How many drafts of a sequence pay, and how many of them are expected to be accepted.

        Those pay that raise the step's tokens per time. `chances[j]` is that of draft j and all
        before it; it never rises.
        """
        num_tokens, cost = self.num_tokens, self._cost
        count, gain = 0, 0.0
        for chance in chances:
            if chance * cost <= self._row_cost * num_tokens:
                break
            count, gain = count + 1, gain + chance
            num_tokens, cost = num_tokens + chance, cost + self._row_cost
        return count, gain

    def take(self, count: int, gain: float) -> None:
        """The step has these drafts."""
        self.num_tokens += gain
        self._cost += count * self._row_cost
