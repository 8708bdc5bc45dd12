"""Drafts that end where the host looks at them one by one."""

import numpy as np

from outrider.engine.acceptance import Calibration
from outrider.engine.plan import Stopping
from outrider.kernels.verify.rank import LEAST, NUM_RANGES, WIDTH


def stopping_at(least: float, k: int) -> Stopping:
    """No draft follows drafts that are less likely than that, if what they say is true."""
    return Stopping(np.full(k, least), Calibration().by_range_np)


def as_known(chances_np: np.ndarray) -> np.ndarray:
    """What such chances are taken for: those in the middle of the ranges of their log odds."""
    odds_np = np.log(chances_np) - np.log1p(-chances_np)
    places_np = np.clip((odds_np - LEAST) / WIDTH, 0, NUM_RANGES - 1).astype(int)
    middle_np: np.ndarray = 1 / (1 + np.exp(-(LEAST + WIDTH * (places_np + 0.5))))
    return middle_np
