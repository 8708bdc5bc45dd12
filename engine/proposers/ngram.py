"""Prompt lookup: propose what followed the last time these words were said. No model, no KV."""

from weakref import WeakKeyDictionary

import numpy as np

from outrider.engine.config import SpeculationConfig
from outrider.engine.plan import Plan
from outrider.engine.proposers.base import Proposals, Proposer
from outrider.engine.request import Request
from outrider.engine.slots import Slots


class NgramIndex:
    """Where each n-gram of a sequence last ended; grows with the sequence."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._lengths = range(max_tokens, min_tokens - 1, -1)
        self._end_of: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def lookup(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """The tokens that followed the latest earlier occurrence of the longest known suffix."""
        # The suffix itself is not indexed yet, so that it cannot find itself.
        for end in range(self._num_indexed + 1, len(token_ids)):
            for n in self._lengths:
                if n <= end:
                    self._end_of[tuple(token_ids[end - n : end])] = end
            self._num_indexed = end
        for n in self._lengths:
            found = self._end_of.get(tuple(token_ids[-n:])) if n < len(token_ids) else None
            if found is not None:
                return token_ids[found : found + num_drafts]
        return []


class NgramProposer(Proposer):
    """One-hot drafts from each sequence's own text (prompt lookup decoding)."""

    def __init__(self, config: SpeculationConfig, slots: Slots) -> None:
        self._config = config
        self._slots = slots
        self._index_of: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def _propose(self, plan: Plan) -> Proposals:
        sampled = plan.sampled
        num_drafts_np = np.zeros(len(sampled), dtype=np.int64)
        for i, scheduled in enumerate(sampled):
            if scheduled.num_drafts == 0:
                continue
            request = scheduled.request
            index = self._index_of.get(request)
            if index is None:
                index = NgramIndex(self._config.ngram_min_tokens, self._config.ngram_max_tokens)
                self._index_of[request] = index
            found = index.lookup(request.token_ids, scheduled.num_drafts)
            if request.grammar is not None:
                found = request.grammar.fitting(found)
            self._slots.write_tokens(request, request.num_tokens, found)
            num_drafts_np[i] = len(found)
        return Proposals(num_drafts_np)
