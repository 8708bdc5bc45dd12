"""Prompt lookup: propose what followed the last time that the same tokens occurred. No model."""

from weakref import WeakKeyDictionary

import numpy as np

from ..config import SpeculationConfig
from ..request import Request
from ..scheduling.plan import Plan
from ..state.slots import Slots
from .base import Proposer


class NgramLookup:
    """Finds where the last tokens of a sequence occurred before.

    It searches the whole sequence every time, as one array. For 100,000 tokens that takes less than
    a fifth of a millisecond; building an index of them would take half a second.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._tokens_np = np.zeros(0, dtype=np.int32)  # with room after the known tokens
        self._num_known = 0

    def lookup(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """The tokens that followed the latest earlier occurrence of the longest known suffix."""
        text_np = self._known_np(token_ids)
        # [N] where earlier occurrences of the suffix end: first of one token, then of longer ones
        ends_np = np.flatnonzero(text_np[:-1] == text_np[-1]) + 1
        found = None
        for n in range(1, self._max_tokens + 1):
            if n > 1:
                ends_np = ends_np[ends_np >= n]
                ends_np = ends_np[text_np[ends_np - n] == text_np[-n]]
            if len(ends_np) == 0:
                break
            if n >= self._min_tokens:
                found = int(ends_np[-1])
        return token_ids[found : found + num_drafts] if found is not None else []

    def _known_np(self, token_ids: list[int]) -> np.ndarray:
        """The whole sequence as an array; copies only tokens that are new since the last call."""
        num_tokens = len(token_ids)
        if num_tokens > len(self._tokens_np):
            self._tokens_np = np.resize(self._tokens_np, 2 * num_tokens)
        self._tokens_np[self._num_known : num_tokens] = token_ids[self._num_known :]
        self._num_known = num_tokens
        return self._tokens_np[:num_tokens]


class NgramProposer(Proposer):
    """One-hot drafts from each sequence's own text (prompt lookup decoding)."""

    needs_host = True

    def __init__(self, config: SpeculationConfig, slots: Slots) -> None:
        self._config = config
        self._slots = slots
        self._text_of: WeakKeyDictionary[Request, NgramLookup] = WeakKeyDictionary()

    def _propose(self, plan: Plan) -> None:
        for scheduled in plan.sampled:
            if scheduled.num_drafts == 0:
                continue
            request = scheduled.request
            text = self._text_of.get(request)
            if text is None:
                text = NgramLookup(self._config.ngram_min_tokens, self._config.ngram_max_tokens)
                self._text_of[request] = text
            found = text.lookup(request.token_ids, scheduled.num_drafts)
            if request.grammar is not None:
                found = request.grammar.fitting(found)
            self._slots.write_drafts(request, found)
            scheduled.num_drafts = len(found)
