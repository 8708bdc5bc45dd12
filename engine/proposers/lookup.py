"""One-hot drafts that are looked up in a text: in the request's own, or in what it predicts."""

from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from outrider.kernels.verify.sampling import MAX_DRAFTS

from ..request import Request
from ..scheduling.plan import Plan, ScheduledRequest, SourceName, Wish
from ..state.slots import Slots
from .proposer import Counts, Source

# Tokens that must agree before a step goes without drafts, so that lookups may follow a model's.
SURE_TOKENS = 4


class Found(NamedTuple):
    """Where a text goes on."""

    token_ids: list[int]  # what follows the known tokens there
    num_matched: int  # how many tokens before that are the last known ones


class Text(Protocol):
    """What is looked up for one request."""

    def find(self, token_ids: list[int], num_tokens: int) -> Found | None:
        """What may follow these known tokens, at most so many; None: nothing is known of it."""


class Line:
    """The drafts of one request, step after step.

    A step in flight is assumed to bring what its text has next: its drafts, if they are the same,
    and one token more. Two steps have no drafts. One comes after drafts of another source, since
    nobody knows how many of them are accepted, if the text is sure enough; the other after drafts
    that led away, since no other source has seen them.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._drafts: list[int] | None = []  # of the last step; None: they are another source's

    def wish(self, request: Request) -> Wish | None:
        """The next drafts; None leaves the step to the next source."""
        found = self._text.find(request.token_ids, 2 * MAX_DRAFTS + 1)
        if not request.is_in_flight:
            return self._wish(found, 0) if found is not None else None
        has_drafts = bool(self._drafts)
        if found is None:
            return Wish([]) if has_drafts else None
        if self._drafts is None:
            return Wish([]) if found.num_matched >= SURE_TOKENS else None
        is_right = self._drafts == found.token_ids[: len(self._drafts)]
        wish = self._wish(found, 1 + is_right * len(self._drafts))
        return wish._replace(is_alone=has_drafts)

    def follow(self, drafts: list[int] | None) -> None:
        """What was drafted in the step; None: another source drafts."""
        self._drafts = drafts

    def _wish(self, found: Found, num_assumed: int) -> Wish:
        drafts = found.token_ids[num_assumed : num_assumed + MAX_DRAFTS]
        return Wish(drafts, found.num_matched, num_assumed, is_alone=False)


class Lookup(Source):
    """Drafts what a request's text has next, as far as its grammar allows.

    It wishes for as many drafts as it finds, whatever k is for other sources. The scheduler decides
    how many are worth their rows.
    """

    def __init__(
        self, name: SourceName, text_of: Callable[[Request], Text | None], slots: Slots
    ) -> None:
        self.name = name
        self._text_of = text_of
        self._slots = slots
        self._lines: WeakKeyDictionary[Request, Line | None] = WeakKeyDictionary()

    def looks_up(self, request: Request) -> bool:
        return self._line(request) is not None

    def wish(self, request: Request) -> Wish | None:
        line = self._line(request)
        wish = None if line is None else line.wish(request)
        return None if wish is None else wish._replace(source=self.name)

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        found = []
        for scheduled in plan.drawing:
            if (line := self._line(scheduled.request)) is None:
                continue
            drafts = self._drafts_of(scheduled)
            if drafts is not None:
                found.append((scheduled, drafts))
            line.follow([] if scheduled.max_drafts == 0 else drafts)
        self._slots.write_drafts([(scheduled.request, drafts) for scheduled, drafts in found])
        return {scheduled.slot: len(drafts) for scheduled, drafts in found}

    def _drafts_of(self, scheduled: ScheduledRequest) -> list[int] | None:
        """What it wished for, as far as there is room; None: others may draft."""
        grammar, wish = scheduled.request.grammar, scheduled.wish
        if wish is None or wish.source != self.name:
            return None
        drafts = wish.drafts[: scheduled.max_drafts]
        if drafts and grammar is not None:
            drafts = grammar.fitting(drafts)
        return drafts if drafts or wish.is_alone else None

    def _line(self, request: Request) -> Line | None:
        if request not in self._lines:
            text = self._text_of(request)
            self._lines[request] = None if text is None else Line(text)
        return self._lines[request]
