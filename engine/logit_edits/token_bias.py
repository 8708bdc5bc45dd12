"""logit_bias; and min_tokens, which bans the tokens that would end the sequence too early.

Where grammar, allowed_token_ids and bad_words leave nothing but such tokens, one of them is drawn.
"""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.token_bias import BiasState, apply_token_bias

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import DeviceEdit

MAX_ENTRIES = 1280  # tokens of logit_bias and tokens that end the sequence, together


class TokenBias(DeviceEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._state = BiasState(
            token_ids=self._table(MAX_ENTRIES, dtype=torch.int32),
            bias=self._table(MAX_ENTRIES, dtype=torch.float32),
            banned_until=self._table(MAX_ENTRIES, dtype=torch.int64),
            num_entries=self._table(dtype=torch.int32),
        )

    def is_asked_by(self, params: SamplingParams) -> bool:
        return len(params.logit_bias) > 0 or params.min_tokens > 0

    def seat(self, request: Request) -> None:
        bias = request.params.logit_bias
        ends = request.end_token_ids if request.params.min_tokens > 0 else frozenset[int]()
        token_ids = [*bias, *(ends - bias.keys())]
        # No sequence gets so far, and the sum fits an int64.
        first_end = request.num_prompt_tokens + min(request.params.min_tokens, 2**62)
        at = request.slot, slice(len(token_ids))
        self._state.token_ids[at] = self._uploaded(token_ids, np.int32)
        self._state.bias[at] = self._uploaded([bias.get(t, 0.0) for t in token_ids], np.float32)
        banned_until = [first_end * (t in ends) for t in token_ids]
        self._state.banned_until[at] = self._uploaded(banned_until, np.int64)
        self._state.num_entries[request.slot].fill_(len(token_ids))

    def clear(self, slot: int) -> None:
        self._state.num_entries[slot].fill_(0)

    def apply(self, logits: Tensor, at: EditRows) -> None:
        apply_token_bias(logits, at, self._state, self._slots.vocab_size)
