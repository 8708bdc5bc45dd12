"""That drafts are chosen for sequences by what was accepted before changes no distribution: every
outcome of two steps of two sequences is enumerated, under the `token` rule, with the real choice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from outrider.engine.acceptance import OwnAcceptance
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation
from outrider.engine.scheduling.trials import Choice

K, LENGTH = 2, 3  # most drafts of a step; tokens of each sequence that are compared
Tokens = tuple[int, ...]
Keeps = Callable[[Tokens], bool]  # of the drafts so far: whether the last of them is kept


def target(history: Tokens) -> tuple[float, float]:
    p = 0.15 + 0.6 * (sum(history) * 7 % 5) / 5 + 0.1 * (len(history) % 2)
    return p, 1 - p


def draft(history: Tokens) -> tuple[float, float]:
    q = 0.3 + 0.5 * (sum(history) * 3 % 4) / 4
    return q, 1 - q


def step(
    history: Tokens, k: int, keeps: Keeps = lambda _: True
) -> Iterator[tuple[Tokens, int, int, float]]:
    """Each outcome of a step: what it emits, its drafts, how many were accepted, and its chance."""
    for drafts in product((0, 1), repeat=k):
        chance, verified = 1.0, 0
        for j, x in enumerate(drafts):
            chance *= draft(history + drafts[:j])[x]
        while verified < k and keeps(drafts[: verified + 1]):
            verified += 1
        for j in range(verified + 1):
            before = history + drafts[:j]
            p = target(before)
            if j == verified:
                for bonus in (0, 1):
                    yield (*drafts[:j], bonus), verified, j, chance * p[bonus]
                break
            q, x = draft(before), drafts[j]
            residual = [max(0.0, p[t] - q[t]) for t in (0, 1)]
            for t in (0, 1):
                if residual[t] > 0.0:
                    rejected = chance * (1 - min(1.0, p[x] / q[x]))
                    yield (*drafts[:j], t), verified, j, rejected * residual[t] / sum(residual)
            chance *= min(1.0, p[x] / q[x])


def of_target(history: Tokens, num_tokens: int) -> Iterator[tuple[Tokens, float]]:
    for tokens in product((0, 1), repeat=num_tokens):
        chance = 1.0
        for j, t in enumerate(tokens):
            chance *= target(history + tokens[:j])[t]
        yield history + tokens, chance


def chosen(num_drafts: int, accepted: tuple[int, int]) -> list[int]:
    """What the engine gives each of two sequences of a budget, after a step of K drafts each."""
    adaptive, owns = AdaptiveSpeculation(K), (OwnAcceptance(), OwnAcceptance())
    for own, num_accepted in zip(owns, accepted, strict=True):
        own.observe(K, num_accepted, adaptive.acceptance.by_position)
    return adaptive._shares(Choice(K, num_drafts, 1.0, 1.0), owns)


def distance(num_drafts: int, keeps: Keeps) -> float:
    """Between the joint law of both sequences' first tokens and the target's."""
    law: dict[tuple[Tokens, Tokens], float] = defaultdict(float)
    starts = (1,), (0, 1)
    for first in product(step(starts[0], K), step(starts[1], K)):
        ks = chosen(num_drafts, (first[0][2], first[1][2]))
        ends: list[dict[Tokens, float]] = []
        for start, (emitted, _, _, _), k in zip(starts, first, ks, strict=True):
            end: dict[Tokens, float] = defaultdict(float)
            for more, _, _, chance in step(start + emitted, k, keeps):
                history = (emitted + more)[:LENGTH]
                for whole, rest in of_target(start + history, LENGTH - len(history)):
                    end[whole] += chance * rest
            ends.append(end)
        both = first[0][3] * first[1][3]
        for (a, of_a), (b, of_b) in product(ends[0].items(), ends[1].items()):
            law[a, b] += both * of_a * of_b
    exact = {
        (a, b): of_a * of_b
        for (a, of_a), (b, of_b) in product(
            of_target(starts[0], LENGTH), of_target(starts[1], LENGTH)
        )
    }
    assert sum(law.values()) == pytest.approx(1.0)
    return sum(abs(law[key] - exact[key]) for key in exact) / 2


@pytest.mark.parametrize("num_drafts", range(2 * K + 1))
def test_a_budget_shared_out_by_what_was_accepted_keeps_the_joint(num_drafts: int) -> None:
    assert distance(num_drafts, lambda _: True) < 1e-12


def test_a_cut_by_the_drafts_before_keeps_the_joint_and_one_by_the_draft_itself_does_not() -> None:
    assert distance(2 * K, lambda drafts: len(drafts) == 1 or drafts[-2] == 0) < 1e-12
    assert distance(2 * K, lambda drafts: drafts[-1] == 0) > 0.01


def test_the_budget_goes_to_whose_drafts_were_accepted() -> None:
    assert chosen(2, (2, 0)) == [2, 0]
    assert chosen(2, (0, 2)) == [0, 2]
    assert chosen(3, (1, 1)) == [2, 1]
