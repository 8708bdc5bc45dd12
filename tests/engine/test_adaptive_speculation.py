"""k by measured cost, on machines whose costs and texts whose acceptance are known."""

import random
from collections.abc import Callable
from math import inf, prod

import numpy as np
import pytest

from outrider.engine.acceptance import PRIOR_ACCEPTANCE, OwnAcceptance
from outrider.engine.scheduling.adaptive_speculation import UNLIKELY, AdaptiveSpeculation
from outrider.engine.scheduling.price import Price
from outrider.engine.scheduling.trials import LONG, SHORT, SPENT, SPENT_DRAFTING, Choice, Trials

StepTime = Callable[[int, int], float]  # (num_seqs, k) -> seconds
MAX_K = 5


def decode(
    adaptive: AdaptiveSpeculation,
    step_s: StepTime,
    acceptance: float,
    *,
    num_seqs: int = 1,
    num_steps: int = 1000,
    seed: int = 0,
) -> float:
    """Tokens a second of a sequence, over steps whose time is off by a few percent."""
    rng = random.Random(seed)
    num_tokens, total_s = 0, 0.0
    for _ in range(num_steps):
        k = choose(adaptive, num_seqs)
        accepted = [stood(rng, k, acceptance) for _ in range(num_seqs)]
        elapsed_s = step_s(num_seqs, k) * rng.uniform(0.97, 1.03)
        observe(adaptive, [k] * num_seqs, accepted, elapsed_s)
        num_tokens += sum(accepted) + num_seqs
        total_s += elapsed_s
    return num_tokens / num_seqs / total_s


def choose(adaptive: AdaptiveSpeculation, num_seqs: int, num_prompt_rows: int = 0) -> int:
    """k for sequences that all leave it open, and of which nothing is known."""
    chosen = adaptive.choose(
        num_seqs, [OwnAcceptance()] * num_seqs, num_prompt_rows=num_prompt_rows
    )
    assert chosen == [adaptive.k] * num_seqs
    return adaptive.k


def observe(
    adaptive: AdaptiveSpeculation,
    wanted: list[int],
    accepted: list[int],
    elapsed_s: float | None,
) -> None:
    """Report the step that was chosen last."""
    adaptive.observe(len(wanted), wanted, accepted, elapsed_s, is_trial=adaptive.is_trial)


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
        for _ in range(1500):
            k = choose(adaptive, 1)
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
    a_draft_s, acceptance = step_s(1, 1) - step_s(1, 0), (SURE + UNSURE) / 2
    num_tokens, total_s = 0, 0.0
    for _ in range(2000):
        k, least_chance = choose(adaptive, num_seqs), adaptive.least_chance(num_seqs)
        drafted, accepted = [], []
        for _ in range(num_seqs):
            chances: list[float] = []
            while len(chances) < k and (not chances or prod(chances) >= least_chance):
                chances.append(rng.choice((SURE, UNSURE)))
            drafted.append(len(chances))
            fell = (j for j, chance in enumerate(chances) if rng.random() >= chance)
            accepted.append(next(fell, len(chances)))
        elapsed_s = step_s(num_seqs, 0) + sum(drafted) * a_draft_s
        pace, drafting_s = rng.uniform(0.97, 1.03), sum(drafted) * a_draft_s / 2
        is_trial = adaptive.is_trial
        adaptive.observe(
            num_seqs, drafted, accepted, elapsed_s * pace, drafting_s * pace, is_trial=is_trial
        )
        num_tokens += sum(accepted) + num_seqs
        total_s += elapsed_s
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
    chosen = [choose(adaptive, 1) for _ in range(20)]
    assert chosen == [0] * 20


def test_drafting_resumes_when_the_text_turns_predictable() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.0)
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
    k = usual(adaptive)
    observe(adaptive, [k], [k], 5.0)
    assert usual(adaptive) == k


def usual(adaptive: AdaptiveSpeculation) -> int:
    """The k of a step that is no trial."""
    while True:
        k = choose(adaptive, 1)
        if not adaptive.is_trial:
            return k


