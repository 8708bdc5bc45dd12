"""The interface of a source of drafts, which guesses the tokens that the target will produce."""

from abc import ABC, abstractmethod

from ..api import ReportProgress
from ..models.network import Pass
from ..request import Request
from ..scheduling.plan import Plan, SourceName, Wish
from .draws import Draws

Counts = dict[int, int]  # numbers of drafts, by slot


class Source(ABC):
    """Drafts for some of a plan's sequences: it writes tokens into their slots, after the known
    ones.

    What it drafts may depend on anything but on what the target makes of it. It counts positions
    from the tokens that the device knows.
    """

    name: SourceName
    draws: Draws | None = None  # what it draws drafts with; None: they are one-hot

    def looks_up(self, request: Request) -> bool:
        """Whether it may wish for drafts of this sequence."""
        return False

    def wish(self, request: Request) -> Wish | None:
        """What it would draft in the next step; None: it does not know yet, or nothing.

        Called once for every step that draws for it.
        """
        return None

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

    def rehearse(self, scored: Pass) -> None:
        """Run the largest passes that drafting may need over padding, after the target's."""
        return

    def rehearse_short(self, num_seqs: int, num_rows: int, scored: Pass) -> None:
        """Draft for dummy sequences of `num_rows` rows each, after the target's pass over them."""
        return

    def capture(self, report: ReportProgress) -> None:
        """Capture its passes as CUDA graphs."""
        return
