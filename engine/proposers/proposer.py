"""Sources of drafts, and the chain of them that drafts for a plan."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import torch

from outrider.kernels.verify.sampling import STATE_LOG_Z

from ..api import ReportProgress, SourceName
from ..models.network import Pass
from ..plan import Plan, Wish
from ..request import Request
from ..state.host_copy import uploaded
from ..state.phase import Phase
from .draws import Draws

log = logging.getLogger(__name__)

Counts = dict[int, int]  # numbers of drafts, by slot


class Source(ABC):
    """Drafts for some of a plan's sequences: it writes tokens into their slots, after the known
    ones.

    What it drafts may depend on anything but on what the target makes of it. It counts positions
    from the tokens that the device knows.
    """

    name: SourceName
    draws: Draws | None = None  # what it draws drafts with; None: they are one-hot
    phases: Sequence[Phase[Any]] = ()  # of its own: their graphs read slots, or pages of the draft
    may_fail = True  # else the engine ends with it: other ranks are left in the middle of a pass

    def looks_up(self, request: Request) -> bool:
        """Whether it may wish for drafts of this sequence, until it ends."""
        return False

    def prepare(self, most: dict[Request, int]) -> None:
        """Called in each step before wishes are asked for, with the sequences that decode by a
        grammar, and how many questions each may ask it.
        """
        return

    def wish(self, request: Request) -> Wish | None:
        """What it would draft in the next step; None: it knows nothing, or draws its drafts.

        If it may know something later, it lowers `request.next_wish`.
        """
        return None

    def grant(self, request: Request) -> None:
        """Its wish is granted, in this step or, if the host must wait first, in the next."""
        return

    def can_draft(self, requests: list[Request]) -> list[Request]:
        """For which of these it could draft in the next step, if it draws its drafts."""
        return requests

    @abstractmethod
    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        """Draft for the sequences of `wanted`, at most so many tokens each; returns how many.

        Sequences that it leaves out may be drafted for by the next source. One with 0 gets no
        drafts in this step.
        """

    def follow(self, plan: Plan, scored: Pass) -> None:
        """Called with the target's pass after a step is verified, and before the next sequence is
        seated.
        """
        return

    def forget(self, request: Request) -> None:
        """Called when a sequence that it may draft for has ended."""
        return

    def rehearse(self, scored: Pass) -> None:
        """Run the largest passes that drafting may need over padding, after the target's."""
        return

    def rehearse_short(self, num_seqs: int, num_rows: int, scored: Pass) -> None:
        """Draft for dummy sequences of `num_rows` rows each, after the target's pass over them."""
        return

    def capture(self, report: ReportProgress) -> None:
        """Capture its passes as CUDA graphs."""
        return


class Proposer:
    """Each sequence is drafted for by the source that the plan names, or by a model.

    At most one source draws its drafts, with `draws`; a model or head.
    A source that fails leaves its sequences to the others, and the log has its first failure.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._failed: set[SourceName] = set()
        self._model = next((source for source in sources if source.draws), None)
        self.draws: Draws | None = self._model.draws if self._model else None

    def can_draft(self, requests: list[Request]) -> list[Request]:
        """As `Source.can_draft`, of the model or head, which alone draws its drafts."""
        if self._model is None:
            return []
        name = self._model.name
        return self._model.can_draft([request for request in requests if request.may_use(name)])

    def looks_up(self, request: Request) -> bool:
        """Whether a source may wish for drafts of this sequence."""
        return any(source.looks_up(request) for source in self._of(request))

    def prepare(self, most: dict[Request, int]) -> None:
        """As `Source.prepare`, each source with the sequences that may use it."""
        for source in self.sources:
            may = {request: num for request, num in most.items() if request.may_use(source.name)}
            try:
                source.prepare(may)
            except Exception:
                self._report(source)

    def wishes(self, request: Request) -> list[Wish]:
        """What each source would draft for a sequence in the next step, without a model.

        They say behind how many tokens of it they may have a wish again (`request.next_wish`): it
        is of no use to ask before.
        """
        wishes, request.next_wish = [], inf
        for source in self._of(request):
            try:
                if (wish := source.wish(request)) is not None:
                    wishes.append(wish)
            except Exception:
                request.next_wish = 0
                self._report(source)
        return wishes

    def grant(self, request: Request, wish: Wish) -> None:
        """As `Source.grant`."""
        for source in self._of(request):
            if source.name == wish.source:
                source.grant(request)

    def _of(self, request: Request) -> Iterator[Source]:
        return (source for source in self.sources if request.may_use(source.name))

    def _report(self, source: Source) -> None:
        """Log the exception at hand, if it is the first of its source."""
        if source.name not in self._failed:
            self._failed.add(source.name)
            others = [other.name for other in self.sources if other.name not in self._failed]
            log.exception(
                "the source %s failed to draft, and may do so again; %s",
                source.name,
                f"these go on: {', '.join(others)}" if others else "sequences decode plainly",
            )

    def propose(self, plan: Plan) -> list[int]:
        """Draft up to `max_drafts` tokens for each emitting sequence of a plan.

        Returns k_i of every sequence: that many drafts lie in its slot, after the known tokens.
        Without drafts it decodes plainly in the same step.
        """
        if not plan.concerns_sources:
            return [0] * len(plan.scheduled)
        left = {scheduled.slot: scheduled.max_drafts for scheduled in plan.emitting}
        drafted: Counts = {}
        for source in self.sources:
            try:
                counts = source.propose(plan, self._share_of(source, plan, left))
                if source.draws is None:
                    self._mark_one_hot([slot for slot, k in counts.items() if k > 0])
            except Exception:
                if not source.may_fail:
                    raise
                self._report(source)
                continue
            drafted |= counts
            left = {slot: k for slot, k in left.items() if slot not in counts}
            for scheduled in plan.emitting:
                if counts.get(scheduled.slot, 0) > 0:
                    scheduled.source = source.name
        return [drafted.get(scheduled.slot, 0) for scheduled in plan.scheduled]

    def _share_of(self, source: Source, plan: Plan, left: Counts) -> Counts:
        """How many drafts a source may make."""
        if source.draws is None:
            return left
        return {
            scheduled.slot: min(left[scheduled.slot], scheduled.max_drawn)
            for scheduled in plan.emitting
            if scheduled.slot in left and scheduled.request.may_use(source.name)
        }

    def _mark_one_hot(self, slots: list[int]) -> None:
        """The drafts of these slots were not drawn from what is kept there."""
        if self.draws is not None and slots:
            log_z = self.draws.distributions.state[..., STATE_LOG_Z]
            log_z.index_fill_(0, uploaded(torch.tensor(slots).numpy(), log_z.device), torch.nan)

    def follow(self, plan: Plan, scored: Pass) -> None:
        """As `Source.follow`. If a source fails, it drafts no more for the plan's sequences."""
        for source in self.sources:
            try:
                source.follow(plan, scored)
            except Exception:
                self._report(source)

    def forget(self, request: Request) -> None:
        """As `Source.forget`, of those that may draft for the sequence."""
        for source in self._of(request):
            try:
                source.forget(request)
            except Exception:
                self._report(source)
