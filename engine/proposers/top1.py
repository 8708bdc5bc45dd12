"""The draft model runs ahead, one token a pass, each sequence for its own k_i."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.verify.slot_rows import read_slots, write_draft
from outrider.kernels.verify.verify import draft_sample

from ..api import ReportProgress
from ..logit_edits import RequestRows
from ..models.paged_model import PagedModel
from ..scheduling.plan import Plan, ScheduledRequest, slots_of
from ..state.batch import HostBatch, packed_len
from ..state.host_copy import uploaded
from ..state.phase import Phase, Shape, padded_size, padded_sizes
from ..state.ragged import aligned
from ..state.slots import Slots
from .base import (
    SAMPLING_KINDS,
    DraftDistributions,
    Proposals,
    Proposer,
    sampling_kind,
)

# Below it another draft pays less than it costs: measured with the default pair, where anything
# from 0.05 to 0.2 is within 2% of the best for a draft of 0.07 to 0.11 of the target's cost.
_MIN_LIKELIHOOD = 0.1


@dataclass(slots=True)
class _Share:
    """What the draft does for one scheduled sequence in this step."""

    scheduled: ScheduledRequest
    num_unseen: int  # known tokens that it computes now
    num_drafts: int  # k_i; at most, until the drafts are drawn


class Top1Proposer(Proposer):
    """Drafts one line of tokens per sequence from a draft model, under the request's own sampling.

    Sequences that would outgrow the draft's context, or are not to be drafted for, are left out:
    they decode plainly in the same step and keep their place in its order. The draft's KV catches
    up with whatever it has not seen: two tokens after a fully accepted step, a prompt in chunks, a
    long gap after plain decoding.

    With `stops_early` a sequence gets no further draft once the draft model itself holds those it
    has for unlikely. Whether there is a next draft hangs on those before it alone, so that every
    rule stays exact. It reads each draft at once: nothing on a CPU, a wait on a GPU.
    """

    def __init__(
        self,
        draft: PagedModel,
        slots: Slots,
        vocab_size: int,
        max_num_batched_tokens: int,
        *,
        stops_early: bool = False,
    ) -> None:
        self._draft = draft
        self._slots = slots
        self._vocab_size = vocab_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._stops_early = stops_early
        self._phase = Phase(self._draw, slots.device)
        self._ahead = Phase(self._run_ahead, slots.device)
        self._sizes: list[int] = []  # captured, ascending
        self.distributions: DraftDistributions = DraftDistributions.empty(
            slots.max_num_seqs + 1, slots.max_drafts, draft.vocab_size, draft.dtype, slots.device
        )

    @property
    def _most_rows_ahead(self) -> int:
        """Of a pass that drafts ahead: a step's, and the two that each seat may not have seen."""
        return self._max_num_batched_tokens + 2 * self._slots.max_num_seqs

    def warm_ups(self) -> Iterator[Callable[[], Tensor]]:
        device = self._slots.device
        logits = torch.zeros(2, self._draft.vocab_size, dtype=self._draft.dtype, device=device)
        integers = uploaded(self._pad(np.zeros((4, 0), dtype=np.int64), 2), device)
        for kind in SAMPLING_KINDS:
            yield partial(self._draw, integers, (2, *kind), logits, *self.distributions)

    def capture(self, report: ReportProgress) -> None:
        """Capture the draft's steps, its catch-ups of two rows, its sampling, and all of these in
        one for drafting ahead.
        """
        progress = partial(report, "capturing the draft's graphs")
        logits = self._draft.capture(2, self._most_rows_ahead, False, progress)
        sizes = padded_sizes(self._slots.max_num_seqs)
        nobody = np.zeros(0, dtype=np.int64)
        for done, size in enumerate(sizes):
            report("capturing the draft's loops", done, len(sizes))
            for kind in SAMPLING_KINDS:
                integers_np = self._pad(np.zeros((4, 0), dtype=np.int64), size)
                kept = tuple(self.distributions)
                self._phase.capture(integers_np, (size, *kind), (logits[:size], *kept))
                for k in range(self._slots.max_drafts, 0, -1):
                    integers_np = self._pack_ahead(nobody, nobody, size, k)
                    self._ahead.capture(integers_np, (size, k, *kind), kept)
        self._sizes = sizes[::-1]

    def _propose(self, plan: Plan) -> Proposals:
        shares = self._divide(plan)
        logits = self._catch_up([share for share in shares if share.num_unseen > 0])
        drafting = [share for share in shares if share.num_unseen > 0 and share.num_drafts > 0]
        if drafting:
            scheduled = [share.scheduled for share in drafting]
            wanted_np = np.array([share.num_drafts for share in drafting])
            anchors_np = np.array([s.request.num_tokens for s in scheduled])
            num_drawn_np = self._draft_for(scheduled, wanted_np, anchors_np, logits)
            for share, num_drawn in zip(drafting, num_drawn_np.tolist(), strict=True):
                share.num_drafts = num_drawn
                share.scheduled.request.num_draft_computed_tokens += num_drawn - 1
        num_drafts = [share.num_drafts for share in shares if share.scheduled.samples]
        return Proposals(np.array(num_drafts, dtype=np.int64), self.distributions)

    def _propose_ahead(self, plan: Plan) -> None:
        ahead, unseen = [], []
        room = self._most_rows_ahead
        for scheduled in plan.sampled:
            num_unseen = _num_unseen_ahead(scheduled)
            if self._can_go_ahead(scheduled) and num_unseen <= room:
                ahead.append(scheduled)
                unseen.append(num_unseen)
                room -= num_unseen
        if not ahead:
            return
        wanted_np = np.array([scheduled.num_next_drafts for scheduled in ahead])
        if all(scheduled.num_drafts > 0 for scheduled in ahead):
            size, k = padded_size(len(ahead), self._sizes), int(wanted_np.max())
            self._ahead(
                self._pack_ahead(slots_of(ahead), wanted_np, size, k),
                (size, k, *sampling_kind(ahead)),
                *self.distributions,
            )
        else:
            unseen_np = np.array(unseen)
            logits = self._forward(
                slots_of(ahead), -unseen_np, unseen_np, np.ones_like(unseen_np), is_relative=True
            )
            self._draft_for(ahead, wanted_np, np.zeros_like(wanted_np), logits, is_relative=True)
        for scheduled in ahead:
            request = scheduled.request
            request.num_drafts_ahead = scheduled.num_next_drafts
            if scheduled.num_drafts == 0:  # what it knew before this step is computed now
                request.num_draft_computed_tokens = request.num_tokens

    def _can_go_ahead(self, scheduled: ScheduledRequest) -> bool:
        request, k = scheduled.request, scheduled.num_next_drafts
        if k == 0 or not scheduled.has_room_ahead:
            return False
        if request.slot in self._slots.edits:  # they need the tokens on the host
            return False
        # Of one that the draft did not run for in this step it is known how many tokens it draws.
        follows = request.num_draft_computed_tokens >= request.num_tokens
        num_known = request.num_tokens + scheduled.num_drafts + 1
        return (follows or scheduled.num_drafts == 0) and num_known + k <= self._draft.max_positions

    def _divide(self, plan: Plan) -> list[_Share]:
        """Separate the sequences that can be drafted for from those that decode plainly."""
        budget = self._max_num_batched_tokens
        shares = []
        for scheduled in plan.scheduled:
            request = scheduled.request
            num_ahead, request.num_drafts_ahead = request.num_drafts_ahead, 0
            if 0 < scheduled.num_drafts <= num_ahead:
                request.num_draft_computed_tokens = request.num_tokens + num_ahead - 1
                shares.append(_Share(scheduled, 0, scheduled.num_drafts))
                continue
            # The last draft is never fed back, so k drafts take k - 1 positions behind the known.
            room = self._draft.max_positions - request.num_tokens + 1
            num_drafts = max(0, min(scheduled.num_drafts, room))
            reads_prompt = scheduled.is_drafted_for and not scheduled.samples and room > 0
            follows = num_drafts > 0 or reads_prompt
            lag = scheduled.end - request.num_draft_computed_tokens
            num_unseen = min(lag, budget) if follows else 0
            budget -= num_unseen
            if num_unseen < lag:
                num_drafts = 0
            shares.append(_Share(scheduled, num_unseen, num_drafts))
        return shares

    def _catch_up(self, shares: list[_Share]) -> Tensor:
        """Compute what the draft has not seen, in one ragged batch.

        Returns: [sequences with k_i > 0, V'], the logits behind their last known token.
        """
        if not shares:
            return torch.empty(0)
        logits = self._forward(
            slots_of([share.scheduled for share in shares]),
            np.array([share.scheduled.request.num_draft_computed_tokens for share in shares]),
            np.array([share.num_unseen for share in shares]),
            np.array([int(share.num_drafts > 0) for share in shares]),
        )
        for share in shares:
            share.scheduled.request.num_draft_computed_tokens += share.num_unseen
        return logits

    def _draft_for(
        self,
        scheduled: list[ScheduledRequest],
        num_drafts_np: np.ndarray,
        anchors_np: np.ndarray,
        logits: Tensor,
        *,
        is_relative: bool = False,
    ) -> np.ndarray:
        """Draw up to k_i drafts for each sequence, writing them behind its known tokens.

        Arguments: [B] positions of the first drafts, and the logits [B, V'] in front of them.
        With `is_relative` position 0 is the first behind those that the last verification left.
        Returns how many they are: [B].
        """
        slots_np = slots_of(scheduled)
        num_drawn_np, likelihood_np = np.zeros_like(num_drafts_np), np.ones(len(scheduled))
        seqs_np = np.arange(len(scheduled))  # that are still drafted for
        self._edit(logits, slots_np, anchors_np)
        kind = sampling_kind(scheduled)
        for j in range(int(num_drafts_np.max())):
            offset_np, relative_np = np.full_like(slots_np, j), np.full_like(slots_np, is_relative)
            integers_np = np.stack((slots_np, anchors_np, offset_np, relative_np))
            size = padded_size(len(slots_np), self._sizes)
            token_ids = self._phase(
                self._pad(integers_np, size), (size, *kind), logits, *self.distributions
            )
            num_drawn_np[seqs_np] += 1
            goes_on_np = num_drafts_np[seqs_np] > j + 1
            if self._stops_early and not is_relative and goes_on_np.any():
                likelihood_np[seqs_np] *= _likelihood(logits, token_ids)
                goes_on_np &= likelihood_np[seqs_np] >= _MIN_LIKELIHOOD
            if not goes_on_np.any():
                break
            seqs_np = seqs_np[goes_on_np]
            slots_np, anchors_np = slots_np[goes_on_np], anchors_np[goes_on_np]
            ones_np = np.ones_like(slots_np)
            logits = self._forward(
                slots_np, anchors_np + j, ones_np, ones_np, is_relative=is_relative
            )
            self._edit(logits, slots_np, anchors_np + j + 1)
        return num_drawn_np

    def _draw(
        self,
        integers: Tensor,
        shape: Shape,
        logits: Tensor,
        kept_logits: Tensor,
        kept_state: Tensor,
    ) -> Tensor:
        """Draw one draft a row, write it to its slot, and keep what it was drawn from.

        Shape: integers [4, N or more], of each row its slot, the position of the step's first
        draft, how many come before this one, and whether positions count from the slot's known
        tokens; logits [N, V']; kept_logits [num_slots, K, V'], kept_state [num_slots, K, 4].
        """
        size, filters, samples = shape
        slot, anchor, offset, is_relative = integers[:, :size].unbind()
        rows = read_slots(self._slots.state, slot, anchor, 0, offset, is_relative)
        drawn = draft_sample(
            logits,
            rows.sampling,
            rows.position,
            rows.anchor,
            self._vocab_size,
            filters=bool(filters),
            samples=bool(samples),
        )
        kept = (kept_logits, kept_state) if samples else None  # greedy ones are verified without
        write_draft(self._slots.state, slot, rows.position, offset, drawn, logits, kept)
        return drawn.token_ids

    def _run_ahead(
        self, integers: Tensor, shape: Shape, kept_logits: Tensor, state: Tensor
    ) -> Tensor:
        """Draw up to k drafts a sequence behind what it will know, each pass followed by its draw.

        Shape: integers, see `_pack_ahead`; kept_logits, state as in `_draw`.
        """
        size, k, *kind = shape
        drawn = integers
        for j in range(k):
            batch_shape = _ahead_shape(size, j)
            batch_len, draws_len = packed_len(batch_shape), 4 * aligned(size)
            logits = self._draft.run(integers[:batch_len], batch_shape).logits
            draws = integers[batch_len : batch_len + draws_len].view(4, -1)
            drawn = self._draw(draws, (size, *kind), logits, kept_logits, state)
            integers = integers[batch_len + draws_len :]
        return drawn

    def _pack_ahead(
        self, slots_np: np.ndarray, num_drafts_np: np.ndarray, size: int, k: int
    ) -> np.ndarray:
        """For each of k passes its batch, of the sequences that go so far, and its draws."""
        parts = []
        for j in range(k):
            slots_np, num_drafts_np = slots_np[num_drafts_np > j], num_drafts_np[num_drafts_np > j]
            zeros_np, ones_np = np.zeros_like(slots_np), np.ones_like(slots_np)
            # Of what will be known the draft has seen all but one or two tokens: it computes two.
            starts_np, lens_np = (
                (zeros_np - 2, 2 * ones_np) if j == 0 else (zeros_np + j - 1, ones_np)
            )
            batch = HostBatch.build(slots_np, starts_np, lens_np, ones_np, is_relative=True)
            parts.append(batch.packed(_ahead_shape(size, j), self._slots.dummy))
            draws_np = np.stack((slots_np, zeros_np, zeros_np + j, ones_np))
            parts.append(self._pad(draws_np, size).ravel())
        return np.concatenate(parts)

    def _pad(self, integers_np: np.ndarray, size: int) -> np.ndarray:
        """Shape: [4, N] -> [4, size or more]; the rows behind are those of nobody."""
        padded = np.zeros((4, aligned(size)), dtype=np.int64)
        padded[0] = self._slots.dummy
        padded[:, : integers_np.shape[1]] = integers_np
        return padded

    def _edit(self, logits: Tensor, slots_np: np.ndarray, positions_np: np.ndarray) -> None:
        """In place, where the requests of the rows want it. Shape: [N, V'], positions_np [N].

        Rounding is no harm: drafts are drawn from what is then there, and that is what is kept.
        """
        edited_np = self._slots.edits.asked_by(slots_np)
        if edited_np.any():
            rows = RequestRows.one_each(slots_np, positions_np).take(edited_np)
            edited = self._slots.edits.apply(logits, rows).to(logits.dtype)
            logits[uploaded(rows.first_rows_np, logits.device)] = edited

    def _forward(
        self,
        slots_np: np.ndarray,
        starts_np: np.ndarray,
        query_lens_np: np.ndarray,
        num_logits_np: np.ndarray,
        *,
        is_relative: bool = False,
    ) -> Tensor:
        batch = HostBatch.build(
            slots_np, starts_np, query_lens_np, num_logits_np, is_relative=is_relative
        )
        return self._draft.forward(batch).logits


def _likelihood(logits: Tensor, token_ids: Tensor) -> np.ndarray:
    """What the draft model gives these tokens. Shape: [N, V'], [N] -> [N]."""
    probs = torch.softmax(logits, dim=-1).gather(1, token_ids[:, None])
    of_row: np.ndarray = probs.squeeze(1).float().numpy()
    return of_row


def _num_unseen_ahead(scheduled: ScheduledRequest) -> int:
    """Tokens that the draft has to compute behind this step, in front of its first draft."""
    request = scheduled.request
    if scheduled.num_drafts > 0:
        return 2  # of what will be known it has seen all but one or two
    return request.num_tokens + 1 - request.num_draft_computed_tokens


def _ahead_shape(size: int, j: int) -> tuple[int, int, int]:
    """Of pass j of drafting ahead."""
    return size, size * (2 if j == 0 else 1), size
