"""Where drafts end that are looked at one by one."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from .price import Price

UNLIKELY = 0.1  # no draft pays below such a chance


def least_chances(
    price: Price, num_seqs: int, by_position: Sequence[float], best_rate: float
) -> np.ndarray:
    """For each number of drafts, the lowest chance that all are accepted at which more pay: one or
    several, as rows become dearer in steps.

    Further drafts are taken to be accepted as often as others of their position (`by_position`,
    [max_k]). `best_rate` is the tokens of `num_seqs` sequences for a cost of 1 that they must be
    worth. Shape: [max_k].
    """
    max_k = len(by_position)
    least_np = np.full(max_k, UNLIKELY)
    if not price.knows_drafting:
        return least_np
    costs = [price.of(num_seqs, num_seqs * (1 + k), k) for k in range(max_k + 1)]
    for j in range(1, max_k):
        gains = accumulate(accumulate(by_position[j:], mul))
        further = zip(costs[j + 1 :], gains, strict=True)
        prices = [(cost - costs[j]) / (num_seqs * gain) for cost, gain in further]
        least_np[j - 1] = best_rate * min(prices)
    return least_np
