"""Drafts from what clients predict of their answers."""

import numpy as np

from ..request import Request
from .ngram import ends_of_longest_suffix

MIN_TOKENS, MAX_TOKENS = 2, 32  # of an answer, by which its place in the prediction is found


class Prediction:
    """A predicted answer, and how far the answer has come in it.

    The last tokens of the prompt stand before it. So its beginning is found as every other place
    is: by the tokens before it.
    """

    def __init__(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        self._text = prompt[-MAX_TOKENS:] + request.predicted_token_ids
        self._text_np = np.array(self._text, dtype=np.int32)
        self._place = 0
        self._drafts: list[int] | None = []  # of the last step; None: they were the proposer's

    def next_drafts(self, request: Request, num_drafts: int) -> list[int] | None:
        """The next step's drafts, or none; None leaves them to the proposer.

        A step in flight is taken to bring what is predicted: its drafts if they were predicted, and
        one token more. Two steps have no drafts. One comes after drafts of the proposer, since
        nobody knows how many of them stand; the other after drafts that led away, since the
        proposer has not seen them.
        """
        place = self._place_after(request.token_ids)
        drafts: list[int] | None
        if not request.is_in_flight:
            drafts = None if place is None else self._from(place, num_drafts)
        elif place is None:
            drafts = [] if self._drafts else None
        elif self._drafts is None:
            drafts = []
        else:
            stand = self._drafts == self._from(place, len(self._drafts))
            drafts = self._from(place + 1 + stand * len(self._drafts), num_drafts)
        self._drafts = drafts if num_drafts else []
        return drafts

    def _place_after(self, token_ids: list[int]) -> int | None:
        """Where the prediction goes on after the last of these tokens, if anywhere.

        Of several places the next one is taken: an answer mostly goes through its prediction from
        the beginning to the end.
        """
        suffix_np = np.array(token_ids[-MAX_TOKENS:], dtype=np.int32)
        ends_np = ends_of_longest_suffix(self._text_np[:-1], suffix_np, MIN_TOKENS, MAX_TOKENS)
        if len(ends_np) == 0:
            return None
        self._place = int(ends_np[np.searchsorted(ends_np, self._place, "right") % len(ends_np)])
        return self._place

    def _from(self, place: int, num_tokens: int) -> list[int]:
        return self._text[place : place + num_tokens]
