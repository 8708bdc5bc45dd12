"""Where drafts end that are looked at one by one."""

import numpy as np

from outrider.kernels.verify.rank import NUM_RANGES
from outrider.kernels.verify.stops import Stops

FIRST_NP = np.array([0])


def stops(*least: float) -> Stops:
    """Of one sequence, whose drafts are as likely to be accepted as their range is high."""
    return Stops(np.array([least]), np.arange(NUM_RANGES)[None] / NUM_RANGES)


def look(of: Stops, *likely: float) -> list[bool]:
    each_np = np.array(likely, dtype=np.float32)
    return [bool(of.look(FIRST_NP, j, each_np[j : j + 1])[0]) for j in range(len(likely))]


def test_more_drafts_follow_while_all_so_far_are_likely_enough() -> None:
    likely = 0.5, 0.999, 0.1  # ranges 8, 21 and 3: 0.25, 0.656 and 0.094
    assert look(stops(0.25, 0.16, 0.0), *likely) == [True, True, True]
    assert look(stops(0.26, 0.17, 0.02), *likely) == [False, False, False]
    assert look(stops(-np.inf, 0.16, 0.016), *likely) == [True, True, False]


def test_the_ranges_of_drafts_that_were_looked_at_are_kept() -> None:
    of = stops(0.0, 0.0, 0.0, 0.0)
    look(of, 0.0, 1.0, 0.5)
    assert of.ranges_np.tolist() == [[0, NUM_RANGES - 1, 8, -1]]


def test_none_follows_a_draft_whose_odds_are_no_number() -> None:
    of = stops(0.01, 0.0)
    assert look(of, np.nan) == [False]
    assert of.ranges_np.tolist() == [[-1, -1]]