def test_a_machine_that_slows_down_does_not_move_the_choice() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.8)
    k = usual(adaptive)
    adaptive.acceptance.observe = lambda *_: None  # type: ignore[method-assign]
    for _ in range(20):
        observe(adaptive, [k], [k], 2 * memory_bound(1, k))
        assert usual(adaptive) == k


def test_where_no_step_can_be_timed_nothing_is_drafted() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    for step in range(50):
        assert choose(adaptive, 32, num_prompt_rows=1000) == 0
        assert not adaptive.is_measuring
        observe(adaptive, [0] * 32, [0] * 32, 0.1 if step in (10, 20) else None)


def test_k_is_found_though_some_sequences_always_draft_fewer() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    chosen = []
    for _ in range(200):
        chosen.append(choose(adaptive, 4))
        observe(adaptive, [chosen[-1]] * 3 + [0], [0] * 4, compute_bound(3, chosen[-1]))
    assert chosen[100:].count(0) >= 90


def test_a_new_batch_size_takes_few_steps_to_know() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    chosen = []
    for _ in range(50):
        chosen.append(choose(adaptive, 1))
        observe(adaptive, [chosen[-1]], [chosen[-1]], memory_bound(1, chosen[-1]))
    assert not any(chosen[:3])
    assert set(chosen[25:]) == {MAX_K}


@pytest.mark.parametrize("stops_early", [False, True])
def test_prices_outlive_the_text_they_were_learned_with(stops_early: bool) -> None:
    price = Price()
    for k in (0, 1, MAX_K) * 5:
        price.observe(1, 1 + k, k, memory_bound(1, k), 0.003 * k, is_usual=False)
    adaptive = AdaptiveSpeculation(MAX_K, stops_early=stops_early, price=price)
    assert choose(adaptive, 1) >= MAX_K - 1  # best by the acceptance that is assumed at first
    least = adaptive.least_chance(1)
    assert UNLIKELY < least < PRIOR_ACCEPTANCE if stops_early else least == UNLIKELY


@pytest.mark.parametrize("pinned_k", [0, 2, MAX_K])
def test_a_sequence_with_a_k_of_its_own_keeps_nobody_from_drafting(pinned_k: int) -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    rng = random.Random(0)
    chosen = []
    for _ in range(300):
        [k, *_] = adaptive.choose(4, [OwnAcceptance()] * 3, [pinned_k])
        wanted = [pinned_k, k, k, k]
        accepted = [stood(rng, w, 0.9) for w in wanted]
        observe(adaptive, wanted, accepted, memory_bound(4, 0) + 0.001 * sum(wanted))
        chosen.append(k)
    assert chosen[100:].count(MAX_K) >= 150


def test_drafts_beside_a_sequence_that_has_some_anyway_cost_rows_alone() -> None:
    """The draft passes are there; rows are free up to 16."""
    price = Price()
    for k in (0, 1, 2, 3) * 3:
        rows_s = 1.0 if k < 3 else 3.0
        price.observe(4, 4 + 4 * k, k, rows_s + 0.8 * k, 0.8 * k, is_usual=False)
    adaptive = AdaptiveSpeculation(3, price=price)
    for _ in range(20):
        adaptive.observe(4, [3] * 4, [1, 0, 0, 0], None, 2.4)
    assert adaptive.choose(4, [OwnAcceptance()] * 4) == [0] * 4
    assert adaptive.choose(4, [OwnAcceptance()] * 3, [3]) == [1] * 3


