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


class SearchedText(Protocol):
    """What is looked up for one request."""

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        """What may follow these known tokens, at most so many; None: nothing is known of it."""


MOST_PAUSE = 32  # tokens between lookups of a sequence: of so many sequences, or fewer
_GOLDEN = 0.618  # its multiples, modulo 1, are spread evenly

Wished = list[tuple[ScheduledRequest, list[int]]]


class Pauses:
    """How long lookups that bring nothing pause, over all sequences of a source, in tokens.

    The more sequences there are, the longer each pauses, so that a step has few such lookups.
    """

    _GROWTH = 1.3  # of a sequence's pauses
    _LONGER, _SHORTER = 1.1, 0.8  # the usual one, by a lookup in vain and by one drafted from
    _MOST_EACH = 4  # tokens of the longest pause for each sequence: a lookup every so many steps

    def __init__(self, most: int) -> None:
        self._most, self._usual = most, 1.0
        self._num_begun = 0

    def first(self) -> float:
        """The pause of a new sequence. They differ, so that some look up however short answers are:
        the next text may be another kind.
        """
        self._num_begun += 1
        is_useful = self._usual <= 1.0
        return 0.0 if is_useful else self._usual * (self._num_begun * _GOLDEN % 1.0)

    def after(self, pause: float, num_seqs: int) -> float:
        """The next pause of a sequence whose last one was so long, and brought nothing again."""
        most = max(self._most, self._MOST_EACH * num_seqs) if self._most else 0
        self._usual = min(most, max(1.0, self._LONGER * self._usual))
        return min(most, max(self._GROWTH * pause, self._usual))

    def end(self) -> None:
        """A sequence is drafted for."""
        self._usual *= self._SHORTER


class _Line:
    """What the text of one request has had next, and how often that came true.

    It learns from the tokens that come, whoever drafted them, and even if nobody did.

    A lookup takes the host's time, and beside a small model that is a part of every step. So each
    that is not drafted from lengthens the pause before the next.
    """

    def __init__(self, text: SearchedText, hits: Hits, pauses: Pauses, first: float) -> None:
        """`hits` and `pauses` are those of all sequences. Behind `first` tokens it looks first."""
        self.text, self._hits, self._pauses = text, hits, pauses
        self._own_hits = OwnHits()
        self._found: Found | None = None
        self._num_known = 0
        self._pause = 0.0
        self.next = first  # how many tokens must be known before the next lookup

    def drafts(self) -> None:
        """It is drafted from."""
        self._pause = self.next = 0.0
        self._pauses.end()

    def find(self, token_ids: list[int], num_seqs: int) -> tuple[Found, float] | None:
        """What may come next, and the chance of each token if those before it have come.

        `num_seqs` have lines of this source.
        """
        if len(token_ids) > self._num_known:
            self._learn(token_ids[self._num_known :])
            self._num_known = len(token_ids)
            self._pause = self._pauses.after(self._pause, num_seqs)
            self.next = self._num_known + self._pause
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
        text_of: Callable[[Request], SearchedText | None],
        slots: Slots,
        keep_answer: Callable[[Request], None] = lambda _: None,
        most_pause: int = MOST_PAUSE,
        *,
        looks_at_once: bool = False,
    ) -> None:
        """`keep_answer` gets each request that has ended. `looks_at_once`: a new sequence does not
        pause first.
        """
        self.name = name
        self._keep_answer = keep_answer
        self._text_of = text_of
        self._slots = slots
        self._hits, self._pauses = Hits(), Pauses(most_pause)
        self._looks_at_once = looks_at_once
        self._lines: dict[Request, _Line | None] = {}

    def forget(self, request: Request) -> None:
        self._lines.pop(request, None)
        self._keep_answer(request)

    def looks_up(self, request: Request) -> bool:
        return self._line(request) is not None

    def wish(self, request: Request) -> Wish | None:
        line = self._line(request)
        if line is None:
            return None
        is_due = len(request.token_ids) >= line.next
        sight = line.find(request.token_ids, len(self._lines)) if is_due else None
        request.next_wish = min(request.next_wish, line.next)
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

    def grant(self, request: Request) -> None:
        if (line := self._line(request)) is not None:
            line.drafts()
            request.next_wish = 0.0

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        wished = []
        for s in plan.emitting:
            if s.wish is not None and s.wish.source == self.name:
                wished.append((s, s.wish.drafts[: s.max_drafts]))
                self.grant(s.request)
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
            line, text = None, self._text_of(request)
            if text is not None:
                pause = 0.0 if self._looks_at_once else self._pauses.first()
                first = len(request.token_ids) + pause
                line = _Line(text, self._hits, self._pauses, first)
            self._lines[request] = line
        return self._lines[request]
