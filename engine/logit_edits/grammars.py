"""Grammars: bans every token that the request's grammar does not allow next."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.bitmask import apply_bitmask

from ..api import SamplingParams
from ..grammars.grammar import ask_masks, compute_masks
from ..state.host_copy import uploaded
from .base import LogitEdit, RequestRows


class Grammars(LogitEdit):
    """Applies masks that are computed on the host, which must know the drafts to compute them.

    Each mask is computed once a step: the target's rows reuse the masks of the draft's rows. It is
    asked for as soon as the draft before it is drawn, and computed beside the next pass.
    """

    needs_host = True

    def is_asked_by(self, params: SamplingParams) -> bool:
        return params.grammar is not None

    def apply(self, logits: Tensor, rows: RequestRows) -> None:
        requests = [self._requests[slot] for slot in rows.slots_np.tolist()]
        grammars = [request.grammar for request in requests if request.grammar is not None]
        first_np, end_np = rows.first_drafts_np, rows.first_drafts_np + rows.num_rows_np
        compute_masks(grammars, end_np.tolist())
        for request, grammar in zip(requests, grammars, strict=True):
            if grammar.error is not None:
                request.edit_error = f"grammar: {grammar.error}"
        masks_np = np.concatenate(
            [g.masks[i:end] for g, i, end in zip(grammars, first_np, end_np, strict=True)]
        )
        apply_bitmask(
            logits,
            uploaded(rows.each_np()[0], self._device),
            uploaded(masks_np, self._device),
            torch.arange(len(masks_np), device=self._device),
            self._vocab_size,
        )

    def drawn(self, slots_np: np.ndarray, token_ids: Tensor) -> None:
        grammars = []
        for slot, token_id in zip(slots_np.tolist(), token_ids.tolist(), strict=True):
            if (grammar := self._requests[slot].grammar) is not None:
                grammar.drafts.append(token_id)
                grammars.append(grammar)
        ask_masks(grammars)
