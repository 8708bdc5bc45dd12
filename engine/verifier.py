"""The verification kernels on a step's logits: which drafts stand, and the token after them."""

import numpy as np
import torch
from torch import Tensor

from outrider.engine.api import TokenLogprobs
from outrider.engine.logit_edits import RequestRows
from outrider.engine.proposers.base import Proposals
from outrider.engine.ragged import ragged_arange
from outrider.engine.scheduler import Plan, Verified, slots_of
from outrider.engine.slots import Slots
from outrider.kernels.logprobs import gather_logprobs
from outrider.kernels.verify import verify


class Verifier:
    """Keeps of the proposals exactly what the target would have produced."""

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size

    def verify(self, plan: Plan, proposals: Proposals, logits: Tensor) -> Verified:
        """Verify all sampled sequences at once; logits: [sum(k_i + 1), V], rows in plan order.

        The drawn tokens also go into the slots, behind each sequence's known ones.
        """
        sampled = plan.sampled
        if not sampled:
            return Verified(token_ids=[], num_drafts=[], is_bad=[], logprobs=[])
        device = self._slots.device
        num_drafts_np = proposals.num_drafts_np
        max_drafts = int(num_drafts_np.max())
        cu_rows_np = np.concatenate(([0], np.cumsum(num_drafts_np + 1)))
        slots_np = slots_of(sampled)
        slot = torch.from_numpy(slots_np).to(device)
        anchors_np = np.array([s.request.num_tokens for s in sampled])
        anchor = torch.from_numpy(anchors_np).to(device)
        # [B, K + 1] where a step's tokens lie in the slots
        positions = anchor[:, None] + torch.arange(max_drafts + 1, device=device)
        distributions = proposals.distributions
        rows = RequestRows(slots_np, cu_rows_np[:-1], num_drafts_np + 1, anchors_np)
        drawn = verify(
            self._slots.edits.apply(logits, rows),
            torch.from_numpy(cu_rows_np).to(device, torch.int32),
            self._slots.token_ids[slot[:, None], positions[:, :-1]].long(),
            torch.from_numpy(num_drafts_np).to(device, torch.int32),
            distributions.logits if distributions else None,
            distributions.state if distributions else None,
            self._slots.sampling_of(slot),
            anchor,
            self._vocab_size,
            filters=any(s.request.params.is_filtered for s in sampled),
            samples=any(s.request.params.temperature > 0 for s in sampled),
        )
        self._slots.token_ids[slot[:, None], positions] = drawn.token_ids.clamp_min(0).int()

        # The one copy to the host a step.
        host = torch.cat((drawn.token_ids, drawn.is_bad[:, None]), dim=1).cpu().numpy()
        token_ids_np, is_bad_np = host[:, :-1], host[:, -1].astype(bool)
        token_ids = [row[row >= 0].tolist() for row in token_ids_np]
        return Verified(
            token_ids=token_ids,
            num_drafts=num_drafts_np.tolist(),
            is_bad=is_bad_np.tolist(),
            logprobs=self._logprobs(plan, logits, token_ids, cu_rows_np),
        )

    def _logprobs(
        self, plan: Plan, logits: Tensor, token_ids: list[list[int]], cu_rows_np: np.ndarray
    ) -> list[list[TokenLogprobs] | None]:
        """Raw logprobs of the drawn tokens of those sequences that asked for them."""
        wanted = [s.request.params.logprobs for s in plan.sampled]
        asking = [i for i, num_top in enumerate(wanted) if num_top is not None]
        out: list[list[TokenLogprobs] | None] = [None] * len(wanted)
        if not asking:
            return out
        lens_np = np.array([len(token_ids[i]) for i in asking])
        rows = torch.from_numpy(ragged_arange(cu_rows_np[asking], lens_np)).to(logits.device)
        chosen = torch.tensor([t for i in asking for t in token_ids[i]], device=logits.device)
        num_top = min(max(wanted[i] or 0 for i in asking), self._vocab_size)
        gathered = gather_logprobs(logits[rows], chosen, num_top, self._vocab_size)
        own, ids, values = (field.tolist() for field in gathered)
        first = 0
        for i, length in zip(asking, lens_np.tolist(), strict=True):
            out[i] = [
                TokenLogprobs(
                    own[row],
                    list(zip(ids[row][: wanted[i]], values[row][: wanted[i]], strict=True)),
                )
                for row in range(first, first + length)
            ]
            first += length
        return out
