"""A head reads the target's hidden states, then runs ahead, each sequence for its own k_i.

Every pass of the target leaves its hidden states. Once the step's tokens are verified, the head
computes a row for each of the pass: what it leaves in the pages is of true states and true tokens,
whether or not anybody is drafted for. Of rows behind a rejected draft it is garbage, like the
target's own, and overwritten. The row of each sequence's last accepted token, which the device
finds by itself, is where its next drafts begin.

So a head is never behind: what it has not read in the step that computed it, it can never read. A
sequence with such a gap, which only an error leaves, decodes plainly.
"""

from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..api import ReportProgress
from ..logit_edits import LogitEdits, RequestRows
from ..models.attention import PassContext
from ..models.eagle3 import Eagle3Head
from ..models.network import Pass
from ..models.paged_model import PagedModel
from ..request import Request
from ..scheduling.plan import Plan, ScheduledRequest, slots_of
from ..state.batch import BatchRows, ForwardBatch, HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Phase, Shape, padded_size, padded_sizes
from ..state.ragged import aligned
from ..state.slots import Slots
from .base import SAMPLING_KINDS, DraftDistributions, Proposer, sampling_kind
from .draws import MIN_LIKELIHOOD, Draws, likelihood


class Eagle3Proposer(Proposer):
    """Drafts one line of tokens a sequence from a head, under the request's own sampling.

    Positions count from the tokens that the device knows, so that drafts can be launched before the
    host has read what they follow. With `stops_early`, on a CPU, a sequence gets no further draft
    once the head itself holds those it has for unlikely: that hangs on those before it alone.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: PagedModel,
        slots: Slots,
        edits: LogitEdits,
        vocab_size: int,
        *,
        stops_early: bool = False,
    ) -> None:
        self._head = head
        self._target = target
        self._slots = slots
        self._edits = edits
        self._stops_early = stops_early
        self._draws = Draws(slots, vocab_size, head.vocab_size, head.dtype)
        self.distributions: DraftDistributions = self._draws.distributions
        num_slots = slots.max_num_seqs + 1
        # [num_slots, hidden] y of each sequence's last row
        self._last_rows = torch.zeros(
            num_slots, head.hidden_size, dtype=head.dtype, device=slots.device
        )
        # [max_num_seqs, V] logits by the target's ids; where the draft has no token, always -inf
        self._wide = torch.full(
            (slots.max_num_seqs if head.target_ids is not None else 0, head.vocab_size),
            -torch.inf,
            dtype=head.dtype,
            device=slots.device,
        )
        # Of the last rows: a sequence, and its epoch.
        self._holders: list[tuple[Request, int] | None] = [None] * num_slots
        self._gaps: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # epochs that have one
        self._reads = Phase(self._read, slots.device)
        self._drafts = Phase(self._draft, slots.device)
        self._sizes: list[int] = []  # captured, ascending

    def warm_ups(self) -> Iterator[Callable[[], Tensor]]:
        return self._draws.warm_ups()

    def rehearse(self) -> None:
        assert self._target.last_pass is not None
        shape, computed = self._target.last_pass
        self._reads(_NOTHING, shape, *_tensors(computed))
        nobody = np.zeros(0, dtype=np.int64)
        size, k = self._slots.max_num_seqs, self._slots.max_drafts
        packed = self._pack(nobody, nobody, size, k)
        self._drafts(packed, (size, k, *SAMPLING_KINDS[0]), *self.distributions)
        logits = self._logits(self._last_rows[:size])
        self._edits.rehearse(logits, RequestRows.of_nobody(self._slots.dummy, size))

    def rehearse_short(self, num_seqs: int, num_rows: int) -> None:
        assert self._target.last_pass is not None
        shape, computed = self._target.last_pass
        self._reads(_NOTHING, shape, *_tensors(computed))

    def capture(self, report: ReportProgress) -> None:
        """Capture the reading of each pass of the target that is captured, and loops of drafts."""
        passes = self._target.captured
        for done, (shape, computed) in enumerate(passes.items()):
            report("capturing the head's passes", done, len(passes))
            self._reads.capture(_NOTHING, shape, _tensors(computed))
        sizes = padded_sizes(self._slots.max_num_seqs)
        nobody = np.zeros(0, dtype=np.int64)
        for done, size in enumerate(sizes):
            report("capturing the head's loops", done, len(sizes))
            for kind in SAMPLING_KINDS:
                for k in range(self._slots.max_drafts, 0, -1):
                    packed = self._pack(nobody, nobody, size, k)
                    self._drafts.capture(packed, (size, k, *kind), tuple(self.distributions))
        self._sizes = sizes[::-1]

    def _propose(self, plan: Plan) -> None:
        together: list[ScheduledRequest] = []
        one_by_one: list[ScheduledRequest] = []
        edited_np = self._edits.asked_by(slots_of(plan.scheduled))
        for scheduled, is_edited in zip(plan.scheduled, edited_np.tolist(), strict=True):
            if self._holders[scheduled.slot or 0] != (scheduled.request, scheduled.epoch):
                scheduled.num_drafts = 0
            if scheduled.num_drafts > 0:
                (one_by_one if is_edited or self._stops_early else together).append(scheduled)
        if together:
            self._draft_together(together)
        if one_by_one:
            self._draft_one_by_one(one_by_one)

    def _follow(self, plan: Plan) -> None:
        """Compute a row for each that the target computed in this step."""
        assert self._target.last_pass is not None
        shape, computed = self._target.last_pass
        try:
            self._reads(_NOTHING, shape, *_tensors(computed))
        except Exception:
            self._gaps.update((s.request, s.epoch) for s in plan.scheduled)
            raise
        finally:
            for scheduled in plan.scheduled:
                request, epoch = scheduled.request, scheduled.epoch
                is_held = scheduled.samples and self._gaps.get(request) != epoch
                self._holders[scheduled.slot or 0] = (request, epoch) if is_held else None

    def _draft_together(self, scheduled: list[ScheduledRequest]) -> None:
        """Draw k_i drafts for each sequence in one loop on the device."""
        num_drafts_np = np.array([s.num_drafts for s in scheduled])
        order_np = np.argsort(-num_drafts_np, kind="stable")  # who goes on is in front
        size = padded_size(len(scheduled), self._sizes)
        k = int(num_drafts_np.max())
        self._drafts(
            self._pack(slots_of(scheduled)[order_np], num_drafts_np[order_np], size, k),
            (size, k, *sampling_kind(scheduled)),
            *self.distributions,
        )

    def _draft_one_by_one(self, scheduled: list[ScheduledRequest]) -> None:
        """Draw up to k_i drafts for each sequence, while the host looks at each or edits them."""
        slots_np = slots_of(scheduled)
        wanted_np = np.array([s.num_drafts for s in scheduled])
        num_drawn_np, likelihood_np = np.zeros_like(wanted_np), np.ones(len(scheduled))
        seqs_np = np.arange(len(scheduled))  # that are still drafted for
        kind, device = sampling_kind(scheduled), self._slots.device
        y = self._last_rows[uploaded(slots_np, device)]
        for j in range(int(wanted_np.max())):
            if j > 0:
                batch = self._rows_of(slots_np[seqs_np], j)
                packed = batch.packed(batch.shape, self._slots.dummy)
                y = self._advance(uploaded(packed, device), batch.shape, y)
            logits = self._edited(y, slots_np[seqs_np], np.full_like(seqs_np, j))
            draws = uploaded(self._draws.pack(slots_np[seqs_np], j, len(seqs_np)), device)
            token_ids = self._draws.draw(draws, kind, logits, self.distributions)
            num_drawn_np[seqs_np] += 1
            goes_on_np = wanted_np[seqs_np] > j + 1
            if self._stops_early and goes_on_np.any():
                likelihood_np[seqs_np] *= likelihood(logits, token_ids)
                goes_on_np &= likelihood_np[seqs_np] >= MIN_LIKELIHOOD
            if not goes_on_np.any():
                break
            y = y[uploaded(goes_on_np.nonzero()[0], device)]
            seqs_np = seqs_np[goes_on_np]
        for each, num_drawn in zip(scheduled, num_drawn_np.tolist(), strict=True):
            each.num_drafts = num_drawn

    def _read(self, integers: Tensor, shape: Shape, taps: Tensor, *rows: Tensor) -> Tensor:
        """Compute the rows of a pass, and put each sequence's last one where drafts begin.

        Shape: taps [T, num_taps, target's hidden], rows those of BatchRows.
        """
        batch = ForwardBatch.of_next_tokens(BatchRows(*rows), self._slots)
        y = self._head(self._head.fused(taps), batch.input_ids, PassContext(batch))
        # Of a sequence with n known tokens, row n - 2; of one in the midst of its prompt, any.
        first, end = batch.cu_seqlens_q[:-1].clamp_max(len(y) - 1), batch.cu_seqlens_q[1:]
        row = first + self._slots.num_tokens[batch.slots] - 2 - batch.positions[first]
        self._last_rows[batch.slots] = y[row.clamp_max(end - 1).clamp_min(first)]
        return y

    def _draft(
        self, integers: Tensor, shape: Shape, kept_logits: Tensor, kept_state: Tensor
    ) -> Tensor:
        """Draw up to k drafts a sequence, each behind the one before it.

        Shape: integers, see `_pack`; kept_logits, kept_state as in DraftDistributions.
        """
        size, k, filters, samples = shape
        batch_shape = (size, size, size)
        batch_len, draws_len = packed_len(batch_shape), 2 * aligned(size)
        kept = DraftDistributions(kept_logits, kept_state)
        y, drawn = kept_logits, integers
        for j in range(k):
            draws, integers = integers[:draws_len].view(2, -1), integers[draws_len:]
            if j == 0:
                y = self._last_rows[draws[0, :size]]
            else:
                y = self._advance(integers[:batch_len], batch_shape, y)
                integers = integers[batch_len:]
            kind = bool(filters), bool(samples)
            drawn = self._draws.draw(draws, kind, self._logits(y), kept)
        return drawn

    def _pack(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """For each of k drafts its draws, of the sequences that go so far, and but for the first
        the rows in front of them. Sequences with more drafts come first.
        """
        parts = []
        for j in range(k):
            slots_np = slots_np[: np.count_nonzero(num_drafts_np > j)]
            parts.append(self._draws.pack(slots_np, j, size).ravel())
            if j > 0:
                batch = self._rows_of(slots_np, j)
                parts.append(batch.packed((size, size, size), self._slots.dummy))
        return np.concatenate(parts)

    def _rows_of(self, slots_np: np.ndarray, j: int) -> HostBatch:
        """The rows in front of draft j > 0. With n known tokens draft j is to be token n + j, which
        row n + j - 2 predicts.
        """
        ones_np = np.ones_like(slots_np)
        return HostBatch.build(slots_np, (j - 2) * ones_np, ones_np, ones_np)

    def _advance(self, packed: Tensor, shape: tuple[int, int, int], y: Tensor) -> Tensor:
        """The next row of each sequence, over the draft that was drawn last and the row before it.

        Shape: y [N, hidden] -> [N, hidden].
        """
        rows = ForwardBatch.unpack(packed, shape, self._slots).rows
        batch = ForwardBatch.of_next_tokens(rows, self._slots)
        return self._head(self._head.recycled(y), batch.input_ids, PassContext(batch))

    def _logits(self, y: Tensor) -> Tensor:
        """By the target's ids, valid until the next call. Shape: [N, hidden] -> [N, V]."""
        logits = self._head.logits(y)
        if self._head.target_ids is None:
            return logits
        return self._wide[: len(logits)].index_copy_(1, self._head.target_ids, logits)

    def _edited(self, y: Tensor, slots_np: np.ndarray, drafts_np: np.ndarray) -> Tensor:
        """Logits as the requests of the rows want them, behind so many drafts. Shape: [N, V].

        Rounding is no harm: drafts are drawn from what is then there, and that is what is kept.
        """
        logits = self._logits(y)
        edited_np = self._edits.asked_by(slots_np)
        if edited_np.any():
            rows = RequestRows.one_each(slots_np, drafts_np).take(edited_np)
            edited = self._edits.apply(logits, rows).to(logits.dtype)
            index = uploaded(rows.first_rows_np, logits.device)
            logits = logits.index_copy(0, index, edited)
        return logits


_NOTHING = np.zeros(2, dtype=np.int64)


def _tensors(computed: Pass) -> tuple[Tensor, ...]:
    """What the head reads of a pass."""
    assert computed.taps is not None
    assert computed.rows is not None
    return computed.taps, *computed.rows
