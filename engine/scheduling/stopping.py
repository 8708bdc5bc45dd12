"""Where drafts end that are looked at one by one."""

from itertools import accumulate

import numpy as np

from .price import Price

UNLIKELY = 0.1  # no draft pays below such a chance


def least_chances(
    price: Price, num_seqs: int, max_k: int, first_chance: float, best_rate: float
) -> np.ndarray:
    """For each number of drafts, the lowest chance that all are accepted at which more pay: one or
    several, as rows become dearer in steps.

    `best_rate` is the tokens of `num_seqs` sequences for a cost of 1 that a draft must be worth.
    Further drafts are taken to be accepted as often as first ones are (`first_chance`): later ones
    are made where drafts are good, and say too much of others. Shape: [max_k].
    """
    least_np = np.full(max_k, UNLIKELY)
    if not price.knows_drafting:
        return least_np
    costs = [price.of(num_seqs, num_seqs * (1 + k), k) for k in range(max_k + 1)]
    gains = [num_seqs * gain for gain in accumulate(first_chance**j for j in range(1, max_k))]
    for j in range(1, max_k):
        further = zip(costs[j + 1 :], gains, strict=False)
        least_np[j - 1] = min(best_rate * (cost - costs[j]) / gain for cost, gain in further)
    return least_np