@pytest.mark.parametrize(
    ("num_prompt_rows", "a_row", "expected"),
    [
        (0, 1.0, 3),
        (8, 1.0, 3),  # 24 rows in all
        (24, 1.0, 0),
        (400, 1.0, 0),
        (400, 0.01, 3),  # the prompt itself costs more than decoding, which is no reason
    ],
)
def test_drafts_beside_prompts_must_be_worth_the_rows_that_they_add(
    num_prompt_rows: int, a_row: float, expected: int
) -> None:
    """A step with up to 28 rows costs 1; each further row `a_row` more."""
    price = Price()
    for num_rows in (4, 16, 28, 128, 512) * 3:
        cost = 1.0 + a_row * max(0, num_rows - 28)
        price.observe(4, num_rows, 0, cost, is_usual=False)
    adaptive = AdaptiveSpeculation(3, price=price)
    for _ in range(20):
        adaptive.observe(4, [3] * 4, [3] * 4, None)
    assert choose(adaptive, 4) == 3
    owns = [OwnAcceptance()] * 4
    assert adaptive.choose(4, owns, num_prompt_rows=num_prompt_rows) == [expected] * 4


@pytest.mark.parametrize("falls_behind", [False, True])
def test_a_head_drafts_beside_prompts_though_it_does_not_pay_without_them(
    falls_behind: bool,
) -> None:
    """The first 12 rows behind 4 cost a step each; beside a prompt they cost next to nothing. A
    draft model would have to read all that it has missed.
    """
    price = Price()
    for num_rows in (4, 8, 12, 16, 128, 512) * 3:
        cost = 1.0 + min(12, num_rows - 4) + 0.001 * num_rows
        price.observe(4, num_rows, 0, cost, is_usual=False)
    adaptive = AdaptiveSpeculation(3, falls_behind=falls_behind, price=price)
    for _ in range(20):
        adaptive.observe(4, [3] * 4, [3] * 4, None)
    assert choose(adaptive, 4) == 0
    drafted = choose(adaptive, 4, num_prompt_rows=200)
    assert drafted == (0 if falls_behind else 3)


def test_beside_prompts_the_price_of_other_sizes_will_do() -> None:
    """No such step shows what decoding costs. Without prompts one of this size is timed first."""
    adaptive = AdaptiveSpeculation(3, falls_behind=False, price=known(memory_bound, 32, 3))
    assert choose(adaptive, 8, num_prompt_rows=400) > 0
    assert not adaptive.is_measuring
    assert choose(adaptive, 8) == 0
    assert adaptive.is_measuring


def test_where_drafts_stop_early_the_best_k_says_who_has_any() -> None:
    """That is one, of all. Half of the sequences are likelier to have a second one accepted than
    the others a first.
    """
    price = known(lambda _, k: (1.0, 1.16, 3.0, 4.0)[k], 8, 3)
    adaptive = AdaptiveSpeculation(3, stops_early=True, price=price)
    adaptive.acceptance.by_position = [0.7, 0.65, 0.6]
    good, fair = OwnAcceptance(), OwnAcceptance()
    fair.ratio = 0.63
    assert adaptive.choose(8, [good, fair] * 4) == [3] * 8


@pytest.mark.parametrize("falls_behind", [False, True])
def test_drafts_that_stop_early_pay_beside_prompts_as_the_best_k_does(falls_behind: bool) -> None:
    """All three of each would cost more than they bring."""
    price = known(lambda n, k: 1.0 + 0.05 * n * (k + 1), 8, 3)
    adaptive = AdaptiveSpeculation(3, stops_early=True, falls_behind=falls_behind, price=price)
    adaptive.acceptance.by_position = [0.9, 0.1, 0.1]
    assert choose(adaptive, 8) == 3
    assert choose(adaptive, 8, num_prompt_rows=400) == 3


def test_a_size_whose_plain_steps_are_unknown_can_be_asked_about() -> None:
    adaptive = AdaptiveSpeculation(4, stops_early=True)
    for _ in range(8):
        observe(adaptive, [1, 0], [0, 0], 0.01)
    assert 0 <= choose(adaptive, 2) <= 4
    assert adaptive.least_chance(2) > 0


def test_newcomers_do_not_hide_what_a_step_costs() -> None:
    """With a newcomer in every step, drafts are chosen for the one that goes on."""
    adaptive = AdaptiveSpeculation(4)
    chosen = []
    for _ in range(60):
        k = choose(adaptive, 1)
        chosen.append(k)
        adaptive.observe(1, [k, 0], [k, 0], memory_bound(1, k), is_trial=adaptive.is_trial)
    assert chosen[-1] > 0


