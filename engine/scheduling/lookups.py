"""How many looked-up drafts a step has: as many as are worth the rows that verify them."""

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
