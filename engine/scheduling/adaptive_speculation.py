"""Chooses k, the number of drafts, by measured cost. k = 0 is one of the choices.

A step with k drafts emits `1 + sum_j P(the first j drafts are accepted)` tokens for each sequence.
How long it takes depends on machine, models and batch. Both are measured while decoding.
The k with the most tokens a second is used, and now and then another one is tried. A new batch size
decodes plainly at first, then with one draft; from then on k is chosen from the costs known so far.
So if no step can be timed, decoding stays plain. On a GPU, a server learns the costs before it is
ready, from dummy sequences (`learning.py`).

If the proposer can see how likely its drafts are to be accepted, each sequence drafts for as long
as this pays: while the chance of the next draft is worth more than its time, at the present number
of tokens a second. Then only one choice is left here: to draft, or not to.
"""

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from math import fsum
from statistics import fmean, median

from .acceptance import Acceptance
from .lookups import ROW_COST, Worth, worth

NUM_TIMES, MIN_TIMES = 9, 4  # for each batch size and k: step times kept, and needed
UNLIKELY = 0.1  # chance below which no draft pays, whatever it costs
NUM_RECENT = 32  # steps that show the present number of tokens a second
MIN_GAIN = 1.02  # another k must promise this much more, so that noise changes nothing
LEAST_ROW_COST = 0.01  # of a row for each sequence, lest noise make rows free
CLOSE = 0.9  # another k that promises at least so much costs next to nothing to try
# Between trials; doubles while no other k is close.
SHORTEST_INTERVAL_STEPS, LONGEST_INTERVAL_STEPS = 48, 256
TRIAL_STEPS = 4
ROWS_KEPT_STEPS = 32  # after so many steps without lookups one more of their costs is forgotten


