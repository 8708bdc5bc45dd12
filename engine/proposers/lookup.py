"""One-hot drafts that are looked up in a text: in the request's own, or in what it predicts."""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

from ..request import Request
from ..scheduling.plan import Plan, SourceName
from ..state.slots import Slots
from .base import Counts, Source


class Text(Protocol):
    """What is looked up for one request."""

    def next_drafts(self, request: Request, num_drafts: int) -> list[int] | None:
        """At most so many drafts for the next step; called for every step that samples.

        None leaves the step to the next source, and [] leaves it without drafts.
        """


class Lookup(Source):
    """Drafts what a request's text has next, as far as its grammar allows."""

    def __init__(
        self,
        name: SourceName,
        text_of: Callable[[Request], Text | None],
        slots: Slots,
        *,
        needs_host: bool,
    ) -> None:
        self.name = name
        self.needs_host = needs_host
        self._text_of = text_of
        self._slots = slots
        self._texts: WeakKeyDictionary[Request, Text | None] = WeakKeyDictionary()

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        found = []
        for scheduled in plan.sampled:
            if scheduled.slot in wanted:
                drafts = self._look_up(scheduled.request, wanted[scheduled.slot])
                if drafts is not None:
                    found.append((scheduled, drafts))
        self._slots.write_drafts([(scheduled.request, drafts) for scheduled, drafts in found])
        return {scheduled.slot: len(drafts) for scheduled, drafts in found}

    def _look_up(self, request: Request, num_drafts: int) -> list[int] | None:
        if request not in self._texts:
            self._texts[request] = self._text_of(request)
        text = self._texts[request]
        drafts = None if text is None else text.next_drafts(request, num_drafts)
        if drafts and request.grammar is not None:
            return request.grammar.fitting(drafts) or None
        return drafts
