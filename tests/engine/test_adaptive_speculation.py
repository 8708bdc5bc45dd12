"""k by measured cost, on machines whose costs and texts whose acceptance are known."""

import random
from collections.abc import Callable
from math import prod

import pytest

from outrider.engine.scheduling.acceptance import PRIOR_ACCEPTANCE
from outrider.engine.scheduling.adaptive_speculation import (
    MIN_TIMES,
    UNLIKELY,
    AdaptiveSpeculation,
    batch_sizes,
)

StepTime = Callable[[int, int], float]  # (num_seqs, k) -> seconds
MAX_K = 5


def decode(
    adaptive: AdaptiveSpeculation,
    step_s: StepTime,
    acceptance: float,
    *,
    num_seqs: int = 1,
    num_steps: int = 2000,
    seed: int = 0,
) -> float:
    """Tokens a second of a sequence, over steps whose time is off by a few percent."""
    rng = random.Random(seed)
    num_tokens, total_s = 0, 0.0
    for _ in range(num_steps):
        k = adaptive.choose(num_seqs)
        accepted = [stood(rng, k, acceptance) for _ in range(num_seqs)]
        elapsed_s = step_s(num_seqs, k) * rng.uniform(0.97, 1.03)
        observe(adaptive, [k] * num_seqs, accepted, elapsed_s)
        num_tokens += sum(accepted) + num_seqs
        total_s += elapsed_s
    return num_tokens / num_seqs / total_s


def observe(
    adaptive: AdaptiveSpeculation,
    wanted: list[int],
    accepted: list[int],
    elapsed_s: float | None,
) -> None:
    """Tell of a step of sequences that all leave the choice of k open."""
    adaptive.observe(max(wanted), len(wanted), wanted, accepted, elapsed_s)


def stood(rng: random.Random, k: int, acceptance: float) -> int:
    for j in range(k):
        if rng.random() >= acceptance:
            return j
    return k


def best_fixed_rate(step_s: StepTime, acceptance: float, num_seqs: int) -> float:
    return max(
        sum(acceptance**j for j in range(k + 1)) / step_s(num_seqs, k) for k in range(MAX_K + 1)
    )


def memory_bound(num_seqs: int, k: int) -> float:
    return 0.030 + 0.003 * k + 0.001 * num_seqs * (k + 1)


def compute_bound(num_seqs: int, k: int) -> float:
    return 0.010 + 0.004 * num_seqs * (k + 1)


@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_seqs", [1, 6, 32])
@pytest.mark.parametrize("step_s", [memory_bound, compute_bound])
def test_decoding_is_nearly_as_fast_as_with_the_best_fixed_k(
    step_s: StepTime, num_seqs: int, acceptance: float
) -> None:
    rate = decode(AdaptiveSpeculation(MAX_K), step_s, acceptance, num_seqs=num_seqs)
    assert rate > 0.93 * best_fixed_rate(step_s, acceptance, num_seqs)


@pytest.mark.parametrize(("base", "least_gain"), [(0.4, 0.98), (0.75, 0.98), (0.9, 1.05)])
def test_to_be_allowed_more_drafts_costs_next_to_nothing(base: float, least_gain: float) -> None:
    """Drafts fall off as a head's do: the second stands less often than the first, and so on."""
    rates = []
    for most in (4, 6):
        adaptive, rng, num_tokens, total_s = AdaptiveSpeculation(most), random.Random(0), 0, 0.0
        for _ in range(3000):
            k = adaptive.choose(1)
            fell = (j for j in range(k) if rng.random() >= base - 0.03 * j)
            accepted = next(fell, k)
            elapsed_s = (0.030 + 0.0015 * k) * rng.uniform(0.99, 1.01)
            observe(adaptive, [k], [accepted], elapsed_s)
            num_tokens, total_s = num_tokens + 1 + accepted, total_s + elapsed_s
        rates.append(num_tokens / total_s)
    assert rates[1] > least_gain * rates[0]


SURE, UNSURE = 0.95, 0.3  # chances of a draft, of which the proposer knows


@pytest.mark.parametrize("num_seqs", [1, 6, 32])
@pytest.mark.parametrize("step_s", [memory_bound, compute_bound])
def test_drafts_go_on_while_they_pay(step_s: StepTime, num_seqs: int) -> None:
    """Half of all drafts are sure to stand, the others are not: no fixed k suits both."""
    adaptive, rng = AdaptiveSpeculation(MAX_K, stops_early=True), random.Random(0)
    num_tokens, total_s = 0, 0.0
    for _ in range(2000):
        k, least_chance = adaptive.choose(num_seqs), adaptive.least_chance(num_seqs)
        drafted, accepted = [], []
        for _ in range(num_seqs):
            chances: list[float] = []
            while len(chances) < k and (not chances or prod(chances) >= least_chance):
                chances.append(rng.choice((SURE, UNSURE)))
            drafted.append(len(chances))
            fell = (j for j, chance in enumerate(chances) if rng.random() >= chance)
            accepted.append(next(fell, len(chances)))
        elapsed_s = step_s(num_seqs, 0) + sum(drafted) * (step_s(1, 1) - step_s(1, 0))
        observe(adaptive, drafted, accepted, elapsed_s * rng.uniform(0.97, 1.03))
        num_tokens += sum(accepted) + num_seqs
        total_s += elapsed_s
    a_draft_s, acceptance = step_s(1, 1) - step_s(1, 0), (SURE + UNSURE) / 2
    best = max(
        sum(acceptance**j for j in range(k + 1)) / (step_s(num_seqs, 0) + num_seqs * k * a_draft_s)
        for k in range(MAX_K + 1)
    )
    assert num_tokens / num_seqs / total_s > (1.04 if num_seqs == 1 else 0.95) * best