def known(step_s: StepTime, num_seqs: int, max_k: int) -> Price:
    price = Price()
    for k in [*range(max_k + 1)] * 3:
        price.observe(num_seqs, num_seqs * (k + 1), k, step_s(num_seqs, k), 0.0, is_usual=False)
    return price


def test_the_likeliest_drafts_of_the_whole_batch_get_the_rows() -> None:
    """A row is worth a chance of about a half: hopeless sequences get none, others the most."""
    adaptive = AdaptiveSpeculation(3, price=known(lambda n, k: n * (1 + 0.5 * k), 8, 3))
    easy, hard = OwnAcceptance(), OwnAcceptance()
    for _ in range(30):
        adaptive.observe(8, [3] * 8, [3] * 4 + [0] * 4, None)
        easy.observe(3, 3, adaptive.acceptance.by_position)
        hard.observe(3, 0, adaptive.acceptance.by_position)
    chosen = adaptive.choose(8, [easy, hard] * 4)
    assert sum(chosen[::2]) > 8
    assert not any(chosen[1::2])


def test_of_equal_chances_the_earlier_draft_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sequence would have a later draft in place of an earlier one."""
    adaptive, owns = AdaptiveSpeculation(2), [OwnAcceptance()] * 3
    chances_np = np.array([[1.0, 1.0], [0.5, 0.5], [1.0, 0.2]])
    monkeypatch.setattr(adaptive, "_chances", lambda _: chances_np)
    for num_drafts, expected in ((1, [1, 0, 0]), (3, [2, 0, 1]), (4, [2, 1, 1]), (5, [2, 2, 1])):
        assert adaptive._shares(Choice(2, num_drafts, 1.0, 1.0), owns) == expected


def test_a_hopeless_draft_costs_a_hundredth_of_the_time() -> None:
    adaptive = AdaptiveSpeculation(MAX_K)
    decode(adaptive, memory_bound, 0.0, num_steps=200)
    rate = decode(adaptive, memory_bound, 0.0)
    assert 0.985 < rate * memory_bound(1, 0) < 1.02


def test_a_draft_that_must_read_what_it_has_missed_is_tried_less_often() -> None:
    num_trials = []
    for late_s in (0.0, 3.0):
        adaptive, before, count = AdaptiveSpeculation(MAX_K), 0, 0
        for _ in range(2000):
            k = choose(adaptive, 1)
            count += adaptive.is_trial
            missed_s = late_s if k > 0 == before else 0.0
            observe(adaptive, [k], [0], memory_bound(1, k) + missed_s)
            before = k
        num_trials.append(count)
    assert num_trials[0] > 3 * num_trials[1] > 0


def test_what_a_draft_must_read_is_charged_to_its_trials_once() -> None:
    trials, choices = Trials(), {0: Choice(0, 0, 1.0, 1.0), 1: Choice(1, 1, 1.0, 1.1)}
    is_trial, read_s, total_s = False, 0.0, 0.0
    for _ in range(100_000):
        was_trial = is_trial
        is_trial = trials.next(choices[0], choices, 0.03, may_begin=True) is not None
        missed_s = 0.5 if is_trial and not was_trial else 0.0
        elapsed_s = 0.03 * choices[is_trial].cost + missed_s
        trials.observe(elapsed_s, 1, 0.03, is_trial=is_trial, late_s=missed_s)
        read_s, total_s = read_s + missed_s, total_s + elapsed_s
    assert 0.8 * SPENT < read_s / total_s < SPENT


def test_a_trial_ends_even_where_it_wins() -> None:
    """While one goes on nothing is looked up, and the pace of usual steps is not seen."""
    adaptive, before, num_trials = AdaptiveSpeculation(MAX_K), 0, 0
    for _ in range(1000):
        k = choose(adaptive, 1)
        num_trials += adaptive.is_trial
        missed_s = 0.5 if k > 0 == before else 0.0
        observe(adaptive, [k], [0], memory_bound(1, k) + missed_s)
        before = k
    assert adaptive.k == 0
    assert num_trials < 50


def test_a_trial_may_lose_no_more_where_lookups_bring_most_tokens() -> None:
    """No step of it has any."""
    lost = {}
    for speedup in (1.0, 12.0, inf):
        adaptive, num_trials = AdaptiveSpeculation(MAX_K), 0
        for step in range(4000):
            [k] = adaptive.choose(1, [OwnAcceptance()], speedup=1.0 if step < 500 else speedup)
            num_trials += adaptive.is_trial and step >= 500
            observe(adaptive, [k], [0], memory_bound(1, k))
        lost[speedup] = num_trials / 3500  # of the time, where lookups bring the most
    assert lost[1.0] > 3 * SPENT
    assert 0 < lost[12.0] < SPENT
    assert lost[inf] == 0


def test_a_trial_ends_where_nobody_knows_what_lookups_bring() -> None:
    """Else the first steps of a prediction, which may be whole, would have none."""
    trials, choices = Trials(), {0: Choice(0, 0, 1.0, 1.0), 1: Choice(1, 1, 1.0, 1.1)}
    trials.observe(1000.0, 1, 0.03, is_trial=False, late_s=0.0)
    assert trials.next(choices[0], choices, 0.03, may_begin=True) is choices[1]
    assert trials.next(choices[0], choices, 0.03, may_begin=True, speedup=inf) is None
    assert trials.next(choices[0], choices, 0.03, may_begin=False) is None


TRIED = {k: Choice(k, k, 1.0, 1.0 + 0.1 * k) for k in range(3)}


def tried(
    usual_k: int, *, priced: tuple[int, ...], num_steps: int = 2000
) -> tuple[list[int], list[int]]:
    """Each k that was tried, and for how many steps, where no draft is ever accepted."""
    trials, ks, lengths, before = Trials(), [], [], None
    for _ in range(num_steps):
        choice = trials.next(
            TRIED[usual_k], TRIED, 1.0, may_begin=True, has_price=lambda tried: tried.k in priced
        )
        if choice is not None and before is None:
            ks.append(choice.k)
            lengths.append(0)
        if choice is not None:
            lengths[-1] += 1
        elapsed_s = (choice or TRIED[usual_k]).cost
        trials.observe(elapsed_s, 1, 1.0, is_trial=choice is not None, late_s=0.0)
        before = choice
    return ks, lengths


def test_a_trial_is_as_long_as_it_takes_to_learn_what_is_not_known() -> None:
    assert set(tried(0, priced=(1, 2))[1]) == {SHORT}
    assert set(tried(0, priced=())[1]) == {LONG}


def test_fewer_drafts_are_tried_only_to_learn_their_price() -> None:
    assert set(tried(1, priced=(0, 1, 2))[0]) == {2}
    assert set(tried(1, priced=(1, 2))[0]) == {0, 2}
    assert not tried(2, priced=(0, 1, 2))[0]


def test_less_is_spent_on_trials_while_drafts_show_how_often_they_are_accepted() -> None:
    without, drafting = (len(tried(k, priced=(0, 1, 2))[0]) for k in (0, 1))
    assert without * SPENT_DRAFTING == pytest.approx(drafting * SPENT, rel=0.2)


def test_what_a_trial_has_shown_is_weighed_at_once() -> None:
    """Else for some 30 steps, at which choices without drafts are compared again."""
    adaptive = AdaptiveSpeculation(1, price=known(memory_bound, 8, 1))
    rng, num_steps = random.Random(0), 0
    for is_good in (False, True):
        for _ in range(300):
            k, is_trial = choose(adaptive, 8), adaptive.is_trial
            if is_good and k and not is_trial:
                break
            num_steps = num_steps + 1 if is_good and (is_trial or num_steps) else 0
            accepted = [stood(rng, k, 0.9 if is_good else 0.0) for _ in range(8)]
            observe(adaptive, [k] * 8, accepted, memory_bound(8, k))
    assert 0 < num_steps < 10
