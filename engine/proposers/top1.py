"""The draft model runs ahead, one token a pass, each sequence for its own k_i."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.engine.api import ReportProgress
from outrider.engine.batch import HostBatch
from outrider.engine.logit_edits import RequestRows
from outrider.engine.paged_model import PagedModel
from outrider.engine.phase import Phase, Shape, padded_size, padded_sizes
from outrider.engine.plan import Plan, ScheduledRequest, slots_of
from outrider.engine.proposers.base import (
    SAMPLING_KINDS,
    DraftDistributions,
    Proposals,
    Proposer,
    sampling_kind,
)
from outrider.engine.slots import Slots
from outrider.kernels.verify import draft_sample


@dataclass(slots=True)
class _Share:
    """What the draft does for one scheduled sequence in this step."""

    scheduled: ScheduledRequest
    num_unseen: int  # known tokens that it computes now
    num_drafts: int  # k_i


class Top1Proposer(Proposer):
    """Drafts one line of tokens per sequence from a draft model, under the request's own sampling.

    Sequences that would outgrow the draft's context, or are not to be drafted for, are left out:
    they decode plainly in the same step and keep their place in its order. The draft's KV catches
    up with whatever it has not seen: two tokens after a fully accepted step, a prompt in chunks, a
    long gap after plain decoding.
    """

    def __init__(
        self, draft: PagedModel, slots: Slots, vocab_size: int, max_num_batched_tokens: int
    ) -> None:
        self._draft = draft
        self._slots = slots
        self._vocab_size = vocab_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._phase = Phase(self._draw, slots.device)
        self._sizes: list[int] = []  # captured, ascending
        # One row more than there are sequences: padding writes there.
        self._kept = DraftDistributions.empty(
            slots.max_num_seqs + 1, slots.max_drafts, draft.vocab_size, draft.dtype, slots.device
        )

    def capture(self, report: ReportProgress) -> DraftDistributions:
        """Capture the draft's steps, its catch-ups of two rows, and its sampling."""
        self._draft.capture((1, 2), False, partial(report, "capturing the draft's graphs"))
        sizes = padded_sizes(self._slots.max_num_seqs)
        logits = self._kept.logits.new_zeros(sizes[0], self._draft.vocab_size)
        for size in sizes:
            for kind in SAMPLING_KINDS:
                integers_np = self._pad(np.zeros((4, 0), dtype=np.int64), size)
                tensors = (logits[:size], self._kept.logits, self._kept.state)
                self._phase.capture(integers_np, (size, *kind), tensors)
        self._sizes = sizes[::-1]
        return self._kept

    def _propose(self, plan: Plan) -> Proposals:
        shares = self._divide(plan)
        num_drafts_np = np.array(
            [share.num_drafts for share in shares if share.scheduled.samples], dtype=np.int64
        )
        logits = self._catch_up([share for share in shares if share.num_unseen > 0])
        if not num_drafts_np.any():
            return Proposals(num_drafts_np)
        distributions = self._run_ahead(plan.sampled, num_drafts_np, logits)
        return Proposals(num_drafts_np, distributions)

    def _divide(self, plan: Plan) -> list[_Share]:
        """Separate the sequences that can be drafted for from those that decode plainly."""
        budget = self._max_num_batched_tokens
        shares = []
        for scheduled in plan.scheduled:
            request = scheduled.request
            # The last draft is never fed back, so k drafts take k - 1 positions behind the known.
            room = self._draft.max_positions - request.num_tokens + 1
            num_drafts = max(0, min(scheduled.num_drafts, room))
            follows = num_drafts > 0 or (not scheduled.samples and room > 0)
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

    def _run_ahead(
        self, sampled: list[ScheduledRequest], num_drafts_np: np.ndarray, logits: Tensor
    ) -> DraftDistributions:
        """Draw k_i drafts for each sampled sequence, writing them behind its known tokens."""
        slots_np = slots_of(sampled)
        anchors_np = np.array([s.request.num_tokens for s in sampled])
        rows_np = np.flatnonzero(num_drafts_np > 0)  # batch_idx of each logits row
        logits = self._edited(logits, slots_np[rows_np], anchors_np[rows_np])
        kept = self._kept
        if logits.dtype != kept.logits.dtype:  # edited: rounding would make it another distribution
            kept = DraftDistributions.empty(
                len(sampled), self._slots.max_drafts, logits.shape[1], logits.dtype, logits.device
            )
        kind = sampling_kind(sampled)
        for j in range(int(num_drafts_np.max())):
            slot_np, anchor_np = slots_np[rows_np], anchors_np[rows_np]
            kept_np = rows_np * kept.logits.shape[1] + j
            integers_np = np.stack((slot_np, anchor_np + j, anchor_np, kept_np))
            size = len(rows_np)
            if kept is self._kept:
                size = padded_size(size, self._sizes)
            self._phase(
                self._pad(integers_np, size), (size, *kind), logits, kept.logits, kept.state
            )
            rows_np = rows_np[num_drafts_np[rows_np] > j + 1]
            if len(rows_np):
                ones = np.ones_like(rows_np)
                position_np = anchors_np[rows_np] + j
                logits = self._forward(slots_np[rows_np], position_np, ones, ones)
                logits = self._edited(logits, slots_np[rows_np], position_np + 1)
        for scheduled, num_drafts in zip(sampled, num_drafts_np.tolist(), strict=True):
            scheduled.request.num_draft_computed_tokens += max(0, num_drafts - 1)
        return DraftDistributions(kept.logits[: len(sampled)], kept.state[: len(sampled)])

    def _draw(
        self, integers: Tensor, shape: Shape, logits: Tensor, kept_logits: Tensor, state: Tensor
    ) -> Tensor:
        """Draw one draft a row, write it to its slot, and keep what it was drawn from.

        Shape: integers [4, N], of each row its slot, position, the step's first, and where to keep
        it; logits [N, V']; kept_logits [B, K, V'], state [B, K, 4].
        """
        _, filters, samples = shape
        slot, position, anchor, kept = integers.unbind()
        drawn = draft_sample(
            logits,
            self._slots.sampling_of(slot),
            position,
            anchor,
            self._vocab_size,
            filters=bool(filters),
            samples=bool(samples),
        )
        self._slots.token_ids[slot, position] = drawn.token_ids.int()
        kept_logits.flatten(0, 1).index_copy_(0, kept, logits.to(kept_logits.dtype))
        state.flatten(0, 1).index_copy_(0, kept, drawn.state)
        return drawn.token_ids

    def _pad(self, integers_np: np.ndarray, size: int) -> np.ndarray:
        """Shape: [4, N] -> [4, size]; the rows behind are those of nobody."""
        padded = np.zeros((4, size), dtype=np.int64)
        padded[0] = self._slots.dummy
        padded[3] = self._slots.max_num_seqs * self._slots.max_drafts
        padded[:, : integers_np.shape[1]] = integers_np
        return padded

    def _edited(self, logits: Tensor, slots_np: np.ndarray, positions_np: np.ndarray) -> Tensor:
        """As the requests of the rows want them. Shape: [N, V'], positions_np [N]."""
        return self._slots.edits.apply(logits, RequestRows.one_each(slots_np, positions_np))

    def _forward(
        self,
        slots_np: np.ndarray,
        starts_np: np.ndarray,
        query_lens_np: np.ndarray,
        num_logits_np: np.ndarray,
    ) -> Tensor:
        batch = HostBatch.build(slots_np, starts_np, query_lens_np, num_logits_np)
        return self._draft.forward(batch)
