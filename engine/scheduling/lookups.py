"""How many looked-up drafts a step has: as many as are worth the rows that verify them."""


class Hits:
    """How often looked-up drafts of one sequence were accepted, the latest the most important."""

    _KEPT = 0.9  # of what was seen, from step to step

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a step, also from one that looked up nothing: bad luck is forgotten."""
        self._accepted = self._KEPT * self._accepted + num_accepted
        self._tried = self._KEPT * self._tried + min(num_drafts, num_accepted + 1)

    def acceptance(self, num_matched: int) -> float:
        """The chance of a draft whose text has agreed with the last `num_matched` tokens.

        Each of those counts as a draft that was accepted (by Laplace's rule of succession).
        """
        return (1 + num_matched + self._accepted) / (2 + num_matched + self._tried)


ROW_COST = 1 / 8  # assumed at first, as a share of a step that has one row a sequence


def worth(num_seqs: int, num_tokens: float = 1.0, row_cost: float = ROW_COST) -> "Worth":
    """Of a step of so many sequences, each of which is expected to get `num_tokens`.

    `row_cost` is that of one more row for each of them, as a share of the step.
    """
    num_seqs = max(1, num_seqs)
    return Worth(num_seqs * num_tokens, row_cost / num_seqs)


class Worth:
    """What a step is expected to bring, and what it costs; grows with the drafts that it takes."""

    def __init__(self, num_tokens: float, row_cost: float) -> None:
        """`num_tokens`: of all sequences, before any draft is looked up. `row_cost`: of another
        row, as a share of the step so far.
        """
        self._num_tokens, self._cost, self._row_cost = num_tokens, 1.0, row_cost

    def take(self, acceptance: float, num_assumed: int, most: int, otherwise: float = 0.0) -> int:
        """How many drafts of a sequence pay: those that raise the step's tokens per time.

        Each is accepted with this chance if those before it are, and if so are `num_assumed` tokens
        on their way. None, if other drafts are expected to bring more (`otherwise`).
        """
        chance, num_tokens, cost = acceptance**num_assumed, self._num_tokens, self._cost
        count, gain = 0, 0.0
        while count < most:
            chance *= acceptance
            if chance * cost <= self._row_cost * num_tokens:
                break
            count, gain = count + 1, gain + chance
            num_tokens, cost = num_tokens + chance, cost + self._row_cost
        if gain < otherwise:
            return 0
        self._num_tokens, self._cost = num_tokens, cost
        return count
