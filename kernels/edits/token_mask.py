"""Masks of tokens, as grammar libraries lay them out: token x is bit x % 32 of word x // 32.

The processes that answer HTTP pack them too, so this file loads no torch.
"""

from collections.abc import Sequence

import numpy as np


def num_words(vocab_size: int) -> int:
    """int32 words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def token_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The mask with exactly these tokens, but for ids from `vocab_size` on.

    Shape: [num_words(vocab_size)] int32.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
