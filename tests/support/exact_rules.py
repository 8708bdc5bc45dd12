"""The rules of verification in rational arithmetic: the truth that the code is held to.

A model here is a function of a context (the tokens so far) to a list of Fractions. Everything is
enumerated; nothing is sampled.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import NamedTuple

Model = Callable[[tuple[int, ...]], list[Fraction]]
ZERO, ONE = Fraction(0), Fraction(1)


class Step(NamedTuple):
    """One request's distributions along one draft path."""

    p: list[list[Fraction]]  # k + 1 rows
    q: list[list[Fraction]]  # k rows
    drafts: tuple[int, ...]


def step_along(target: Model, draft: Model, path: tuple[int, ...]) -> Step:
    contexts = [path[:i] for i in range(len(path) + 1)]
    return Step([target(c) for c in contexts], [draft(c) for c in contexts[:-1]], path)


def normalised(weights: list[Fraction], otherwise: list[Fraction]) -> list[Fraction]:
    total = sum(weights, ZERO)
    return [w / total for w in weights] if total else otherwise


def residual(step: Step, row: int, scale: Fraction) -> list[Fraction]:
    """norm(max(scale p - q, 0)) at a row."""
    rest = [max(scale * p - q, ZERO) for p, q in zip(step.p[row], step.q[row], strict=True)]
    return normalised(rest, step.p[row])


def token_thresholds(step: Step) -> list[Fraction]:
    """Acceptance probability of every draft, min(1, p / q)."""
    return [
        min(ONE, step.p[i][x] / step.q[i][x]) if step.q[i][x] else ZERO
        for i, x in enumerate(step.drafts)
    ]


def block_scales(step: Step) -> list[Fraction]:
    """P_0 .. P_k."""
    scales = [ONE]
    for i, x in enumerate(step.drafts):
        ratio = step.p[i][x] / step.q[i][x] if step.q[i][x] else ZERO
        scales.append(min(ONE, scales[-1] * ratio))
    return scales


def block_thresholds(step: Step) -> list[Fraction]:
    """h_1 .. h_k."""
    scales, k = block_scales(step), len(step.drafts)
    thresholds = []
    for i in range(1, k):
        pairs = zip(step.p[i], step.q[i], strict=True)
        z = sum((max(scales[i] * p - q, ZERO) for p, q in pairs), ZERO)
        below = z + 1 - scales[i]
        thresholds.append(z / below if below else ONE)
    return [*thresholds, scales[k]] if k else []


def settle(rule: str, step: Step, passed: tuple[bool, ...]) -> tuple[int, list[Fraction]]:
    """Accepted drafts and the last token's distribution, given which tests u_i <= h_i passed."""
    k = len(step.drafts)
    if rule == "token":
        tau = next((i for i, ok in enumerate(passed) if not ok), k)
        scale = ONE
    else:
        tau = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        scale = block_scales(step)[tau]
    return tau, step.p[k] if tau == k else residual(step, tau, scale)


def thresholds_of(rule: str, step: Step) -> list[Fraction]:
    return token_thresholds(step) if rule == "token" else block_thresholds(step)


def emitted(rule: str, target: Model, draft: Model, k: int, vocab: int) -> dict[tuple, Fraction]:
    """Distribution of the k + 1 tokens that a step and plain sampling after it emit."""
    joint: dict[tuple, Fraction] = {}
    for path in product(range(vocab), repeat=k):
        step = step_along(target, draft, path)
        drawn = ONE
        for i, x in enumerate(path):
            drawn *= step.q[i][x]
        if not drawn:
            continue
        thresholds = thresholds_of(rule, step)
        for passed in product([True, False], repeat=k):
            chance = drawn
            for ok, h in zip(passed, thresholds, strict=True):
                chance *= h if ok else 1 - h
            if not chance:
                continue
            tau, last = settle(rule, step, passed)
            for y, p_last in enumerate(last):
                if p_last:
                    prefix = (*path[:tau], y)
                    for rest, p_rest in continued(target, prefix, k + 1 - len(prefix), vocab):
                        sequence = prefix + rest
                        joint[sequence] = joint.get(sequence, ZERO) + chance * p_last * p_rest
    return joint


def continued(
    target: Model, prefix: tuple[int, ...], length: int, vocab: int
) -> list[tuple[tuple[int, ...], Fraction]]:
    """Every continuation by plain sampling, with its probability."""
    found = [((), ONE)]
    for _ in range(length):
        found = [
            ((*rest, y), chance * target(prefix + rest)[y])
            for rest, chance in found
            for y in range(vocab)
            if target(prefix + rest)[y]
        ]
    return found


def joint_of(target: Model, length: int, vocab: int) -> dict[tuple, Fraction]:
    return {s: p for s, p in continued(target, (), length, vocab) if p}


def random_model(seed: int, vocab: int, zeros: bool = False) -> Model:
    """A context-dependent model with small rational probabilities."""

    def model(context: tuple[int, ...]) -> list[Fraction]:
        state = hash((seed, *context)) & 0x7FFFFFFF
        weights = []
        for _ in range(vocab):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            weights.append((state >> 16) % 8 + (0 if zeros else 1))
        if not any(weights):
            weights[0] = 1
        return [Fraction(w, sum(weights)) for w in weights]

    return model