def test_no_draft_is_held_to_a_price_before_its_cost_is_known() -> None:
    assert AdaptiveSpeculation(MAX_K, stops_early=True).least_chance(1) == UNLIKELY


def test_nothing_is_drafted_for_long_where_no_draft_stands() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.0)
    chosen = [adaptive.choose(1) for _ in range(20)]
    assert chosen == [0] * 20


def test_drafting_resumes_when_the_text_turns_predictable() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.0)
    adaptive.expect_change()
    rate = decode(adaptive, memory_bound, 0.9)
    assert rate > 0.85 * best_fixed_rate(memory_bound, 0.9, 1)


def test_each_batch_size_has_its_own_k() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, compute_bound, 0.6, num_seqs=64)
    large = decode(adaptive, compute_bound, 0.6, num_seqs=64)
    alone = decode(adaptive, compute_bound, 0.6, num_seqs=1)
    assert large > 0.93 * best_fixed_rate(compute_bound, 0.6, 64)
    assert alone > 0.93 * best_fixed_rate(compute_bound, 0.6, 1)


def test_a_step_that_was_held_up_does_not_move_the_choice() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.8)
    k = adaptive.choose(1)
    observe(adaptive, [k], [k], 5.0)
    assert adaptive.choose(1) == k


def test_a_machine_that_slows_down_does_not_move_the_choice() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.8)
    k = adaptive.choose(1)
    for _ in range(20):
        observe(adaptive, [k], [k], 2 * memory_bound(1, k))
        assert adaptive.choose(1) == k


def test_where_no_step_can_be_timed_nothing_is_drafted() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    for step in range(50):
        assert adaptive.choose(32, is_timed=False) == 0
        observe(adaptive, [0] * 32, [0] * 32, 0.1 if step % 2 else None)


def test_k_is_found_though_some_sequences_always_draft_fewer() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    chosen = []
    for _ in range(200):
        chosen.append(adaptive.choose(4))
        observe(adaptive, [chosen[-1]] * 3 + [0], [0] * 4, compute_bound(3, chosen[-1]))
    assert chosen[100:].count(0) >= 90


def test_a_new_batch_size_takes_few_steps_to_know() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    chosen = []
    for _ in range(50):
        chosen.append(adaptive.choose(1))
        observe(adaptive, [chosen[-1]], [chosen[-1]], memory_bound(1, chosen[-1]))
    assert set(chosen[:11]) == {0, 1}
    assert set(chosen[25:]) == {MAX_K}


@pytest.mark.parametrize("stops_early", [False, True])
def test_costs_that_are_known_already_outlive_the_text_they_were_learned_with(
    stops_early: bool,
) -> None:
    before = AdaptiveSpeculation(MAX_K, first_ks=(0, 1, MAX_K))
    assert not before.knows(1)
    for _ in range(50):
        k = before.choose(1)
        observe(before, [k], [0], memory_bound(1, k))
    assert before.knows(1)
    adaptive = AdaptiveSpeculation(MAX_K, stops_early=stops_early, known=before)
    assert adaptive.choose(1) >= MAX_K - 1  # best by the acceptance that is assumed at first
    a_draft = memory_bound(1, 1) / memory_bound(1, 0) - 1  # in tokens, as no draft has stood yet
    worth = pytest.approx(a_draft / PRIOR_ACCEPTANCE)
    assert adaptive.least_chance(1) == (worth if stops_early else UNLIKELY)


@pytest.mark.parametrize("most", [1, 2, 7, 32, 100])
def test_every_batch_is_of_one_of_the_sizes_whose_costs_are_learned(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    for num_seqs in range(1, most + 1):
        adaptive = AdaptiveSpeculation(MAX_K)
        for size in sizes:
            decode(adaptive, memory_bound, 0.5, num_seqs=size, num_steps=12)
        assert adaptive.knows(num_seqs)


@pytest.mark.parametrize("pinned_k", [0, 2, MAX_K])
def test_a_sequence_with_a_k_of_its_own_keeps_nobody_from_drafting(pinned_k: int) -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    rng = random.Random(0)
    chosen = []
    for _ in range(300):
        k = adaptive.choose(4)
        wanted = [pinned_k, k, k, k]
        accepted = [stood(rng, w, 0.9) for w in wanted]
        elapsed_s = memory_bound(4, 0) + 0.001 * sum(wanted)
        adaptive.observe(k, 4, wanted, accepted, elapsed_s)
        chosen.append(k)
    assert chosen[100:].count(MAX_K) >= 150


def test_sequences_that_all_have_a_k_of_their_own_teach_no_cost() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    for _ in range(300):  # all take the same time, whatever is chosen
        adaptive.choose(4)
        adaptive.observe(None, 4, [2] * 4, [0] * 4, 0.1)
    chosen = []
    for _ in range(100):
        chosen.append(adaptive.choose(4))
        observe(adaptive, [chosen[-1]] * 4, [0] * 4, compute_bound(4, chosen[-1]))
    assert chosen[20:].count(0) >= 70


def test_a_size_whose_plain_steps_are_unknown_can_be_asked_about() -> None:
    adaptive = AdaptiveSpeculation(4, stops_early=True)
    for _ in range(2 * MIN_TIMES):
        observe(adaptive, [1, 0], [0, 0], 0.01)
    assert adaptive.choose(2) == 0
    assert adaptive.least_chance(2) > 0


def test_newcomers_do_not_hide_what_a_step_costs() -> None:
    """With a newcomer in every step, drafts are chosen for the one that goes on."""
    adaptive = AdaptiveSpeculation(4)
    chosen = []
    for _ in range(60):
        k = adaptive.choose(1)
        chosen.append(k)
        adaptive.observe(k, 1, [k, 0], [k, 0], memory_bound(1, k))
    assert chosen[-1] > 0