class AdaptiveSpeculation:
    """Chooses k for a batch, from how long steps of about its size took and what they emitted."""

    def __init__(
        self,
        max_k: int,
        *,
        stops_early: bool = False,
        first_ks: Sequence[int] = (0, 1),
        known: "AdaptiveSpeculation | None" = None,
    ) -> None:
        """`stops_early`: the proposer stops a sequence's drafts at `least_chance`. `first_ks`: what
        a new batch size decodes with, in turn. `known`: takes over the costs that it has learned.
        """
        self._max_k, self._stops_early = max_k, stops_early
        self._first_ks = [k for k in first_ks if k <= max_k]
        self.acceptance = Acceptance(max_k)
        # By batch bucket.
        self._costs: dict[int, _StepCosts] = {} if known is None else known._costs
        for costs in self._costs.values():
            costs.forget_text()
        self._chosen = self._previous_k = 0
        self._interval_steps = self._steps_until_trial = SHORTEST_INTERVAL_STEPS
        self._trial: list[int] = []  # k of the next steps, while another k is tried
        self._tries_more = True
        # Whether the step that was last chosen for teaches what it costs: only without lookups.
        self.is_measuring = False

    def choose(self, num_seqs: int, *, is_timed: bool = True) -> int:
        """k for a step that decodes `num_seqs` sequences.

        `is_timed` is False if the step also computes prompts. Its time is useless then, so this is
        no moment to try another k.
        """
        costs = self._costs_of(num_seqs)
        unknown = self._first_unknown(costs)
        self.is_measuring = is_timed and (unknown is not None or bool(self._trial))
        if unknown is not None:
            return unknown if is_timed else 0
        if self._max_k == 0:
            return 0
        if self.is_measuring:
            return self._trial.pop()
        rates = self._rates(costs)
        self._update_choice(rates)
        self._steps_until_trial -= 1
        if is_timed and self._steps_until_trial < 0:
            self._start_trial(rates)
            self.is_measuring = True
            return self._trial.pop()
        return self._chosen

    def knows(self, num_seqs: int) -> bool:
        """Whether this batch size is no new one."""
        return self._first_unknown(self._costs_of(num_seqs)) is None

    def least_chance(self, num_seqs: int) -> float:
        """The lowest chance that all drafts so far are accepted at which one more pays; above 1:
        never.
        """
        costs = self._costs_of(num_seqs)
        if not (self._stops_early and costs.is_known(0) and costs.is_known(1)):
            return UNLIKELY
        # The next draft is accepted about as often as a first one.
        return costs.tokens_for_a_draft() / self.acceptance.by_position[0]

    def worth(self, num_seqs: int, k: int) -> Worth:
        """What looked-up drafts are compared with: a step with k drafts of a model."""
        costs, num_tokens = self._costs_of(num_seqs), 1 + self.acceptance.expected(k)
        if not costs.is_known(0):
            return worth(num_seqs, num_tokens)
        of_a_row, of_any = ROW_COST * costs.of(0), 0.0
        if costs.knows_rows:
            of_a_row, of_any = costs.of_rows()
        of_a_step = costs.of(k) if costs.is_known(1) else costs.of(0)
        return worth(num_seqs, num_tokens, of_a_row / of_a_step, of_any / of_a_step)

    def observe(
        self,
        k: int | None,
        num_seqs: int,
        wanted: Sequence[int],
        accepted: Sequence[int],
        elapsed_s: float | None,
        num_looked_up: int = 0,
    ) -> None:
        """Learn from a step with `wanted[i]` drafts for sequence i, which accepted `accepted[i]`.

        k is the most drafts of a sequence that left the choice to us: one may get fewer, near its
        end or without room. None: every request named its own, and the time says nothing about our
        choice. k was chosen for `num_seqs` sequences; others in the step have just read their
        prompt. `elapsed_s` is None if the step did more than decode, which makes its time useless.
        `num_looked_up` drafts were from texts, of sequences besides those of `wanted`. A step with
        such drafts shows what their rows cost, if it has no others.
        """
        self.acceptance.observe(wanted, accepted)
        if num_looked_up:
            self._previous_k = 0
            if elapsed_s is not None and not any(wanted):
                num_rows = num_looked_up / max(1, num_seqs)
                self._costs_of(num_seqs).observe_rows(num_rows, elapsed_s)
            return
        self._costs_of(num_seqs).forget_rows()
        if k is None:
            return
        catches_up = k > 0 and self._previous_k == 0  # the draft reads what it missed meanwhile
        self._previous_k = k
        if elapsed_s is not None and not catches_up:
            costs = self._costs_of(num_seqs)
            usual_k = min(self._chosen, 1) if self._stops_early else self._chosen
            costs.observe(k, elapsed_s, sets_pace=k == usual_k)
            costs.recent.append((k, sum(wanted) / len(wanted), 1 + sum(accepted) / len(wanted)))

    def expect_change(self) -> None:
        """Other text begins than before: try soon whether more drafts suit it better."""
        if self._chosen < self._max_k:
            self._tries_more = False  # _start_trial flips it
            self._steps_until_trial = min(self._steps_until_trial, SHORTEST_INTERVAL_STEPS)

    def _first_unknown(self, costs: "_StepCosts") -> int | None:
        return next((k for k in self._first_ks if not costs.is_known(k)), None)

    def _update_choice(self, rates: dict[int, float]) -> None:
        best = max(rates, key=rates.__getitem__)
        if rates[best] > MIN_GAIN * rates[self._chosen]:
            self._chosen = best
            self._interval_steps = SHORTEST_INTERVAL_STEPS

    def _start_trial(self, rates: dict[int, float]) -> None:
        """Try the most promising k above the chosen one; the next time, the best below it."""
        self._tries_more = self._chosen == 0 or (
            self._chosen < self._max_k and not self._tries_more
        )
        above = [k for k in rates if k > self._chosen]
        below = [k for k in rates if k < self._chosen]
        other = max(above if self._tries_more else below, key=rates.__getitem__)
        self._trial = [other] * TRIAL_STEPS
        self._steps_until_trial = self._interval_steps
        if rates[other] < CLOSE * rates[self._chosen]:
            self._interval_steps = min(2 * self._interval_steps, LONGEST_INTERVAL_STEPS)
        if self._chosen == self._max_k:  # steps with fewer drafts teach nothing but their time
            self._steps_until_trial = LONGEST_INTERVAL_STEPS

    def _rates(self, costs: "_StepCosts") -> dict[int, float]:
        """For each k to choose from, the expected tokens of one sequence, divided by the cost of a
        step. Drafts that stop early are taken to be as good as the best k.
        """
        num_tokens = survival = 1.0
        rates = {0: 1 / costs.of(0)}
        for k, acceptance in enumerate(self.acceptance.by_position, 1):
            survival *= acceptance
            num_tokens += survival
            rates[k] = num_tokens / costs.of(k)
        if self._stops_early:
            return {0: rates.pop(0), self._max_k: max(rates.values())}
        return rates

    def _costs_of(self, num_seqs: int) -> "_StepCosts":
        return self._costs.setdefault(_bucket(num_seqs), _StepCosts())


