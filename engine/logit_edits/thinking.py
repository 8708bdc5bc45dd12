"""thinking: closes a thought once the answer has had all its tokens of thinking."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.thinking import NO_LIMIT, ThinkingState, count_thoughts, end_thoughts

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import DeviceEdit


class ThinkingLimit(DeviceEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._thoughts = self._table(len(ThinkingState._fields), dtype=torch.int64)
        self._thoughts += self._uploaded(NO_LIMIT, np.int64)

    def is_asked_by(self, params: SamplingParams) -> bool:
        return params.thinking is not None

    def seat(self, request: Request) -> None:
        slot, budget = request.slot, request.params.thinking
        assert slot is not None
        assert budget is not None
        open_id, first, is_open = budget.open_token_id, request.num_prompt_tokens, 0
        if budget.begun:
            prompt = request.token_ids[:first]
            behind = prompt[::-1].index(open_id) + 1 if open_id in prompt else 0
            # Of a prompt that was cut within the thought, all that is left is part of it.
            first, is_open = (first - behind, 0) if behind else (0, 1)
        begin = ThinkingState(
            open_id,
            budget.close_token_id,
            budget.num_opening,
            num_counted=first,
            is_open=is_open,
            num_left=min(budget.num_tokens, 2**62),  # no sequence has as many, and sums fit int64
        )
        self._write(slot, begin.after(request.token_ids[first:]))

    def clear(self, slot: int) -> None:
        self._write(slot, NO_LIMIT)

    def _write(self, slot: int, state: ThinkingState) -> None:
        self._thoughts[slot].copy_(self._uploaded(state, np.int64))

    def count(self, slots: Tensor) -> None:
        count_thoughts(self._thoughts, slots, self._slots.token_ids, self._slots.num_tokens)

    def apply(self, logits: Tensor, at: EditRows) -> None:
        slots = self._slots
        end_thoughts(logits, at, self._thoughts, slots.token_ids, slots.vocab_size)
