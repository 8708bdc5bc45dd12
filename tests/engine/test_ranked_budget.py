"""How many of the drafts that the device ranks are verified, on a machine whose costs are known and
with drafts whose chances are known when they are made.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.engine.acceptance import Acceptance, Calibration, OwnAcceptance
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation, _Batch
from outrider.engine.scheduling.price import Price
from outrider.kernels.verify.rank import LEAST, NUM_RANGES, WIDTH, rank_reference

MAX_K, NUM_SEQS = 4, 32
StepTime = Callable[[int, int], float]  # (rows, k) -> seconds
Chances = Callable[[random.Random, int], float]  # of a draft of sequence i


def mixed_drafts(rng: random.Random, _: int) -> float:
    return rng.choice((0.95, 0.2))


def mixed_sequences(_: random.Random, i: int) -> float:
    return 0.9 if i % 2 else 0.2


def alike(_: random.Random, __: int) -> float:
    return 0.7


def compute_bound(num_rows: int, k: int) -> float:
    return 0.008 + 0.0001 * num_rows + 0.0005 * k


def memory_bound(num_rows: int, k: int) -> float:
    return 0.010 + 0.000001 * num_rows + 0.0005 * k


class Machine:
    """Decodes with drafts whose log odds are a function of how likely they are."""

    def __init__(self, step_s: StepTime, chances: Chances, *, ranks: bool = True) -> None:
        price = Price()
        for k in [*range(MAX_K + 1)] * 3:
            num_rows, drafting_s = NUM_SEQS * (k + 1), 0.0005 * k
            price.observe(NUM_SEQS, num_rows, k, step_s(num_rows, k), drafting_s, is_usual=False)
        self.adaptive = AdaptiveSpeculation(MAX_K, ranks=ranks, price=price)
        self.owns = [OwnAcceptance() for _ in range(NUM_SEQS)]
        self.budgets: list[int | None] = []
        self._step_s, self._chances, self._rng = step_s, chances, random.Random(0)

    def rate(self, num_steps: int) -> float:
        """Tokens a second."""
        num_tokens, total_s = 0, 0.0
        for _ in range(num_steps):
            accepted, elapsed_s = self.step()
            num_tokens, total_s = num_tokens + NUM_SEQS + accepted, total_s + elapsed_s
        return num_tokens / total_s

    def step(self) -> tuple[int, float]:
        adaptive, rng = self.adaptive, self._rng
        wanted = adaptive.choose(NUM_SEQS, self.owns)
        depth, budget = max(wanted), adaptive.budget
        chances = [[self._chances(rng, i) for _ in range(depth)] for i in range(NUM_SEQS)]
        self.budgets.append(None if budget is None else budget.num_drafts)
        ranges_np = np.zeros((NUM_SEQS, depth), dtype=np.int32)
        if budget is not None:
            sequences = torch.zeros(4, NUM_SEQS, dtype=torch.int32)
            floats = sequences.view(torch.float32)
            sequences[0], sequences[1] = torch.arange(NUM_SEQS), torch.tensor(wanted)
            floats[2] = torch.tensor([own.ratio for own in self.owns])
            floats[3] = torch.from_numpy(budget.by_range_np)
            odds = torch.logit(torch.tensor(chances)) / 2  # a draft that is less sure than it may
            ranked = rank_reference(sequences, NUM_SEQS, budget.num_drafts, odds)
            wanted, ranges_np = ranked.counts.tolist(), ranked.ranges.numpy()
        accepted = []
        for row, k in zip(chances, wanted, strict=True):
            fell = (j for j in range(k) if rng.random() >= row[j])
            accepted.append(next(fell, k))
        known: list[list[float]] = [adaptive.acceptance.by_position] * NUM_SEQS
        left_out: list[float] = []
        if budget is not None:
            known = adaptive.calibrate(ranges_np, self.owns, wanted, accepted).tolist()
            left_out = [(*row, 0.0)[k] for row, k in zip(known, wanted, strict=True)]
        for own, k, num, row in zip(self.owns, wanted, accepted, known, strict=True):
            own.observe(k, num, row)
        elapsed_s = self._step_s(NUM_SEQS + sum(wanted), depth)
        adaptive.observe(
            NUM_SEQS,
            wanted,
            accepted,
            elapsed_s * rng.uniform(0.99, 1.01),
            0.0005 * depth,
            is_trial=adaptive.is_trial,
            depth=depth,
            left_out=left_out,
        )
        return sum(accepted), elapsed_s


def best_fixed_rate(step_s: StepTime, chances: Chances) -> float:
    rng, rates = random.Random(1), []
    for k in range(MAX_K + 1):
        num_tokens = 0
        for i in range(100 * NUM_SEQS):
            fell = (j for j in range(k) if rng.random() >= chances(rng, i))
            num_tokens += 1 + next(fell, k)
        rates.append(num_tokens / 100 / step_s(NUM_SEQS * (k + 1), k))
    return max(rates)


@pytest.mark.parametrize(("chances", "least"), [(mixed_drafts, 1.05), (mixed_sequences, 1.15)])
def test_where_rows_cost_the_likeliest_drafts_beat_every_fixed_k(
    chances: Chances, least: float
) -> None:
    machine = Machine(compute_bound, chances)
    machine.rate(300)
    assert machine.rate(1000) > least * best_fixed_rate(compute_bound, chances)


@pytest.mark.parametrize("chances", [mixed_drafts, mixed_sequences, alike])
def test_where_rows_are_nearly_free_nothing_is_ranked(chances: Chances) -> None:
    machine = Machine(memory_bound, chances)
    machine.rate(300)
    assert machine.rate(500) > 0.98 * best_fixed_rate(memory_bound, chances)
    assert machine.budgets.count(None) > 0.9 * len(machine.budgets)  # but times are off


def test_drafts_that_are_all_alike_are_not_cut() -> None:
    machine = Machine(compute_bound, alike)
    machine.rate(300)
    assert machine.rate(500) > 0.97 * best_fixed_rate(compute_bound, alike)


def test_while_nothing_is_left_out_few_steps_are_ranked() -> None:
    """It takes the host a millisecond. Now and then is enough, to see how sure drafts are."""
    machine = Machine(compute_bound, alike)
    machine.rate(300)
    machine.budgets.clear()
    machine.rate(400)
    assert 30 < len(machine.budgets) - machine.budgets.count(None) < 120


def test_leaving_drafts_out_must_promise_more_than_fewer_drafts_of_each() -> None:
    """The best four of two each bring 1% more than one of each, which may be chance."""
    price = Price()
    for num_rows, cost in [(4, 1.0), (8, 1.2), (12, 3.0)] * 3:
        price.observe(4, num_rows, 0, cost, is_usual=False)
    adaptive = AdaptiveSpeculation(2, ranks=True, price=price)
    each_np = np.array([[0.8, 0.56], [0.6, 0.3], [0.6, 0.3], [0.5, 0.2]])
    batch = _Batch(num_seqs=4, num_rows=4, named=(), num_open=4)
    assert [c.num_drafts for c in adaptive._compare(batch, each_np).values()] == [0, 4, 8]
    each_np[:, 0] = 0.9, 0.85, 0.3, 0.2
    each_np[:2, 1] = 0.8
    assert [c.num_drafts for c in adaptive._compare(batch, each_np).values()] == [0, 4, 4]


def test_drafts_that_only_looked_unsure_go_on() -> None:
    price = Price()
    for k in [*range(MAX_K + 1)] * 3:
        num_rows = NUM_SEQS * (k + 1)
        price.observe(NUM_SEQS, num_rows, k, compute_bound(num_rows, k), 0.0, is_usual=False)
    adaptive = AdaptiveSpeculation(MAX_K, ranks=True, price=price)
    owns = [OwnAcceptance() for _ in range(NUM_SEQS)]
    k = max(adaptive.choose(NUM_SEQS, owns))
    assert adaptive.budget is not None
    wanted = [k] * NUM_SEQS
    adaptive.calibrate(np.zeros((NUM_SEQS, k), dtype=np.int32), owns, wanted, wanted)
    adaptive.observe(NUM_SEQS, wanted, wanted, None, depth=k)
    assert max(adaptive.choose(NUM_SEQS - 3, owns[3:])) > 0  # other sequences, so it compares anew


def test_what_unranked_steps_accept_outweighs_what_the_last_ranked_one_had_seen() -> None:
    """Where nothing is drafted, only trials see that drafts turned good, and few are ranked."""
    price = Price()
    for k in [*range(MAX_K + 1)] * 3:
        num_rows = NUM_SEQS * (k + 1)
        price.observe(NUM_SEQS, num_rows, k, compute_bound(num_rows, k), 0.0, is_usual=False)
    adaptive = AdaptiveSpeculation(MAX_K, ranks=True, price=price)
    owns, k = [OwnAcceptance() for _ in range(NUM_SEQS)], MAX_K
    for num_accepted, is_ranked in ((0, True), (1, False)):
        for _ in range(60):
            accepted = [num_accepted] * NUM_SEQS
            if is_ranked:
                ranges_np = np.zeros((NUM_SEQS, k), dtype=np.int32)
                adaptive.calibrate(ranges_np, owns, [k] * NUM_SEQS, accepted)
            adaptive.observe(NUM_SEQS, [k] * NUM_SEQS, accepted, None, depth=k)
        k = 1
        size = NUM_SEQS - 3 * num_accepted  # so that it compares anew
        assert (max(adaptive.choose(size, owns[:size])) > 0) == (num_accepted > 0)


def test_without_a_ranking_the_shares_follow_from_what_was_accepted() -> None:
    machine = Machine(compute_bound, mixed_sequences, ranks=False)
    assert machine.rate(300) > 0.9 * best_fixed_rate(compute_bound, mixed_sequences)
    assert set(machine.budgets) == {None}


def test_a_calibration_learns_how_often_drafts_of_a_range_are_accepted() -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    middle_np = LEAST + WIDTH * (np.arange(NUM_RANGES) + 0.5)
    np.testing.assert_allclose(calibration.by_range_np, 1 / (1 + np.exp(-middle_np)), rtol=1e-5)
    truth_np = np.linspace(0.1, 0.9, NUM_RANGES)
    for _ in range(400):
        ranges_np = rng.integers(-1, NUM_RANGES, (64, 3))
        right_np = rng.random((64, 3)) < truth_np[ranges_np]
        accepted_np = right_np.cumprod(1).sum(1)
        verified_np = rng.integers(0, 4, 64)
        accepted_np = np.minimum(accepted_np, verified_np)
        calibration.observe(ranges_np, verified_np, accepted_np, np.ones(64))
    np.testing.assert_allclose(calibration.by_range_np, truth_np, atol=0.06)
    chances_np = calibration.chances(np.array([[3, -1]]))
    assert chances_np.tolist() == [[calibration.by_range_np[3], 0.0]]


def test_a_calibration_is_not_of_the_good_sequences_alone_that_come_to_later_drafts() -> None:
    calibration, rng, of_any = Calibration(), np.random.default_rng(0), 0.55
    chances_np = np.where(np.arange(64) % 2, 0.9, 0.2)
    for _ in range(200):
        right_np = rng.random((64, 4)) < chances_np[:, None]
        ranges_np, verified_np = np.full((64, 4), 5), np.full(64, 4)
        accepted_np = right_np.cumprod(1).sum(1)
        calibration.observe(ranges_np, verified_np, accepted_np, chances_np / of_any)
    assert calibration.by_range_np[5] == pytest.approx(of_any, abs=0.05)


def test_a_calibration_follows_a_text_that_changes() -> None:
    calibration = Calibration()
    for share in (0.9, 0.1):
        for step in range(600):
            accepted_np = np.arange(10) < 10 * share
            verdict = np.ones(10), accepted_np.astype(int)
            calibration.observe(np.full((10, 1), 5), *verdict, np.ones(10))
            assert step < 500 or abs(calibration.by_range_np[5] - share) < 0.05


def test_positions_are_not_taken_for_better_where_bad_drafts_are_left_out() -> None:
    """Half of all second drafts are accepted: only those were verified that always are."""
    acceptance = Acceptance(2)
    for _ in range(200):
        acceptance.observe([2, 1], [2, 1], [0.0, 0.0625])
    assert acceptance.by_position[1] == pytest.approx((1 + 0.0625) / 2, abs=0.06)
