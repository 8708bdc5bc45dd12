"""Grids of test cases: every pair of values at once, the whole in `make sweep`."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values, as parameters of a test; those beyond a set in which
    every two values of different axes meet are marked sweep.
    """
    left = list(product(*(range(len(axis)) for axis in axes)))
    unmet = {pair for case in left for pair in _pairs(case)}
    kept = set()
    while unmet:
        best = max(left, key=lambda case: len(unmet & _pairs(case)))
        left.remove(best)
        kept.add(best)
        unmet -= _pairs(best)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)),
            marks=() if case in kept else pytest.mark.sweep,
        )
        for case in product(*(range(len(axis)) for axis in axes))
    ]


def _pairs(case: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(case), 2))
