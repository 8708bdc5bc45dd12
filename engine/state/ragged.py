"""Arrays of different lengths, one after another in one array."""

import numpy as np


def ragged_arange(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Concatenation of `starts[i] + arange(lens[i])`; starts, lens: [B] -> [sum(lens)]."""
    ends = np.cumsum(lens)
    offsets: np.ndarray = np.repeat(starts - ends + lens, lens)
    return offsets + np.arange(len(offsets))


def aligned(size: int, itemsize: int = 8) -> int:
    """Room for `size` integers, so that what lies behind begins at 16 bytes, as all that is
    allocated does: Triton compiles a kernel anew for a pointer that does not.
    """
    at_once = 16 // itemsize
    return -(-size // at_once) * at_once
