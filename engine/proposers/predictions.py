"""Drafts from what clients predict of their answers."""

import numpy as np

from ..request import Request
from .lookup import Found

MIN_TOKENS, MAX_TOKENS = 2, 32  # of an answer, by which its place in the prediction is found


def longest_suffix(
    text_np: np.ndarray, suffix_np: np.ndarray, min_tokens: int, max_tokens: int
) -> tuple[int, np.ndarray]:
    """The length of the longest suffix of `suffix_np` that occurs in a text, and where it ends
    there, in order.

    Shorter suffixes than `min_tokens` do not count, and longer ones than `max_tokens` are cut.
    Shape: [T], [S] -> [N], each in 1..T.
    """
    ends_np = np.flatnonzero(text_np == suffix_np[-1]) + 1
    longest, longest_np = 0, ends_np[:0]
    for n in range(1, min(max_tokens, len(suffix_np)) + 1):
        ends_np = ends_np[ends_np >= n]
        ends_np = ends_np[text_np[ends_np - n] == suffix_np[-n]]
        if len(ends_np) == 0:
            break
        if n >= min_tokens:
            longest, longest_np = n, ends_np
    return longest, longest_np


class Prediction:
    """A predicted answer, and how far the answer has come in it.

    The last tokens of the prompt stand before it. So its beginning is found as every other place
    is: by the tokens before it.
    """

    def __init__(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        self._text = prompt[-MAX_TOKENS:] + request.predicted_token_ids
        self._text_np = np.array(self._text, dtype=np.int32)
        self._place = 0  # behind the tokens that were found last
        self._num_matched = 0  # how many of them; 0: they were not found
        self._num_known = 0

    @classmethod
    def of(cls, request: Request) -> "Prediction | None":
        return cls(request) if request.predicted_token_ids else None

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        """What the prediction has after the last of these tokens, if it has them anywhere.

        Of several places the next one is taken: an answer mostly goes through its prediction from
        the beginning to the end.
        """
        come, self._num_known = token_ids[self._num_known :], len(token_ids)
        end = self._place + len(come)
        goes_on = self._num_matched > 0 and end < len(self._text)
        if goes_on and come == self._text[self._place : end]:  # no other place has more of it
            self._place = end
            self._num_matched = min(self._num_matched + len(come), MAX_TOKENS)
        elif come:
            suffix_np = np.array(token_ids[-MAX_TOKENS:], dtype=np.int32)
            self._num_matched, ends_np = longest_suffix(
                self._text_np[:-1], suffix_np, MIN_TOKENS, MAX_TOKENS
            )
            if self._num_matched:
                next_place = np.searchsorted(ends_np, self._place, "right") % len(ends_np)
                self._place = int(ends_np[next_place])
        if self._num_matched == 0:
            return None
        return Found(self._text[self._place : self._place + num_tokens], self._num_matched)
