"""Drafts with a head that reads the target's hidden states, k_i drafts for each sequence.

Every pass of the target leaves its hidden states. After a step is verified, the head computes a row
for each row of that pass, whether or not anything is drafted. So its KV in the pages comes from
true states and true tokens. KV of rows after a rejected draft is garbage, like the target's own,
and will be overwritten.

So a head never falls behind, and cannot catch up either: states are gone after the step that
computed them. If an error leaves a gap in a sequence, that sequence decodes plainly from then on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ..api import ReportProgress
from ..logit_edits import LogitEdits
from ..models.heads.head import Head
from ..models.network import Network, Pass
from ..plan import DRAFTING_KINDS, Plan, ScheduledRequest, slots_of, wants_of
from ..state.phase import Phase, Shape, padded_sizes
from ..state.ragged import NONE_NP
from ..state.slots import Slots
from .draws import Draws, LogitsOf
from .proposer import Counts, Source


class Drafter(ABC):
    """How a head reads what the target computed, and how it drafts then."""

    # Computes the head's rows for a pass of the target: (integers, shape, taps, *BatchRows) -> any
    # tensor. Shape: taps [T, num_taps, target's hidden].
    read: Callable[..., Tensor]

    @abstractmethod
    def pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """The integers of `draft`; sequences with more drafts must come first."""

    @abstractmethod
    def draft(self, integers: Tensor, shape: Shape) -> Tensor:
        """Draw up to k drafts for each sequence; shape is (sequences, k, *DRAFTING_KINDS[i]).

        Returns any tensor. Shape: integers, see `pack`.
        """

    @abstractmethod
    def line(self, slots_np: np.ndarray, num_drafts_np: np.ndarray) -> LogitsOf:
        """A function that returns the logits of these sequences' drafts, one draft at a time."""


class HeadSource(Source):
    """Drafts with a head.

    Positions count from the tokens that the device knows, so drafts can be launched before the host
    has read the tokens that they follow. All are drawn in one phase on the device, with two
    exceptions: logits are edited by the host, or (on a CPU) it looks at how likely each draft is.
    """

    name = "draft_model"
    draws: Draws

    def __init__(
        self,
        head: Head,
        target: Network,
        drafter: Drafter,
        draws: Draws,
        slots: Slots,
        edits: LogitEdits,
    ) -> None:
        self.draws = draws
        self._slots = slots
        self._edits = edits
        self._head = head
        self._target = target
        self._drafter = drafter
        self._reads = Phase(drafter.read, slots.device)
        self._drafts = Phase(drafter.draft, slots.device)
        self.phases = draws.phase, self._reads, self._drafts

    def rehearse(self, scored: Pass) -> None:
        self._read_pass(scored)
        size = self._slots.max_num_seqs
        self._draft_for_dummies(size)
        logits = self.draws.distributions.logits
        self._edits.rehearse(logits.new_zeros(size, self._head.vocab_size))

    def rehearse_short(self, num_seqs: int, num_rows: int, scored: Pass) -> None:
        self._read_pass(scored)
        if num_rows == 1:
            self._draft_for_dummies(num_seqs)

    def _draft_for_dummies(self, size: int) -> None:
        k = self._slots.max_drawn
        packed = self._drafter.pack(NONE_NP, NONE_NP, size, k)
        for kind in DRAFTING_KINDS[:2]:  # with edits, and without
            self._drafts(packed, (size, k, *kind))

    def capture(self, report: ReportProgress) -> None:
        """Capture the head's pass for each captured pass of the target, and all drafting."""
        passes = self._target.captured
        for done, (shape, captured) in enumerate(passes.items()):
            report("capturing the head's passes", done, len(passes))
            self._reads.capture(NONE_NP, shape, _tensors(captured.output))
        sizes = padded_sizes(self._slots.max_num_seqs)
        for done, size in enumerate(sizes):
            report("capturing the head's drafts", done, len(sizes))
            for kind in DRAFTING_KINDS:
                every_k = range(self._slots.max_drawn, 0, -1)
                for k in padded_sizes(self._slots.max_drawn) if kind[-1] else every_k:
                    packed = self._drafter.pack(NONE_NP, NONE_NP, size, k)
                    self._drafts.capture(packed, (size, k, *kind))

    def propose(self, plan: Plan, wanted: Counts) -> Counts:
        together: list[ScheduledRequest] = []
        one_by_one: list[ScheduledRequest] = []
        need_host_np = self._edits.needing_host(slots_of(plan.scheduled))
        for scheduled, needs_host in zip(plan.scheduled, need_host_np.tolist(), strict=True):
            goes_on = scheduled.start == -1 and scheduled.memory.head_reads_along
            if goes_on and wanted.get(scheduled.slot, 0) > 0:
                alone = needs_host or (self.draws.stops_early and scheduled.least_chance > 0)
                (one_by_one if alone else together).append(scheduled)
        together.sort(key=lambda scheduled: -wanted[scheduled.slot])  # longest first
        counts: Counts = {}
        for drafting, draft in ((together, self._together), (one_by_one, self._in_turn)):
            if drafting:
                slots_np = slots_of(drafting)
                wanted_np = np.array([wanted[slot] for slot in slots_np.tolist()])
                counts |= zip(slots_np.tolist(), draft(drafting, wanted_np).tolist(), strict=True)
        return counts

    def _together(self, scheduled: list[ScheduledRequest], num_drafts_np: np.ndarray) -> np.ndarray:
        """Draw all drafts on the device; returns their numbers. Shape: [N] -> [N]."""
        slots_np, k = slots_of(scheduled), int(num_drafts_np[0])
        filters, draws, edits, *_ = wants_of(scheduled)
        shape = self._drafts.padded((len(scheduled), k, filters, draws, edits))
        self._drafts(self._drafter.pack(slots_np, num_drafts_np, *shape[:2]), shape)
        return num_drafts_np

    def _in_turn(self, scheduled: list[ScheduledRequest], num_drafts_np: np.ndarray) -> np.ndarray:
        line = self._drafter.line(slots_of(scheduled), num_drafts_np)
        return self.draws.in_turn(scheduled, num_drafts_np, line)

    def follow(self, plan: Plan, scored: Pass) -> None:
        """Compute the head's rows for all rows that the target computed in this step."""
        self._read_pass(scored)
        for scheduled in plan.scheduled:
            memory = scheduled.memory
            if memory.num_draft_computed_tokens == memory.num_computed_tokens:  # without a gap
                scheduled.draft_end = scheduled.relative_end + scheduled.num_made

    def _read_pass(self, scored: Pass) -> None:
        assert scored.shape is not None
        self._reads(NONE_NP, scored.shape, *_tensors(scored))


def _tensors(computed: Pass) -> tuple[Tensor, ...]:
    """The tensors of a pass that the head reads."""
    assert computed.taps is not None
    assert computed.rows is not None
    return computed.taps, *computed.rows
