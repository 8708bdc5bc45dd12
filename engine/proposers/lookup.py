"""One-hot drafts that are looked up in a text: in the request's own, or in what it predicts."""

from collections.abc import Callable
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple, Protocol

from outrider.kernels.verify.sampling import MAX_DRAFTS

from ..acceptance import Hits, OwnHits
from ..api import SourceName
from ..plan import Plan, ScheduledRequest, Wish
from ..request import Request
from ..state.slots import Slots
from .proposer import Counts, Source


class Found(NamedTuple):
    """Where a text goes on."""

    token_ids: list[int]  # what follows the known tokens there
    num_matched: int  # how many tokens before that are the last known ones
    # Of each token, among the places that agree with as many: how many go on so until there.
    shares: list[float] | None = None  # None: all
    place: int = 0


class Text(Protocol):
    """What is looked up for one request."""

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        """What may follow these known tokens, at most so many; None: nothing is known of it."""


MOST_PAUSE = 32  # tokens between lookups of a sequence

Wished = list[tuple[ScheduledRequest, list[int]]]


class Pauses:
    """How long lookups that bring nothing pause, over all sequences of a source, in tokens."""

    _GROWTH = 1.3  # of a sequence's pauses
    _LONGER, _SHORTER = 1.1, 0.8  # the usual one, by a lookup in vain and by one drafted from

    def __init__(self, most: int) -> None:
        self._most, self._usual = most, 1.0

    def after(self, pause: float) -> float:
        """The next pause of a sequence whose last one was so long, and brought nothing again."""
        self._usual *= self._LONGER
        self._usual = min(self._most, max(1.0, self._usual))
        return min(self._most, max(self._GROWTH * pause, self._usual))

    def end(self) -> None:
        """A sequence is drafted for."""
        self._usual *= self._SHORTER


class _Line:
    """What the text of one request has had next, and how often that came true.

    It learns from the tokens that come, whoever drafted them, and even if nobody did.

    A lookup takes the host's time, and beside a small model that is a part of every step. So each
    that is not drafted from lengthens the pause before the next, up to MOST_PAUSE tokens. A new
    sequence takes over the pause that is usual.
    """

    def __init__(self, text: Text, hits: Hits, pauses: Pauses) -> None:
        """`hits` and `pauses` are those of all sequences."""
        self.text, self._hits, self._pauses = text, hits, pauses
        self._own_hits = OwnHits()
        self._found: Found | None = None
        self._num_known = 0
        self._pause = 0.0

    def is_due(self, num_known: int) -> bool:
        """Whether to look: at first, again behind the same tokens, or after a pause."""
        since = num_known - self._num_known
        return since in (0, num_known) or since >= self._pause

    def drafts(self) -> None:
        """It is drafted from in this step or, if the host must wait, in the next."""
        self._pause = 0.0
        self._pauses.end()

    def find(self, token_ids: list[int]) -> tuple[Found, float] | None:
        """What may come next, and the chance of each token if those before it have come."""
        if len(token_ids) > self._num_known:
            self._learn(token_ids[self._num_known :])
            self._num_known, self._pause = len(token_ids), self._pauses.after(self._pause)
        self._found = found = self.text.find(token_ids, 2 * MAX_DRAFTS + 1)
        if found is None:
            return None
        of_all = self._hits.chance(found.num_matched)
        return found, self._own_hits.chance(found.num_matched, of_all)

    def _learn(self, come: list[int]) -> None:
        if self._found is None or not come:
            return
        pairs = zip(self._found.token_ids, come, strict=False)
        are_right = [expected == token_id for expected, token_id in pairs]
        num_right = [*are_right, False].index(False)
        num_tried = min(num_right + 1, len(are_right))
        self._hits.observe(self._found.num_matched, num_tried, num_right)
        self._own_hits.observe(num_tried, num_right)


class Lookup(Source):
    """Drafts what a request's text has next, as far as its grammar allows.

    It wishes for as many drafts as it finds, whatever k is for other sources. The scheduler decides
    how many are worth their rows.

    A step in flight is assumed to bring what the text has next: its drafts, if they were looked up
    and are the same, and one token more. Of a model's drafts nobody knows how many are accepted: a
    step must pass without any before lookups can follow.
    """

    def __init__(
        self,
        name: SourceName,
        text_of: Callable[[Request], Text | None],
        slots: Slots,
        keep_answer: Callable[[Request], None] = lambda _: None,
        most_pause: int = MOST_PAUSE,
    ) -> None:
        """`keep_answer` gets each request that has ended."""
        self.name = name
        self._keep_answer = keep_answer
        self._text_of = text_of
        self._slots = slots
        self._hits, self._pauses = Hits(), Pauses(most_pause)
        self._lines: dict[Request, _Line | None] = {}

    def forget(self, request: Request) -> None:
        self._lines.pop(request, None)
        self._keep_answer(request)

    def looks_up(self, request: Request) -> bool:
        return self._line(request) is not None

    def wish(self, request: Request) -> Wish | None:
        line = self._line(request)
        if line is None or not line.is_due(len(request.token_ids)):
            return None
        sight = line.find(request.token_ids)
        if sight is None:
            return None
        found, chance = sight
        coming, num_assumed = request.drafts_in_flight, 0
        if request.is_in_flight:
            is_right = coming is not None and coming == found.token_ids[: len(coming)]
            num_assumed = 1 + (len(coming) if coming and is_right else 0)
        drafts = found.token_ids[num_assumed : num_assumed + MAX_DRAFTS]
        chances = [*accumulate(repeat(chance, num_assumed + len(drafts)), mul)]
        if found.shares:
            chances = [c * share for c, share in zip(chances, found.shares, strict=False)]
        return Wish(self.name, drafts, chances[num_assumed:], waits=coming is None)

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        wished = []
        for s in plan.drawing:
            if s.wish is not None and s.wish.source == self.name:
                wished.append((s, s.wish.drafts[: s.max_drafts]))
                if (line := self._line(s.request)) is not None:
                    line.drafts()
        found = [(s.request, drafts) for s, drafts in self._allowed(wished) if drafts]
        self._slots.write_drafts(found)
        return {request.slot: len(drafts) for request, drafts in found if request.slot is not None}

    def _allowed(self, wished: Wished) -> Wished:
        """As far as their grammars allow. Where none is left, others may draft."""
        bound = [(s.request.grammar, ids) for s, ids in wished if s.request.grammar is not None]
        if bound:
            from ..grammars.grammar import fit_drafts  # needs msgspec

            fit_drafts([grammar for grammar, _ in bound], [drafts for _, drafts in bound])
        return [(s, s.request.grammar.drafts if s.request.grammar else ids) for s, ids in wished]

    def _line(self, request: Request) -> _Line | None:
        if request not in self._lines:
            text = self._text_of(request)
            self._lines[request] = None if text is None else _Line(text, self._hits, self._pauses)
        return self._lines[request]
