"""Where a sequence's drafts end, if they are looked at one by one, as on a CPU.

    c[j] = chances[range of the log odds of draft j]    0 where these are NaN

No draft follows j + 1 of them if c[0] * … * c[j] is less than `least[j]`. The odds are those of the
draft's own probability at temperature 1, or of what a confidence head says. So whether a draft is
made depends on the drafts before it alone, and every rule of verification stays exact. (`chances`
and `least` must not depend on this step's drafts either.)
"""

from dataclasses import dataclass, field

import numpy as np

from .rank import LEAST, NUM_RANGES, WIDTH


@dataclass(slots=True)
class Stops:
    """Of N sequences, with up to K drafts each."""

    least_np: np.ndarray  # [N, K] float64; -inf: more follow
    chances_np: np.ndarray  # [N, NUM_RANGES] float64
    # [N, K] int32, of the drafts that were looked at: the ranges of their odds, as in rank.py, else
    # -1
    ranges_np: np.ndarray = field(init=False)
    _chance_np: np.ndarray = field(init=False)  # [N] of all drafts so far

    def __post_init__(self) -> None:
        self.ranges_np = np.full(self.least_np.shape, -1, dtype=np.int32)
        self._chance_np = np.ones(len(self.least_np))

    def look(self, seqs_np: np.ndarray, j: int, likely_np: np.ndarray) -> np.ndarray:
        """Whether more follow draft j of these sequences, which is as likely as that by itself.

        Shape: seqs_np [M] int64, likely_np [M] float32 -> [M] bool.
        """
        with np.errstate(divide="ignore"):
            places_np = (np.log(likely_np) - np.log1p(-likely_np) - LEAST) / WIDTH
        ranges_np = np.nan_to_num(places_np.clip(0, NUM_RANGES - 1), nan=-1).astype(np.int32)
        chances_np = np.where(ranges_np < 0, 0.0, self.chances_np[seqs_np, ranges_np])
        self._chance_np[seqs_np] *= chances_np
        self.ranges_np[seqs_np, j] = ranges_np
        go_on_np: np.ndarray = self._chance_np[seqs_np] >= self.least_np[seqs_np, j]
        return go_on_np
