"""Ranges of different lengths, one after another in one array."""

import numpy as np


def ragged_arange(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Concatenation of `starts[i] + arange(lens[i])`; starts, lens: [B] -> [sum(lens)]."""
    ends = np.cumsum(lens)
    offsets: np.ndarray = np.repeat(starts - ends + lens, lens)
    return offsets + np.arange(len(offsets))
