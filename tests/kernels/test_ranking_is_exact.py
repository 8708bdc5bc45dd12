"""That only the likeliest drafts of two sequences are verified changes no distribution: every
outcome is enumerated in rational arithmetic, with the real choice, for every number of drafts. And
each way of choosing that would change one is found out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch
from exact_rules import ZERO, continued, joint_of, random_model, settle, step_along, thresholds_of

from outrider.kernels.verify.rank import NUM_RANGES, rank_reference

K, VOCAB = 3, 2
LENGTH = K + 1  # tokens of each sequence that are compared: of one step, at most
Tokens = tuple[int, ...]
Counts = tuple[int, int]
# (drafts of both sequences, how many are verified in all) -> how many of each
Choose = Callable[[tuple[Tokens, Tokens], int], Counts]
TARGETS = random_model(1, VOCAB), random_model(2, VOCAB)
DRAFTS = random_model(9, VOCAB), random_model(33, VOCAB)
STARTS: tuple[Tokens, Tokens] = ((0,), (1, 0))
BY_RANGE = torch.linspace(0.05, 1.0, NUM_RANGES)


def model(models: tuple, i: int, history: Tokens = ()) -> Callable[[Tokens], list[Fraction]]:
    return lambda context: models[i](STARTS[i] + history + context)


def ranked(chances: list[list[float]], most: int) -> Counts:
    """The real choice, among drafts whose likeliest token has this probability."""
    sequences = torch.zeros(4, NUM_RANGES, dtype=torch.int32)
    sequences[0, :2], sequences[1, :2] = torch.arange(2), K
    floats = sequences.view(torch.float32)
    floats[2, :2], floats[3] = torch.tensor([1.0, 0.9]), BY_RANGE
    a, b = rank_reference(sequences, 2, most, torch.logit(torch.tensor(chances))).counts.tolist()
    return a, b


def of_likeliest(
    paths: tuple[Tokens, Tokens], histories: tuple[Tokens, Tokens]
) -> list[list[float]]:
    """The probability of the likeliest token at each draft."""
    return [
        [float(max(model(DRAFTS, i, histories[i])(path[:j]))) for j in range(K)]
        for i, path in enumerate(paths)
    ]


def choose(paths: tuple[Tokens, Tokens], most: int) -> Counts:
    return ranked(of_likeliest(paths, ((), ())), most)


def by_its_own_token(paths: tuple[Tokens, Tokens], most: int) -> Counts:
    chances = [
        [float(model(DRAFTS, i)(path[:j])[path[j]]) for j in range(K)]
        for i, path in enumerate(paths)
    ]
    return ranked(chances, most)


def as_many_as_are_likely_now(paths: tuple[Tokens, Tokens], most: int) -> Counts:
    """`most` from this step's drafts in place of finished steps."""
    survivals = [math.prod(row) for row in of_likeliest(paths, ((), ()))]
    return choose(paths, most + sum(survival > 0.3 for survival in survivals))


def without_those_before(paths: tuple[Tokens, Tokens], most: int) -> Counts:
    """By a draft's own chance, were those before it accepted: a later one may come first."""
    each = enumerate(of_likeliest(paths, ((), ())))
    slots = sorted((-chance, j, i) for i, row in each for j, chance in enumerate(row))
    first = [i for *_, i in slots[:most]]
    return first.count(0), first.count(1)


@cache
def law(rule: str, i: int, history: Tokens, path: Tokens, k: int) -> dict[Tokens, Fraction]:
    """The next LENGTH tokens behind a history, given the drafts, of which k are verified; with how
    likely these drafts are.
    """
    target, draft = model(TARGETS, i, history), model(DRAFTS, i, history)
    step = step_along(target, draft, path[:k])
    drawn = Fraction(1)
    for j, x in enumerate(path):
        drawn *= draft(path[:j])[x]
    found: dict[Tokens, Fraction] = defaultdict(Fraction)
    for passed in product([True, False], repeat=k):
        chance = drawn
        for ok, h in zip(passed, thresholds_of(rule, step), strict=True):
            chance *= h if ok else 1 - h
        if chance:
            accepted, last = settle(rule, step, passed)
            for y, p in enumerate(last):
                begun = (*path[:accepted], y)
                for rest, p_rest in continued(target, begun, LENGTH - len(begun), VOCAB):
                    found[begun + rest] += chance * p * p_rest
    return found


