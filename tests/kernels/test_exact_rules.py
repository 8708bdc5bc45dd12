"""Proof 1: the rules, enumerated in rational arithmetic, leave the target's joint as it is."""

from fractions import Fraction
from itertools import product

import pytest
from exact_rules import emitted, joint_of, random_model, settle, step_along, thresholds_of


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab", "k"), [(2, 1), (2, 3), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_rule_leaves_the_joint_distribution_exactly(
    rule: str, vocab: int, k: int, zeros: bool
) -> None:
    for seed in range(3):
        target = random_model(seed, vocab, zeros)
        draft = random_model(seed + 100, vocab, zeros)
        assert emitted(rule, target, draft, k, vocab) == joint_of(target, k + 1, vocab)


def test_block_accepts_no_fewer_tokens_than_token() -> None:
    def mean_accepted(rule: str, seed: int) -> Fraction:
        target, draft = random_model(seed, 3), random_model(seed + 50, 3)
        mean = Fraction(0)
        for path in product(range(3), repeat=2):
            step = step_along(target, draft, path)
            drawn = step.q[0][path[0]] * step.q[1][path[1]]
            for passed in product([True, False], repeat=2):
                chance = drawn
                for ok, h in zip(passed, thresholds_of(rule, step), strict=True):
                    chance *= h if ok else 1 - h
                mean += chance * settle(rule, step, passed)[0]
        return mean

    gains = [mean_accepted("block", seed) - mean_accepted("token", seed) for seed in range(8)]
    assert min(gains) >= 0
    assert max(gains) > 0
