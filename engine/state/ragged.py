"""Arrays of different lengths, concatenated into one."""

import numpy as np

NONE_NP = np.zeros(0, dtype=np.int64)  # no integers, or a batch that is all padding


def ragged_arange(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Concatenation of `starts[i] + arange(lens[i])`; starts, lens: [B] -> [sum(lens)]."""
    ends = np.cumsum(lens)
    offsets: np.ndarray = np.repeat(starts - ends + lens, lens)
    return offsets + np.arange(len(offsets))


def aligned(size: int, itemsize: int = 8) -> int:
    """`size` rounded up, so that what follows in the array starts at a multiple of 16 bytes.

    Allocations start there too, and Triton compiles a second kernel for pointers that do not.
    """
    at_once = 16 // itemsize
    return -(-size // at_once) * at_once