def paths() -> Iterator[tuple[Tokens, Tokens]]:
    each = [*product(range(VOCAB), repeat=K)]
    return product(each, each)


def distance(rule: str, most: int, choose: Choose) -> Fraction:
    """Between the joint law of both sequences and the targets'."""
    joint: dict[tuple[Tokens, Tokens], Fraction] = defaultdict(Fraction)
    for both in paths():
        counts = choose(both, most)
        laws = [law(rule, i, (), both[i], counts[i]) for i in range(2)]
        for (a, of_a), (b, of_b) in product(*(each.items() for each in laws)):
            joint[a, b] += of_a * of_b
    exact = [joint_of(model(TARGETS, i), LENGTH, VOCAB) for i in range(2)]
    assert sum(joint.values()) == 1
    return sum(
        (
            abs(joint[a, b] - of_a * of_b)
            for (a, of_a), (b, of_b) in product(*(e.items() for e in exact))
        ),
        ZERO,
    )


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("most", range(2 * K + 1))
def test_to_verify_the_likeliest_drafts_keeps_the_joint(rule: str, most: int) -> None:
    assert distance(rule, most, choose) == 0


def test_the_choice_depends_on_what_was_drafted() -> None:
    assert len({choose(both, 3) for both in paths()}) > 1


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "fault", [by_its_own_token, as_many_as_are_likely_now, without_those_before]
)
def test_a_choice_by_the_draft_itself_is_found_out(rule: str, fault: Choose) -> None:
    assert max(distance(rule, most, fault) for most in range(2 * K + 1)) > 0.01


def test_how_many_may_follow_from_the_drafts_of_the_step_before() -> None:
    """Also from those that were rejected, or not verified: they are not drawn again."""
    joint: dict[tuple[Tokens, Tokens], Fraction] = defaultdict(Fraction)
    for both in paths():
        counts = choose(both, 3)
        survivals = [math.prod(row) for row in of_likeliest(both, ((), ()))]
        most = 1 + sum(survival > 0.3 for survival in survivals)
        firsts = [first_step(i, both[i], counts[i]) for i in range(2)]
        for ends in product(*(first.items() for first in firsts)):
            (a, of_a), (b, of_b) = ends
            for (x, y), chance in second_step((a, b), most).items():
                joint[x, y] += of_a * of_b * chance
    exact = [joint_of(model(TARGETS, i), LENGTH, VOCAB) for i in range(2)]
    for (a, of_a), (b, of_b) in product(*(each.items() for each in exact)):
        assert joint[a, b] == of_a * of_b


def first_step(i: int, path: Tokens, k: int) -> dict[Tokens, Fraction]:
    """What a step emits, without what follows it."""
    step = step_along(model(TARGETS, i), model(DRAFTS, i), path[:k])
    drawn = Fraction(1)
    for j, x in enumerate(path):
        drawn *= model(DRAFTS, i)(path[:j])[x]
    found: dict[Tokens, Fraction] = defaultdict(Fraction)
    for passed in product([True, False], repeat=k):
        chance = drawn
        for ok, h in zip(passed, thresholds_of("token", step), strict=True):
            chance *= h if ok else 1 - h
        accepted, last = settle("token", step, passed)
        for y, p in enumerate(last):
            if chance * p:
                found[(*path[:accepted], y)] += chance * p
    return found


@cache
def second_step(
    histories: tuple[Tokens, Tokens], most: int
) -> dict[tuple[Tokens, Tokens], Fraction]:
    """The first LENGTH tokens of both sequences, of which these are known."""
    joint: dict[tuple[Tokens, Tokens], Fraction] = defaultdict(Fraction)
    for both in paths():
        counts = ranked(of_likeliest(both, histories), most)
        laws = [law("token", i, histories[i], both[i], counts[i]) for i in range(2)]
        for (a, of_a), (b, of_b) in product(*(each.items() for each in laws)):
            ends = [(histories[i] + x)[:LENGTH] for i, x in enumerate((a, b))]
            joint[ends[0], ends[1]] += of_a * of_b
    return joint
