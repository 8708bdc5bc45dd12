"""thinking: closes a thought once the answer has had all its tokens of thinking."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.thinking import ThinkingState, end_thoughts

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import LogitEdit, RequestRows


class ThinkingLimit(LogitEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._thoughts = self._table(len(ThinkingState._fields), dtype=torch.int64)
        self._known: dict[int, ThinkingState] = {}  # by slot, as far as the host knows the tokens

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
        self._learn({slot: begin.after(request.token_ids[first:])})

    def apply(self, logits: Tensor, rows: RequestRows, at: EditRows) -> None:
        self._count(np.unique(rows.slot_np))
        slots = self._slots
        end_thoughts(logits, at, self._thoughts, slots.token_ids, slots.vocab_size)

    def _count(self, slots_np: np.ndarray) -> None:
        """Add newly known tokens to the table, so that kernels have few left to count."""
        counted: dict[int, ThinkingState] = {}
        for slot in slots_np.tolist():
            request = self._slots.requests.get(slot)  # None: the dummy
            if request and (known := self._known[slot]).num_counted < request.num_tokens:
                counted[slot] = known.after(request.token_ids[known.num_counted :])
        if counted:
            self._learn(counted)

    def _learn(self, known: dict[int, ThinkingState]) -> None:
        self._known |= known
        slots, thoughts = np.array([*known]), np.array([*known.values()])
        self._thoughts[self._uploaded(slots, np.int64)] = self._uploaded(thoughts, np.int64)
