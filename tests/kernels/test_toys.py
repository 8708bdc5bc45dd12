"""The toys of the rules at the top of `verify.py` are true: they keep the target's distribution."""

import re
from collections import Counter
from itertools import product
from textwrap import dedent, indent
from types import CodeType
from typing import Any

import numpy as np
import pytest
from distributions import chi_squared

from outrider.kernels.verify import verify

NUM_TOKENS, K, NUM_STEPS = 3, 2, 20_000


def code_of(rule: str) -> CodeType:
    found = re.search(rf"^    {rule}:.*?\n\n", verify.__doc__ or "", re.M | re.S)
    assert found is not None
    lines = dedent(found[0].replace(f"{rule}:", " " * len(f"{rule}:")))
    return compile(f"def step():\n{indent(lines, '    ')}", rule, "exec")


def distribution(model: int, prefix: tuple[int, ...]) -> np.ndarray:
    seed = (model, *prefix, 5)  # of distributions for which each part of a rule counts
    probabilities: np.ndarray = np.random.default_rng(seed).dirichlet(np.full(NUM_TOKENS, 2.0))
    return probabilities


@pytest.mark.deep
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_a_toy_keeps_the_joint_distribution_of_the_target(rule: str) -> None:
    rng, code = np.random.default_rng(0), code_of(rule)
    every = [t for length in range(K + 2) for t in product(range(NUM_TOKENS), repeat=length)]
    target, draft = ({t: distribution(model, t) for t in every} for model in (1, 2))

    def draw(weights_np: np.ndarray) -> int:
        return int(rng.choice(NUM_TOKENS, p=weights_np / weights_np.sum()))

    def emitted() -> tuple[int, ...]:
        drafts: list[int] = []
        noise_np = rng.gumbel(size=(K + 1, NUM_TOKENS))
        for i in range(K):
            q_np = draft[tuple(drafts)]
            is_alike = rule == "match"
            drafts.append(int(np.argmax(np.log(q_np) + noise_np[i])) if is_alike else draw(q_np))
        names: dict[str, Any] = {
            "k": K,
            "x": drafts,
            "p": [target[tuple(drafts[:i])] for i in range(K + 1)],
            "q": [*(draft[tuple(drafts[:i])] for i in range(K)), np.zeros(NUM_TOKENS)],
            "u": rng.random(K),
            "draw": draw,
            "max": np.maximum,
            "sum": np.sum,
            "argmax": lambda logits_np: int(np.argmax(logits_np)),
            "log": np.log,
            "gumbel": lambda seed, position: noise_np[position],
            "seed": 0,
            "position": 0,
        }
        exec(code, names)
        tokens: list[int] = names["step"]()
        while len(tokens) <= K:  # what comes after the step is the target's own
            tokens.append(draw(target[tuple(tokens)]))
        return tuple(tokens)

    expected = {
        t: float(np.prod([target[t[:i]][token] for i, token in enumerate(t)]))
        for t in every
        if len(t) == K + 1
    }
    assert chi_squared(expected, Counter(emitted() for _ in range(NUM_STEPS))) < 1
