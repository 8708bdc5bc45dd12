"""How much of prompts a step computes beside sequences that decode (`scheduler.max_itl_ms`)."""

FEWEST_ROWS = 16  # a prompt always goes on, even if decoding alone takes longer
GROWTH = 2.0  # at most, from one step to the next: few rows cost hardly more than none
MARGIN = 0.9  # of the time allowed, which steps take on the average


class Chunks:
    """Cuts prompts so that a step takes at most `max_s`, by what steps with prompts took lately.

    It begins with the fewest. If r rows of prompts take t, r * max_s / t are allowed next. Part of
    t does not depend on r, so that it takes a few steps to come to the right number, which stays.
    """

    def __init__(self, max_s: float | None) -> None:
        """None: prompts take all the rows that a step has."""
        self._max_s = max_s
        self._rows = float(FEWEST_ROWS)

    @property
    def most_rows(self) -> int | None:
        """Rows of prompts that a step may have beside others' tokens; None: any number."""
        return None if self._max_s is None else int(self._rows)

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """A step with so many rows of prompts took so long."""
        if self._max_s is None or num_rows == 0:
            return
        ratio = MARGIN * self._max_s / max(elapsed_s, 1e-9)
        # The end of a prompt, which is short, is no reason to allow fewer or more.
        if ratio < 1 or num_rows >= int(self._rows):
            allowed = num_rows * min(GROWTH, ratio)
            self._rows = max(FEWEST_ROWS, min(allowed, self._rows) if ratio < 1 else allowed)