class _StepCosts:
    """What a step costs with each k, for one batch bucket, relative to a common pace.

    A busy machine or a longer context slows down the steps of every k. So the steps with the usual
    k measure the present pace, and the steps that try another k are compared with it.
    """

    def __init__(self) -> None:
        self._pace_s: deque[float] = deque(maxlen=NUM_TIMES)
        self._latest: dict[int, deque[float]] = {}  # by k, relative to the pace
        # Of the last steps: the largest k; drafts and tokens of a sequence, on the average.
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=NUM_RECENT)
        self._warmed: set[int] = set()
        # Steps with looked-up drafts: rows for these, as many a sequence on the average, and cost.
        self._rows: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)
        self._num_without = 0  # steps without any

    @property
    def knows_rows(self) -> bool:
        return len(self._rows) >= MIN_TIMES

    def of_rows(self) -> tuple[float, float]:
        """The cost of another row for each sequence, without the drafting of a model, and of having
        any: the line through the costs of steps with many and with few.
        """
        rows, costs = zip(*self._rows, strict=True)
        num_rows, extra = fmean(rows), max(0.0, fmean(costs) - self.of(0))
        most = max(LEAST_ROW_COST, extra / num_rows)  # if their number costs all
        spread = fsum((each - num_rows) ** 2 for each in rows)
        if spread < len(rows) * (num_rows / 8) ** 2:  # too little to tell the two apart
            return most, 0.0
        line = zip(rows, costs, strict=True)
        slope = fsum((each - num_rows) * cost for each, cost in line) / spread
        slope = min(most, max(LEAST_ROW_COST, slope))
        return slope, max(0.0, extra - slope * num_rows)

    def forget_rows(self) -> None:
        """Called for each step without looked-up drafts: if they were too dear, try them again."""
        self._num_without += 1
        if self._num_without % ROWS_KEPT_STEPS == 0 and self._rows:
            self._rows.popleft()

    def observe_rows(self, num_rows: float, elapsed_s: float) -> None:
        """Learn from a step with so many rows a sequence for looked-up drafts, and no others."""
        if self.is_known(0):
            self._rows.append((num_rows, elapsed_s / median(self._pace_s)))

    def is_known(self, k: int) -> bool:
        return len(self._latest.get(k, ())) >= MIN_TIMES

    def of(self, k: int) -> float:
        """The cost of k; if it is unknown, interpolated from the two nearest known ones."""
        if self.is_known(k):
            return median(self._latest[k])
        known = sorted(other for other in self._latest if self.is_known(other))
        i = min(bisect(known, k), len(known) - 1)
        below, above = known[i - 1], known[i]
        slope = max(0.0, self.of(above) - self.of(below)) / (above - below)
        return self.of(below) + (k - below) * slope

    def forget_text(self) -> None:
        """Of the last steps: as if there had been one, without drafts."""
        self.recent = deque([(0, 0.0, 1.0)], maxlen=NUM_RECENT)

    def tokens_for_a_draft(self) -> float:
        """How many tokens of a sequence the time of one more draft has brought lately."""
        cost_of = {k: self.of(k) for k in {k for k, _, _ in self.recent}}
        cost = sum(cost_of[k] for k, _, _ in self.recent)
        num_drafts = sum(drafts for _, drafts, _ in self.recent)
        num_tokens = sum(tokens for _, _, tokens in self.recent)
        of_drafts = cost - self.of(0) * len(self.recent)
        of_a_draft = of_drafts / num_drafts if num_drafts else self.of(1) - self.of(0)
        return max(0.0, of_a_draft) * num_tokens / cost

    def observe(self, k: int, elapsed_s: float, *, sets_pace: bool) -> None:
        if k not in self._warmed:  # the first step allocates and picks kernels: ignore it
            self._warmed.add(k)
            return
        if not self._pace_s or (sets_pace and self.is_known(k)):
            cost = self.of(k) if self.is_known(k) else 1.0
            self._pace_s.append(elapsed_s / cost)
            if self.is_known(k):
                return
        latest = self._latest.setdefault(k, deque(maxlen=NUM_TIMES))
        latest.append(elapsed_s / median(self._pace_s))


def batch_sizes(most: int) -> list[int]:
    """The batch sizes up to `most` whose costs are learned apart, ascending."""
    return sorted({min(_bucket(num_seqs), most) for num_seqs in range(1, most + 1)})


def _bucket(num_seqs: int) -> int:
    """Group batch sizes: two groups for each doubling; none counts as one."""
    num_seqs = max(1, num_seqs)
    step = 1 << max(0, num_seqs.bit_length() - 2)
    return -(-num_seqs // step) * step


def times_decoding(num_prompt_tokens: int, num_decoding: int) -> bool:
    """Whether a step's time shows how long decoding takes.

    A few prompt tokens hardly add to it; a chunk of a long prompt does.
    """
    return num_prompt_tokens <= 2 * num_decoding
