"""What a step costs, by its sequences, its rows and its drafts: learnt from steps that were timed.

    cost = rows(sequences, rows) + drafts * drafting(sequences)

`rows` is what the target takes, and all that a step takes besides; `drafting` is what the draft
takes for one more draft of every sequence. Both are relative to a common pace: a busy machine or a
longer context slows steps of every kind down. So steps as they usually are measure the pace, and
others are compared with it. So are usual ones of another size than set the pace: what was measured
while a machine was busy is mended so.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

# Times are medians: one step that was held up would make drafts look so dear that none is made, and
# then nothing would show what they cost.
NUM_TIMES, MIN_TIMES = 9, 3  # of steps with as many sequences and rows: times kept, and needed
ROW_COST = 1 / 8  # of a step with one row a sequence: what one more for each costs, until known
DRAFT_COST = 1 / 8  # likewise, what a draft of each costs
FEW = 3  # rows over which the cost of one is averaged, so that noise does not make it free
EXTRA_WEIGHT, EXTRA_KEPT = 1 / 4, 0.98  # of the latest step with lookups; after one without

StepSize = tuple[int, float]  # (sequences, rows of each), as steps are counted
Points = list[tuple[float, float]]  # (rows, cost), ascending in both
Padding = Callable[[int, int], tuple[int, int]]  # (sequences, rows) -> those that are computed


class Price:
    """The cost of steps, relative to one of the first.

    Between known numbers of rows it is interpolated. Beyond them, and for numbers of sequences that
    were never seen, it grows as it does for other sequences with as many rows. It never falls with
    the rows.
    """

    def __init__(self, padding: Padding = lambda num_seqs, num_rows: (num_seqs, num_rows)) -> None:
        """`padding`: the rows that a step takes the time of, which are more if it is captured."""
        self.padding = padding
        # (sequences, rows of each) -> costs of the latest such steps
        self._times: dict[tuple[int, float], deque[float]] = {}
        self._known: dict[int, Points] = {}  # sequences -> (rows of each, cost)
        self._whatever_seqs: Points | None = None  # (rows, cost); None: to be made anew
        self._draft_times: dict[int, deque[float]] = {}  # by sequences: costs of the latest drafts
        self._drafting: dict[int, float] = {}  # their medians
        # Of the latest usual steps: what they are counted as, and seconds for a cost of 1.
        self._paces: deque[tuple[StepSize, float]] = deque(maxlen=NUM_TIMES)
        self.pace_s = 0.0  # their median: seconds of a step that costs 1
        # What a step with looked-up drafts costs besides their rows, however few they are.
        self.of_lookups = 0.0

    def knows(self, num_seqs: int, num_rows: int | None = None) -> bool:
        """Whether steps of about this size were timed; None: with any number of rows."""
        if num_rows is None:
            return self._place(num_seqs, num_seqs)[0] in self._known
        return self._is_known(*self._place(num_seqs, num_rows))

    @property
    def is_empty(self) -> bool:
        """Whether steps of no size are known."""
        return not self._known

    def of(self, num_seqs: int, num_rows: int, num_drafts: float = 0.0) -> float:
        """The cost of a step; `num_drafts` are drawn for each of its sequences."""
        cost = num_drafts * self.of_a_draft(num_seqs) if num_drafts else 0.0
        num_seqs, num_rows = self.padding(num_seqs, num_rows)
        below, above, rows_each = *_buckets(num_seqs), num_rows / num_seqs
        of_above = self._cost_of_rows(above, rows_each)
        if below == above:
            return cost + of_above
        of_below = self._cost_of_rows(below, rows_each)
        return cost + of_below + (num_seqs - below) / (above - below) * (of_above - of_below)

    def of_a_row(self, num_seqs: int, num_rows: int) -> float:
        """What another row costs, beside so many, on the average of a few for each sequence."""
        seqs, rows_each = _bucket(num_seqs), num_rows / num_seqs
        more = self._cost_of_rows(seqs, rows_each + FEW) - self._cost_of_rows(seqs, rows_each)
        return more / (FEW * num_seqs)

    def of_a_draft(self, num_seqs: int) -> float:
        """What it costs to draw one more draft for each of so many sequences, without their rows.

        If it is unknown, it grows as a step does whose sequences have one row each.
        """
        seqs, _ = self._place(num_seqs, num_seqs)
        if seqs in self._drafting:
            return self._drafting[seqs]
        of_one_row = self._cost_of_rows(seqs, 1)
        if not self._drafting:
            return DRAFT_COST * of_one_row
        nearest = min(self._drafting, key=lambda other: max(other, seqs) / min(other, seqs))
        return self._drafting[nearest] * of_one_row / self._cost_of_rows(nearest, 1)

    @property
    def knows_drafting(self) -> bool:
        return bool(self._drafting)

    def observe(
        self,
        num_seqs: int,
        num_rows: int,
        num_drafts: float,
        elapsed_s: float | None,
        drafting_s: float = 0.0,
        *,
        is_usual: bool = True,
        looks_up: bool = False,
    ) -> None:
        """Learn from a step that took `elapsed_s`, of which drafting took `drafting_s`.

        `elapsed_s` is None if the step did more than decode. One that took no longer than its
        drafting says nothing: the host read the step before it late. Steps that are usual set the
        pace, once their cost is known.
        """
        if num_drafts and self.pace_s:
            seqs, _ = self._place(num_seqs, num_seqs)
            self._observe_drafting(seqs, drafting_s / num_drafts / self.pace_s)
        rows_s = 0.0 if elapsed_s is None else elapsed_s - drafting_s
        if rows_s <= 0.0:
            return
        if looks_up:
            if self.pace_s:
                extra = max(0.0, rows_s / self.pace_s - self.of(num_seqs, num_rows))
                self.of_lookups += EXTRA_WEIGHT * (extra - self.of_lookups)
            return
        self.of_lookups *= EXTRA_KEPT  # if they were too dear, try them again
        place, pace_s = self._place(num_seqs, num_rows), self.pace_s or rows_s
        sets_pace = is_usual and self._is_known(*place)
        if sets_pace or not self.pace_s:
            self._paces.append(
                (place, rows_s / (self.of(num_seqs, num_rows) if sets_pace else 1.0))
            )
            self.pace_s = median([pace_s for _, pace_s in self._paces])
        if not sets_pace or sum([other != place for other, _ in self._paces]) > NUM_TIMES // 2:
            cost = rows_s / pace_s
            if self._known:  # as much as a step of exactly that size would have cost
                cost *= self._cost_of_rows(*place) / self.of(num_seqs, num_rows)
            self._observe_rows(*place, cost)

    def _observe_drafting(self, seqs: int, cost: float) -> None:
        times = self._draft_times.setdefault(seqs, deque(maxlen=NUM_TIMES))
        times.append(cost)
        self._drafting[seqs] = median(times)

    def _observe_rows(self, seqs: int, rows_each: float, cost: float) -> None:
        times = self._times.setdefault((seqs, rows_each), deque(maxlen=NUM_TIMES))
        times.append(cost)
        if len(times) >= MIN_TIMES:
            at_seqs = {rows: times for (s, rows), times in self._times.items() if s == seqs}
            self._known[seqs] = _rising((r, t) for r, t in at_seqs.items() if len(t) >= MIN_TIMES)
            self._whatever_seqs = None

    @property
    def _by_rows(self) -> Points:
        """Whatever the sequences. Many points, which few steps ask for: not made in each."""
        if self._whatever_seqs is None:
            self._whatever_seqs = _rising(
                (seqs * rows, times)
                for (seqs, rows), times in self._times.items()
                if len(times) >= MIN_TIMES
            )
        return self._whatever_seqs

    def _place(self, num_seqs: int, num_rows: int) -> StepSize:
        """What steps of this size are counted as: sequences, and rows of each."""
        num_seqs, num_rows = self.padding(num_seqs, num_rows)
        rows_each = num_rows / num_seqs
        return _bucket(num_seqs), round(2 * rows_each) / 2 if rows_each < 8 else round(rows_each)

    def _is_known(self, seqs: int, rows_each: float) -> bool:
        return any(rows == rows_each for rows, _ in self._known.get(seqs, ()))

    def _cost_of_rows(self, seqs: int, rows_each: float) -> float:
        known = self._known.get(seqs)
        if not known:
            return _at(self._by_rows, seqs * rows_each)
        (first, cost_of_first), (last, cost_of_last) = known[0], known[-1]
        if first <= rows_each <= last:
            return _at(known, rows_each)
        if rows_each < first:
            return cost_of_first
        more = _at(self._by_rows, seqs * rows_each) - _at(self._by_rows, seqs * last)
        return cost_of_last + max(0.0, more)


def _rising(points: Iterable[tuple[float, Iterable[float]]]) -> Points:
    """The medians, in the order of rows. Where one is below that of fewer rows, the times of both
    are pooled: to take the larger one would make rows dear wherever a few steps were slow.
    """
    pools: list[tuple[list[float], list[float]]] = []  # rows that cost the same, and their times
    for rows, times in sorted(points, key=lambda point: point[0]):
        pool = [rows], [*times]
        while pools and median(pools[-1][1]) > median(pool[1]):
            more_rows, more_times = pools.pop()
            pool = more_rows + pool[0], more_times + pool[1]
        pools.append(pool)
    return [(rows, median(times)) for all_rows, times in pools for rows in all_rows]


def _at(points: Points, rows: float) -> float:
    """Interpolated; beyond the points as they rise from half of the most rows on, since cost rises
    by steps, or as assumed if there is only one.
    """
    if not points:
        return 1.0 + ROW_COST * (rows - 1)
    i = min(max(1, bisect(points, rows, key=lambda point: point[0])), len(points) - 1)
    (below, cost_below), (above, cost_above) = points[i - 1], points[i]
    if rows > above:
        half = bisect(points, above / 2, key=lambda point: point[0])
        below, cost_below = points[min(max(0, half - 1), i - 1)]
    if len(points) == 1 or above == below:
        return cost_above * max(1.0, 1.0 + ROW_COST * (rows / above - 1))
    share = max(0.0, (rows - below) / (above - below))
    return cost_below + share * (cost_above - cost_below)


def _bucket(num_seqs: int) -> int:
    """Group batch sizes: two groups for each doubling; none counts as one."""
    return _buckets(num_seqs)[1]


def _buckets(num_seqs: int) -> tuple[int, int]:
    """The largest group's size that is no larger, and the smallest one that is no smaller."""
    num_seqs = max(1, num_seqs)
    step = 1 << max(0, num_seqs.bit_length() - 2)
    return num_seqs // step * step, -(-num_seqs // step) * step
