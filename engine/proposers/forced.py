"""Drafts what a grammar forces: where it leaves one text alone, that is drafted without a model."""

from collections.abc import Sequence

from ..plan import Plan
from ..request import Request
from ..state.slots import Slots
from .lookup import Found, Lookup, Wished
from .proposer import Counts

MOST_FORCED = 16  # drafts of a sequence in one step
# For `Found`: as sure as texts are of which so many tokens agree. Several tokens may begin the same
# text, of which the longest is drafted: the model may take a shorter one.
_CERTAIN, _LIKELY = 32, 3


class _Forced:
    """What the grammar of one request forces behind the known tokens."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.num_matched = _CERTAIN

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        grammar = self._request.grammar
        if grammar is None or self._request.is_in_flight or not grammar.drafts:
            return None
        return Found(grammar.drafts, self.num_matched)


class ForcedTokens(Lookup):
    """Drafts the tokens of which a grammar leaves no choice.

    It reads them off the masks that the step needs in any case, and so asks for these earlier.
    Behind a step in flight it knows nothing: the host must know all tokens to compute masks.
    """

    def __init__(self, token_bytes: Sequence[bytes], slots: Slots) -> None:
        super().__init__(
            "grammar", lambda r: _Forced(r) if r.params.grammar else None, slots, most_pause=0
        )
        self._token_bytes = token_bytes

    def prepare(self, most: dict[Request, int]) -> None:
        asking = [
            (request, num)
            for request, num in most.items()
            if (grammar := request.grammar) is not None
            and grammar.is_compiled
            and not (request.is_in_flight or grammar.masks)
        ]
        if not asking:
            return
        from ..grammars.grammar import compute_masks  # needs msgspec

        while asking:
            compute_masks([request.grammar for request, _ in asking if request.grammar])
            asking = [each for each in asking if self._goes_on(*each)]

    def _goes_on(self, request: Request, most: int) -> bool:
        """Add the forced token, if there is one; whether another mask may be asked for."""
        grammar, line = request.grammar, self._line(request)
        assert grammar is not None
        assert line is not None
        allowed = grammar.few_allowed()
        longest = max(allowed, key=self._text_of_token, default=None)
        if longest is None or len(grammar.masks) >= min(most, MOST_FORCED + 1):
            return False
        text = self._token_bytes[longest]
        if not all(text.startswith(self._token_bytes[token_id]) for token_id in allowed):
            return False
        is_first = not grammar.drafts
        num_matched = _CERTAIN if len(allowed) == 1 else _LIKELY
        forced = line.text
        assert isinstance(forced, _Forced)
        forced.num_matched = num_matched if is_first else min(num_matched, forced.num_matched)
        grammar.drafts = [*grammar.drafts, longest]
        return True

    def _text_of_token(self, token_id: int) -> int:
        return len(self._token_bytes[token_id])

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        for scheduled in plan.emitting:
            if (grammar := scheduled.request.grammar) is not None and scheduled.wish is None:
                grammar.set_drafts([])  # others draft
        return super().propose(plan, wanted)

    def _allowed(self, wished: Wished) -> Wished:
        for scheduled, drafts in wished:
            assert scheduled.request.grammar is not None
            scheduled.request.grammar.set_drafts(drafts)
        return wished
