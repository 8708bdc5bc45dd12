"""The edit that calls custom logits processors."""

import logging

import numpy as np
import torch
from torch import Tensor

from ..api import SamplingParams
from ..request import Request
from .base import HostEdit, RequestRows

log = logging.getLogger(__name__)


class CustomProcessors(HostEdit):
    """Calls them row by row. One that fails turns its row into NaN, which ends its request."""

    def is_asked_by(self, params: SamplingParams) -> bool:
        return len(params.logits_processors) > 0

    def apply(self, logits: Tensor, rows: RequestRows) -> None:
        for row, slot, num_drafts in np.stack(rows, axis=1).tolist():
            request = self._slots.requests[slot]
            prefix = self._slots.token_ids[None, slot, : request.num_tokens + num_drafts].long()
            # Ids beyond the vocabulary are padding with arbitrary logits: processors never see it.
            scores = logits[None, row, : self._slots.vocab_size]
            scores.copy_(self._processed(request, prefix, scores.clone()))

    def _processed(self, request: Request, prefix: Tensor, scores: Tensor) -> Tensor:
        banned = scores == -torch.inf
        for name, processor in request.logits_processors:
            try:
                result = processor(prefix, scores)
                if not isinstance(result, Tensor):
                    raise TypeError(
                        f"it returned {type(result).__name__}; a torch tensor of shape "
                        f"{list(banned.shape)} is expected"
                    )
                if result.shape != banned.shape:
                    raise ValueError(
                        f"it returned scores of shape {list(result.shape)} for {list(banned.shape)}"
                    )
                scores = result.to(scores).masked_fill(banned, -torch.inf)
            except Exception as error:  # the operator's code may raise anything; the loop goes on
                log.warning("logits processor %s failed", name, exc_info=True)
                request.edit_error = f"logits processor {name!r} failed: {error}"
                return torch.full_like(banned, torch.nan, dtype=torch.float32)
        return scores
