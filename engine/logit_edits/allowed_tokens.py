"""allowed_token_ids: bans every other token."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.bitmask import apply_bitmask
from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.token_mask import num_words, token_mask

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import DeviceEdit


class AllowedTokens(DeviceEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._bitmask = self._table(num_words(slots.vocab_size), dtype=torch.int32, fill=-1)

    def is_asked_by(self, params: SamplingParams) -> bool:
        return len(params.allowed_token_ids) > 0

    def seat(self, request: Request) -> None:
        mask = token_mask(request.params.allowed_token_ids, self._slots.vocab_size)
        self._bitmask[request.slot] = self._uploaded(mask, np.int32)

    def clear(self, slot: int) -> None:
        self._bitmask[slot].fill_(-1)

    def apply(self, logits: Tensor, at: EditRows) -> None:
        apply_bitmask(logits, at, self._bitmask, self._slots.vocab_size)
