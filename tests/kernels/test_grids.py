"""What is left for `make sweep` is not missed by `make test`."""

from itertools import combinations

from grids import pairwise


def test_cases_that_are_not_left_out_hold_every_pair() -> None:
    axes = ["abcd", "xyz", "12", "+-"]
    grid = pairwise(*axes)
    assert len({case.values for case in grid}) == 4 * 3 * 2 * 2
    kept = [case.values for case in grid if not case.marks]
    assert len(kept) <= 14
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in kept} == {(a, b) for a in one for b in other}
