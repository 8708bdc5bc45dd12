"""Prompt lookup: propose what followed the last time that the same tokens occurred. No model."""

import numpy as np

from .lookup import Found

MOST_ALIKE = 32  # tokens that are compared to see how sure a place is


def ends_of_longest_suffix(
    text_np: np.ndarray, suffix_np: np.ndarray, min_tokens: int, max_tokens: int
) -> np.ndarray:
    """Where the longest suffix of `suffix_np` that occurs in a text ends there, in order.

    Shorter suffixes than `min_tokens` do not count, and longer ones than `max_tokens` are cut.
    Shape: [T], [S] -> [N], each in 1..T.
    """
    ends_np = np.flatnonzero(text_np == suffix_np[-1]) + 1
    longest_np = ends_np[:0]
    for n in range(1, min(max_tokens, len(suffix_np)) + 1):
        ends_np = ends_np[ends_np >= n]
        ends_np = ends_np[text_np[ends_np - n] == suffix_np[-n]]
        if len(ends_np) == 0:
            break
        if n >= min_tokens:
            longest_np = ends_np
    return longest_np


def num_alike(text_np: np.ndarray, suffix_np: np.ndarray) -> int:
    """How many tokens at the end of both are the same, up to MOST_ALIKE. Shape: [T], [S]."""
    most = min(len(text_np), len(suffix_np), MOST_ALIKE)
    differs_np = text_np[len(text_np) - most :] != suffix_np[len(suffix_np) - most :]
    return int(differs_np[::-1].argmax()) if differs_np.any() else most


class NgramLookup:
    """Finds where the last tokens of a sequence occurred before.

    It searches the whole sequence every time, as one array. For 100,000 tokens that takes less than
    a fifth of a millisecond; building an index of them would take half a second.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._tokens_np = np.zeros(0, dtype=np.int32)  # with room after the known tokens
        self._num_known = 0

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        """The tokens that followed the latest earlier occurrence of the longest known suffix.

        Where the known text ends they begin again: it is taken to repeat what it has said since.
        """
        text_np = self._known_np(token_ids)
        ends_np = ends_of_longest_suffix(text_np[:-1], text_np, self._min_tokens, self._max_tokens)
        if len(ends_np) == 0:
            return None
        end = int(ends_np[-1])
        period = len(token_ids) - end
        following = [token_ids[i % period - period] for i in range(num_tokens)]
        return Found(following, num_alike(text_np[:end], text_np))

    def _known_np(self, token_ids: list[int]) -> np.ndarray:
        """The whole sequence as an array; copies only tokens that are new since the last call."""
        num_tokens = len(token_ids)
        if num_tokens > len(self._tokens_np):
            self._tokens_np = np.resize(self._tokens_np, 2 * num_tokens)
        self._tokens_np[self._num_known : num_tokens] = token_ids[self._num_known :]
        self._num_known = num_tokens
        return self._tokens_np[:num_tokens]
