"""How many drafts pay: k by measured cost, 0 among the choices.

A step with k drafts emits `1 + sum_j P(the first j drafts stand)` tokens a sequence, and takes a
time that depends on the machine, the models and the batch. Both are measured while decoding; the k
that gave the most tokens a second is used, and now and then another one is tried.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

ACCEPTANCE_WEIGHT = 1 / 48  # of one step in the running acceptance
NUM_TIMES, MIN_TIMES = 7, 2  # latest steps of a batch size and k: those kept, those needed
MIN_GAIN = 1.02  # what another k must promise, so that noise alone moves nothing
SHORTEST_INTERVAL_STEPS, LONGEST_INTERVAL_STEPS = 32, 256  # between trials; doubles while k stays
TRIAL_STEPS = 6


class AdaptiveSpeculation:
    """Chooses k for a batch from what steps of about its size took, and from what they emitted."""

    def __init__(self, max_k: int) -> None:
        self._max_k = max_k
        # [max_k] P(draft j stands | those before it stood)
        self._acceptance = [0.7] * max_k
        self._times: dict[tuple[int, int], _StepTime] = {}  # by (batch bucket, k)
        self._chosen = max_k
        self._previous_k = max_k
        self._interval_steps = self._steps_until_trial = SHORTEST_INTERVAL_STEPS
        self._trial: list[int] = []  # k of the next steps, while another k is tried
        self._tries_more = True

    def choose(self, num_seqs: int) -> int:
        """k for a step that decodes `num_seqs` sequences."""
        bucket = _bucket(num_seqs)
        # From the top down: no step has a gap to catch up with.
        for k in range(self._max_k, -1, -1):
            if not self._time(bucket, k).is_known:
                return k
        if not self._trial:
            self._update_choice(bucket)
            if self._steps_until_trial > 0:
                self._steps_until_trial -= 1
                return self._chosen
            self._start_trial(bucket)
        return self._trial.pop()

    def observe(
        self, wanted: Sequence[int], accepted: Sequence[int], elapsed_s: float | None
    ) -> None:
        """A step drafted up to `wanted[i]` tokens for sequence i, and so many of them stood.

        `elapsed_s` is None where the step did more than decode, so that its time says nothing.
        """
        for j in range(max(wanted)):
            reached = [a for w, a in zip(wanted, accepted, strict=True) if j < w and j <= a]
            if reached:
                share = sum(a > j for a in reached) / len(reached)
                self._acceptance[j] += ACCEPTANCE_WEIGHT * (share - self._acceptance[j])
        k = wanted[0]
        catches_up = k > 0 and self._previous_k == 0  # the draft reads what it missed meanwhile
        self._previous_k = k
        if elapsed_s is not None and not catches_up and all(w == k for w in wanted):
            self._time(_bucket(len(wanted)), k).observe(elapsed_s)

    def expect_change(self) -> None:
        """Other text comes than before: look soon whether another k suits it better."""
        self._interval_steps = SHORTEST_INTERVAL_STEPS
        self._steps_until_trial = min(self._steps_until_trial, SHORTEST_INTERVAL_STEPS)

    def _update_choice(self, bucket: int) -> None:
        best = max(range(self._max_k + 1), key=lambda k: self._rate(bucket, k))
        if self._rate(bucket, best) > MIN_GAIN * self._rate(bucket, self._chosen):
            self._chosen = best
            self._interval_steps = SHORTEST_INTERVAL_STEPS

    def _start_trial(self, bucket: int) -> None:
        """Try the other k that promises most on one side of the chosen one, in turn."""
        self._tries_more = self._chosen == 0 or (
            self._chosen < self._max_k and not self._tries_more
        )
        others = (
            range(self._chosen + 1, self._max_k + 1) if self._tries_more else range(self._chosen)
        )
        self._trial = [max(others, key=lambda k: self._rate(bucket, k))] * TRIAL_STEPS
        self._steps_until_trial = self._interval_steps
        self._interval_steps = min(2 * self._interval_steps, LONGEST_INTERVAL_STEPS)

    def _rate(self, bucket: int, k: int) -> float:
        """Tokens a second of one sequence."""
        num_tokens = survival = 1.0
        for j in range(k):
            survival *= self._acceptance[j]
            num_tokens += survival
        return num_tokens / self._time(bucket, k).typical_s

    def _time(self, bucket: int, k: int) -> "_StepTime":
        return self._times.setdefault((bucket, k), _StepTime())


class _StepTime:
    """What a step took lately, for one batch bucket and k; a step held up does not show."""

    def __init__(self) -> None:
        self._latest_s: deque[float] = deque(maxlen=NUM_TIMES)
        self._warmed = False
        self.typical_s = 0.0

    @property
    def is_known(self) -> bool:
        return len(self._latest_s) >= MIN_TIMES

    def observe(self, elapsed_s: float) -> None:
        if self._warmed:
            self._latest_s.append(elapsed_s)
            self.typical_s = median(self._latest_s)
        self._warmed = True  # the first step allocates and chooses kernels: not counted


def _bucket(num_seqs: int) -> int:
    """Batch sizes that count as one: two to the octave."""
    step = 1 << max(0, num_seqs.bit_length() - 2)
    return -(-num_seqs // step) * step
