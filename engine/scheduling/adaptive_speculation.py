"""Chooses how many drafts each sequence gets, by what steps cost. None is one of the choices.

A step with k drafts of a sequence emits `1 + sum_j P(its first j drafts are accepted)` tokens of
it. How often drafts are accepted is seen while decoding, of all sequences and of each; what a step
costs is known from others (`price.py`). On a GPU, a server learns this before it is ready
(`learning.py`). Where a step with as many sequences was never timed, nothing is drafted, so that it
is; if prompts keep it from being timed, prices of other sizes serve.

For each k, the likeliest drafts of the whole batch get rows, as many as pay. The k with the most
tokens a second is used. Now and then another is tried, for which at most a small part of the time
is spent: so a draft that is no good costs next to nothing.

Where drafts are ranked, as on a GPU, all are made, and the device finds the likeliest, by how sure
the draft was (`rank.py`). While none is left out, it does so only in a step whose choices are
compared, to see how sure they are. Else they are found beforehand, by what was accepted of each
sequence.

All of this follows from steps that have ended, so nothing depends on the drafts that it is for, and
every rule of verification stays exact.

If the proposer can see how likely its drafts are to be accepted, each sequence drafts for as long
as this pays: while the chance of the next draft is worth more than its time. Then only one choice
is left here for a sequence: to draft, or not to.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from outrider.kernels.verify.rank import SURE

from ..acceptance import Acceptance, Calibration, OwnAcceptance
from ..plan import RowBudget
from .lookups import Worth
from .price import Price
from .trials import Choice, Trials

UNLIKELY = 0.1  # no draft pays below such a chance
MIN_GAIN = 1.02  # another k must promise this much more, so that noise changes nothing
LEAST_CUT = 1.03  # likewise, to leave some out: more than any k with all of its drafts
MOST_LEFT_OUT = 8  # of the looked-up drafts of a sequence, to have fewer rows
ALIKE = 1.25  # sequences whose chances differ by less have the same number of drafts
PARTS = (0.25, 0.5, 0.75)  # of all drafts that could be made: these are compared with all
# Choices are compared again after so many steps, for it takes a part of a small model's step. One
# with drafts, which teaches more, counts as several. Until then batches are alike that differ in
# their sequences by this share.
NUM_STEPS_ALIKE, WITH_DRAFTS = 32, 4
SHARE_ALIKE = 1 / 16


class _Batch(NamedTuple):
    """A step without the drafts that are to be chosen."""

    num_seqs: int
    num_rows: int
    named: tuple[int, ...]  # drafts of sequences that named a k
    num_open: int  # sequences that leave k open

    def is_like(self, other: "_Batch | None") -> bool:
        if other is None or self.named != other.named:
            return False
        pairs = ((self.num_seqs, other.num_seqs), (self.num_open, other.num_open))
        return all(abs(here - there) <= SHARE_ALIKE * there for here, there in pairs)


class AdaptiveSpeculation:
    """Chooses the drafts of a step, from the price of steps and how often drafts are accepted."""

    def __init__(
        self,
        max_k: int,
        *,
        stops_early: bool = False,
        ranks: bool = False,
        falls_behind: bool = True,
        price: Price | None = None,
    ) -> None:
        """`stops_early`: the proposer stops a sequence's drafts at `least_chance`. `ranks`: which
        drafts are verified can be chosen once they are made. `falls_behind`: before it drafts, the
        proposer must read what steps without drafts had; a head has read it with the target.
        """
        self._max_k, self._stops_early, self._ranks = max_k, stops_early, ranks
        self._falls_behind = falls_behind
        self.price = Price() if price is None else price
        self._prices: dict[int, Price] = {}  # by the number of threads
        self.acceptance, self.calibration = Acceptance(max_k), Calibration()
        # [N, depth] of the last ranked step that was read: how many times as likely each draft was
        # as the others of its position, by its odds. Steps without drafts make it no less true.
        self._spread_np: np.ndarray | None = None
        # How many drafts of the chosen step are verified; None: those that are made.
        self.budget: RowBudget | None = None
        self._trials = Trials()
        self.k = 0  # in the step that was chosen for: of a sequence that joins it
        self._usual_k = 0
        self._num_drafts_before = 0  # of a sequence, at most, in the step that was observed last
        self._best_rate = 0.0  # tokens of all sequences for a cost of 1
        self._batch: _Batch | None = None  # for which choices were compared last
        self._compared: dict[int, Choice] = {}  # the best of each k
        self._age = 0  # steps since then
        # Whether the step that was last chosen for shows what it costs: only without lookups.
        self.is_measuring = False
        self.is_trial = False  # whether it tries another k than the usual one

    def use_threads(self, num_threads: int) -> None:
        """Steps observed next had so many threads of a CPU; with others they cost otherwise."""
        if num_threads not in self._prices:
            self._prices[num_threads] = Price(self.price.padding) if self._prices else self.price
        if self._prices[num_threads] is not self.price:
            self.price, self._batch = self._prices[num_threads], None

    def choose(
        self,
        num_seqs: int,
        owns: Sequence[OwnAcceptance],
        named: Sequence[int] = (),
        *,
        num_prompt_rows: int = 0,
        speedup: float = 1.0,
    ) -> list[int]:
        """k of each sequence that leaves it open, in a step that decodes `num_seqs` in all.

        `owns` are theirs. Others have `named` a k, or get no drafts. The step
        also computes `num_prompt_rows`. If these are many, its time says little, so this is no
        moment to try anything. `speedup` is what lookups bring, as in Trials.
        """
        is_timed = times_decoding(num_prompt_rows, num_seqs)
        self.is_trial = self.is_measuring = False
        self.budget = None
        if num_seqs > 0 and not self.price.knows(num_seqs) and (is_timed or self.price.is_empty):
            self.k, self.is_measuring = 0, is_timed
            return [0] * len(owns)
        if not owns or self._max_k == 0:
            self.k = self._usual_k
            return [0] * len(owns)
        batch = _Batch(num_seqs, num_seqs + sum(named), tuple(named), len(owns))
        choices = self._choices(batch, owns)
        best = max(choices.values(), key=attrgetter("rate"))
        if best.rate > MIN_GAIN * choices[self._usual_k].rate:
            self._usual_k = best.k
        choice, self._best_rate = choices[self._usual_k], best.rate
        tried = self._trials.next(
            choice,
            choices,
            self.price.pace_s,
            may_begin=is_timed,
            has_price=lambda tried: self.price.knows(num_seqs, batch.num_rows + tried.num_drafts),
            speedup=speedup,
        )
        self.is_trial = self.is_measuring = tried is not None
        choice = tried or choice
        ks = {choice.k}
        if num_prompt_rows and not self.is_trial:
            # What a draft has missed has no price: so it reads no more often than it would anyway.
            ks = set(range(self._max_k + 1))
            if self._falls_behind and (choice.k == 0 or not self._stops_early):
                ks = {0, choice.k}
        self.k = choice.k
        if ks == {0}:
            return [0] * len(owns)
        if len(ks) > 1:
            chances_np = self._chances(owns)
            # Prompts cost what they cost: what drafts add to it must bring as much as ever.
            batch = batch._replace(num_rows=batch.num_rows + num_prompt_rows)
            least = (MIN_GAIN - 1) * num_seqs  # tokens that another k than usual must bring
            choice = max(
                (each for k in ks for each in self._options(k, batch, chances_np)),
                key=lambda each: (
                    each.num_tokens
                    - best.rate * each.cost
                    - (least if each.k not in (0, self.k) else 0.0)
                ),
            )
            if self._stops_early and choice.k:
                choice = choice._replace(k=self._max_k)
            self.k = max(self.k, choice.k)
        elif batch != self._batch and self._batch is not None:
            choice = self._again(choice, self._batch, batch, self._chances(owns))
        if not self._ranks:
            return self._shares(choice, owns)
        is_cut = choice.num_drafts < choice.k * len(owns)
        may_cut = is_cut or self._may_cut(choice.k, batch)
        if is_cut or (may_cut and self._age == 0):  # ranking takes time, too
            self.budget = RowBudget(choice.num_drafts, self.calibration.by_range_np)
        elif not may_cut:
            self._spread_np = None  # it will be of other sequences when it matters again
        return [choice.k] * len(owns)

    def _may_cut(self, k: int, batch: "_Batch") -> bool:
        """Whether it may pay to leave out drafts: not where their rows are nearly free."""
        depth, num_rows = max(k, *batch.named, 0), batch.num_rows + k * batch.num_open
        of_all = self.price.of(batch.num_seqs, num_rows, depth)
        return of_all > LEAST_CUT * self.price.of(batch.num_seqs, batch.num_rows, depth)

    def least_chance(self, num_seqs: int) -> float:
        """The lowest chance that all drafts so far are accepted at which one more pays; above 1:
        never.
        """
        if not (self._stops_early and self.price.knows_drafting):
            return UNLIKELY
        num_seqs = max(1, num_seqs)
        cost = self.price.of_a_row(num_seqs, num_seqs) + self.price.of_a_draft(num_seqs) / num_seqs
        # The next draft is accepted about as often as a first one.
        return cost * self._best_rate / self.acceptance.by_position[0]

    def worth(self, num_seqs: int) -> Worth:
        """What looked-up drafts are compared with: a step with the model's drafts alone."""
        num_seqs = max(1, num_seqs)
        num_rows = num_seqs * (1 + self.k)
        of_a_step = self.price.of(num_seqs, num_rows, self.k)
        return Worth(
            num_seqs * (1 + self.acceptance.expected(self.k)),
            self.price.of_a_row(num_seqs, num_rows) / of_a_step,
            self.price.of_lookups / of_a_step,
        )

    def num_left_out(
        self, num_seqs: int, num_rows: int, num_tokens: float, chances: Sequence[Sequence[float]]
    ) -> int:
        """How many looked-up drafts of each sequence, the last ones, are better left out: a step is
        padded to rows for which there is a graph, and with a few less another one will do.

        `num_tokens` are expected of the step with all of its `num_rows`. `chances[i]` are those of
        the drafts of sequence i, of which one stays.
        """
        _, padded = self.price.padding(num_seqs, num_rows)
        if padded == num_rows:
            return 0
        best, best_rate, num_lost = 0, 0.0, 0.0
        for count in range(MOST_LEFT_OUT + 1):
            if count:
                losing = [each[-count] for each in chances if count < len(each)]
                num_rows, num_lost = num_rows - len(losing), num_lost + sum(losing)
            rate = (num_tokens - num_lost) / self.price.of(num_seqs, num_rows, self.k)
            if rate > MIN_GAIN * best_rate:
                best, best_rate = count, rate
        return best

    def observe(
        self,
        num_seqs: int,
        wanted: Sequence[int],
        accepted: Sequence[int],
        elapsed_s: float | None,
        drafting_s: float = 0.0,
        *,
        num_looked_up: int = 0,
        num_void: int = 0,
        is_trial: bool = False,
        depth: int | None = None,
        left_out: Sequence[float] = (),
        ratios: Sequence[float] = (),
    ) -> None:
        """Learn from a step with `wanted[i]` drafts for sequence i, which accepted `accepted[i]`.

        k was chosen for `num_seqs` sequences; others in the step have just read their prompt.
        `elapsed_s` is None if the step did more than decode, which makes its time useless; of it,
        drafting took `drafting_s`. `num_looked_up` drafts were from texts, and
        `num_void` of void sequences, besides those of `wanted`. `is_trial`: the step was not as
        usual. `depth` is how many drafts were made of one sequence, at most; `left_out` and
        `ratios` as in Acceptance.
        """
        num_seqs = max(1, num_seqs)
        num_rows = num_seqs + sum(wanted) + num_looked_up + num_void
        self.acceptance.observe(wanted, accepted, left_out, ratios)
        if is_trial:
            self._batch = None  # compare anew with what it has shown
        most = max(wanted, default=0) if depth is None else depth
        num_drafts = sum(wanted) / num_seqs if self._stops_early else most
        catches_up = most > 0 == self._num_drafts_before  # the draft reads what it has missed
        self._num_drafts_before = most
        pace_s, late_s = self.price.pace_s, 0.0
        if catches_up and elapsed_s is not None:
            late_s = elapsed_s - self.price.of(num_seqs, num_rows, num_drafts) * pace_s
        if elapsed_s is not None:
            num_tokens = num_seqs + sum(accepted)
            self._trials.observe(
                elapsed_s, num_tokens, pace_s, is_trial=is_trial, late_s=max(0.0, late_s)
            )
        if not catches_up:
            self.price.observe(
                num_seqs,
                num_rows,
                num_drafts,
                elapsed_s,
                drafting_s,
                is_usual=not is_trial,
                looks_up=num_looked_up > 0,
            )

    def calibrate(
        self, ranges_np: np.ndarray, owns: Sequence[OwnAcceptance], wanted: list[int],
        accepted: list[int],
    ) -> np.ndarray:  # fmt: skip
        """Learn how likely the drafts of ranked sequences are, by the ranges of their log odds.

        Returns what was known of that before. Shape: owns [N], ranges_np [N, depth] -> [N, depth].
        """
        chances_np = self.calibration.chances(ranges_np)
        ratios_np = np.array([own.ratio for own in owns])
        self.calibration.observe(ranges_np, np.array(wanted), np.array(accepted), ratios_np)
        likely_np, are_made_np = self.calibration.chances(ranges_np), ranges_np >= 0
        means_np = likely_np.sum(0) / np.maximum(are_made_np.sum(0), 1)
        self._spread_np = np.divide(
            likely_np, means_np, out=np.ones_like(likely_np), where=are_made_np
        )
        return chances_np

    def _chances(self, owns: Sequence[OwnAcceptance]) -> np.ndarray:
        """That a draft and all before it are accepted. Shape: owns [S] -> [S, max_k]."""
        each_np = np.outer([own.ratio for own in owns], self.acceptance.by_position)
        if (spread_np := self._spread_np) is not None:  # of sequences like these
            depth = spread_np.shape[1]
            each_np[:, :depth] *= np.resize(spread_np, (len(owns), depth))
        chances_np: np.ndarray = np.minimum(each_np, SURE).cumprod(1)
        return chances_np

    def _choices(self, batch: "_Batch", owns: Sequence[OwnAcceptance]) -> dict[int, Choice]:
        """By k, the best that a step could do; one of the latest steps, if its batch was alike."""
        self._age += WITH_DRAFTS if self.k else 1
        if self._age >= NUM_STEPS_ALIKE or not batch.is_like(self._batch):
            self._batch, self._age = batch, 0
            self._compared = self._compare(batch, self._chances(owns))
        return self._compared

    def _compare(self, batch: "_Batch", chances_np: np.ndarray) -> dict[int, Choice]:
        """Shape: chances_np [S, max_k]."""
        options = [self._options(k, batch, chances_np) for k in range(self._max_k + 1)]
        least = LEAST_CUT * max(whole.rate for whole, *_ in options)
        choices = {}
        for k, (whole, *parts) in enumerate(options):
            part = max(parts, key=attrgetter("rate"), default=whole)
            choices[k] = part if part.rate > least else whole
        if self._stops_early:  # then the most drafts are taken to be as good as the best k
            best = max((choices.pop(k) for k in range(1, self._max_k + 1)), key=attrgetter("rate"))
            choices[self._max_k] = best._replace(k=self._max_k)
        return choices

    def _again(
        self, choice: Choice, before: _Batch, batch: _Batch, chances_np: np.ndarray
    ) -> Choice:
        """The same of a batch that is like the one `before`. Shape: chances_np [S, max_k]."""
        if self._stops_early:
            return self._compare(batch, chances_np)[choice.k]
        whole, *parts = self._options(choice.k, batch, chances_np)
        is_cut = choice.num_drafts < choice.k * before.num_open
        return max(parts, key=attrgetter("rate"), default=whole) if is_cut else whole

    def _options(self, k: int, batch: "_Batch", chances_np: np.ndarray) -> list[Choice]:
        """What a step could do with k drafts of a sequence at most: all of them first, or the
        likeliest. Shape: chances_np [S, max_k].
        """
        gain_np = np.sort(chances_np[:, :k], axis=None)[::-1].cumsum()
        most, counts = len(gain_np), []
        first_np = chances_np[:, 0]
        if k and first_np.max() > ALIKE * first_np.min():
            for part in PARTS:  # as many as there are rows anyway, beside at least so many
                wanted = batch.num_rows + max(1, int(part * most))
                _, padded = self.price.padding(batch.num_seqs, wanted)
                counts.append(min(most, padded - batch.num_rows))
        num_tokens = batch.num_seqs + sum(map(self.acceptance.expected, batch.named))
        depth = max(k, *batch.named, 0)
        return [
            Choice(
                k,
                count,
                num_tokens + (float(gain_np[count - 1]) if count else 0.0),
                self.price.of(batch.num_seqs, batch.num_rows + count, depth),
            )
            for count in (most, *counts)
        ]

    def _shares(self, choice: Choice, owns: Sequence[OwnAcceptance]) -> list[int]:
        """How many of a step's drafts each sequence gets: the likeliest are made. Among equal ones
        an earlier draft of a sequence comes first. Shape: owns [S] -> [S].
        """
        num_seqs, depth = len(owns), choice.k
        if self._stops_early:  # the best k is less, and what follows it is decided while drafting
            depth = -(-choice.num_drafts // num_seqs)
        if choice.num_drafts == depth * num_seqs:
            return [choice.k] * num_seqs
        falling_np = np.argsort(-self._chances(owns)[:, :depth].T.ravel(), kind="stable")
        counts_np = np.bincount(falling_np[: choice.num_drafts] % num_seqs, minlength=num_seqs)
        if self._stops_early:
            counts_np = np.where(counts_np > 0, choice.k, 0)
        counts: list[int] = counts_np.tolist()
        return counts


def times_decoding(num_prompt_tokens: int, num_decoding: int) -> bool:
    """Whether a step's time shows how long decoding takes.

    A few prompt tokens hardly add to it; a chunk of a long prompt does.
    """
    return num_prompt_tokens <= 2 * num_decoding
