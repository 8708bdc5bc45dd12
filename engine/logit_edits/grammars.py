"""Grammars: bans every token that the request's grammar does not allow next."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.bitmask import apply_bitmask
from outrider.kernels.edits.edit_rows import EditRows

from ..api import SamplingParams
from ..state.host_copy import uploaded
from .base import HostEdit, RequestRows

if TYPE_CHECKING:
    from ..grammars.grammar import Grammar


class Grammars(HostEdit):
    """Applies masks that are computed on the host, which must know the drafts to compute them.

    Each mask is computed once a step: the target's rows reuse the masks of the draft's rows.
    """

    def is_asked_by(self, params: SamplingParams) -> bool:
        return params.grammar is not None

    def apply(self, logits: Tensor, rows: RequestRows) -> None:
        from ..grammars.grammar import compute_masks  # needs msgspec

        last = rows.take(np.append(np.diff(rows.slot_np) != 0, True))  # row of each request
        requests = [self._slots.requests[slot] for slot in last.slot_np.tolist()]
        grammars = [request.grammar for request in requests if request.grammar is not None]
        known_np = np.array([request.num_tokens for request in requests])
        self._learn_drafts(grammars, last, known_np)
        for num_drafts in range(int(last.drafts_np.max()) + 1):
            behind = zip(grammars, last.drafts_np, strict=True)
            compute_masks([g for g, most in behind if len(g.masks) == num_drafts <= most])
        for request, grammar in zip(requests, grammars, strict=True):
            if grammar.error is not None:
                request.edit_error = f"grammar: {grammar.error}"
        masks_of = {request.slot: g.masks for request, g in zip(requests, grammars, strict=True)}
        each = zip(rows.slot_np.tolist(), rows.drafts_np.tolist(), strict=True)
        masks_np = np.stack([masks_of[slot][num_drafts] for slot, num_drafts in each])
        # The masks are of rows in place of slots.
        row = uploaded(rows.row_np, self._slots.device)
        at = EditRows(row, torch.arange(len(row), device=row.device), row)
        apply_bitmask(logits, at, uploaded(masks_np, row.device), self._slots.vocab_size)

    def _learn_drafts(
        self, grammars: "list[Grammar]", last: RequestRows, known_np: np.ndarray
    ) -> None:
        """Copy to the host the drafts before the last rows that it does not know yet. All: [B]."""
        if all(len(g.drafts) >= n for g, n in zip(grammars, last.drafts_np, strict=True)):
            return
        slot = uploaded(last.slot_np[:, None], self._slots.device)
        position = uploaded(known_np[:, None] + np.arange(last.drafts_np.max()), self._slots.device)
        drafts = self._slots.token_ids[slot, position].tolist()
        for grammar, drawn, num_drafts in zip(grammars, drafts, last.drafts_np, strict=True):
            grammar.set_drafts(drawn[:num_drafts])
