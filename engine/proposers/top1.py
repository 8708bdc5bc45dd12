"""The draft model runs ahead, one token a pass, each sequence for its own k_i."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import ForwardBatch
from outrider.engine.logit_edits import RequestRows
from outrider.engine.paged_model import PagedModel
from outrider.engine.proposers.base import DraftDistributions, Proposals, Proposer
from outrider.engine.scheduler import Plan, ScheduledRequest, slots_of
from outrider.engine.slots import Slots
from outrider.kernels.sampling import STATE_WIDTH
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
        device = logits.device
        slots_np = slots_of(sampled)
        anchors_np = np.array([s.request.num_tokens for s in sampled])
        num_reqs, max_drafts = len(sampled), int(num_drafts_np.max())
        rows_np = np.flatnonzero(num_drafts_np > 0)  # batch_idx of each logits row
        logits = self._edited(logits, slots_np[rows_np], anchors_np[rows_np])
        kept_logits = logits.new_empty(num_reqs, max_drafts, logits.shape[-1])
        state = torch.empty(num_reqs, max_drafts, STATE_WIDTH, device=device)
        filters = any(s.request.params.is_filtered for s in sampled)
        samples = any(s.request.params.temperature > 0 for s in sampled)
        for j in range(max_drafts):
            rows = torch.from_numpy(rows_np).to(device)
            slot = torch.from_numpy(slots_np[rows_np]).to(device)
            anchor = torch.from_numpy(anchors_np[rows_np]).to(device)
            drawn = draft_sample(
                logits,
                self._slots.sampling_of(slot),
                anchor + j,
                anchor,
                self._vocab_size,
                filters=filters,
                samples=samples,
            )
            self._slots.token_ids[slot, anchor + j] = drawn.token_ids.int()
            kept_logits[rows, j] = logits
            state[rows, j] = drawn.state
            rows_np = rows_np[num_drafts_np[rows_np] > j + 1]
            if len(rows_np):
                ones = np.ones_like(rows_np)
                position_np = anchors_np[rows_np] + j
                logits = self._forward(slots_np[rows_np], position_np, ones, ones)
                logits = self._edited(logits, slots_np[rows_np], position_np + 1)
        for scheduled, num_drafts in zip(sampled, num_drafts_np.tolist(), strict=True):
            scheduled.request.num_draft_computed_tokens += max(0, num_drafts - 1)
        return DraftDistributions(kept_logits, state)

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
        batch = ForwardBatch.build(self._slots, slots_np, starts_np, query_lens_np, num_logits_np)
        return self._draft.forward(batch)
