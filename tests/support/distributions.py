"""Whether samples come from a distribution.

With n samples over K cells the empirical distribution satisfies, with probability 1 - delta:
TV <= sqrt(2 K / (pi n)) / 2 + sqrt(ln(1 / delta) / (2 n)). That holds for any n; Pearson's
chi-squared, which is sharper, needs cells that are expected often enough, so rare ones are counted
as one. (Drafts that share their noise pass the first, not the second.)
"""

import math
from collections import Counter

DELTA = 1e-6
DELTA_SIGMA = 4.7534  # a normal variable exceeds it with probability DELTA


def total_variation(p: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    n = counts.total()
    return 0.5 * sum(abs(p.get(c, 0.0) - counts[c] / n) for c in {*p, *counts})


def bound(num_cells: int, n: int) -> float:
    return 0.5 * math.sqrt(2 * num_cells / (math.pi * n)) + math.sqrt(math.log(1 / DELTA) / (2 * n))


def pearson(p: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, 0 where there are too few samples."""
    n = counts.total()
    cells = [(counts[c], n * p[c]) for c in p if n * p[c] >= 10]
    rare = n - sum(seen for seen, _ in cells), n - sum(expected for _, expected in cells)
    if rare[1] >= 10:
        cells.append(rare)
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), max(
        0, len(cells) - 1
    )


def of_limit(statistic: float, degrees: int) -> float:
    """A statistic as a multiple of its limit (Wilson and Hilferty's approximation)."""
    if degrees == 0:
        return 0.0
    spread = 2 / (9 * degrees)
    return statistic / (degrees * (1 - spread + DELTA_SIGMA * math.sqrt(spread)) ** 3)


def chi_squared(p: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    """Pearson's statistic as a multiple of its limit."""
    return of_limit(*pearson(p, counts))
