"""repetition_penalty, frequency_penalty, presence_penalty."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.penalties import PenaltyState, apply_penalties, count_tokens

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import DeviceEdit


class Penalties(DeviceEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._state = PenaltyState(
            repetition=self._table(dtype=torch.float32, fill=1),
            frequency=self._table(dtype=torch.float32),
            presence=self._table(dtype=torch.float32),
            seen=self._table(slots.vocab_size, dtype=torch.int32),
            num_counted=self._table(dtype=torch.int64),
        )

    def is_asked_by(self, params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    def seat(self, request: Request) -> None:
        slot, num_prompt_tokens, params = request.slot, request.num_prompt_tokens, request.params
        assert slot is not None
        self._penalise(
            slot, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        seen = self._state.seen[slot]
        seen.zero_()
        # index_fill_, because an indexed assignment would wait for the GPU.
        seen.index_fill_(0, self._slots.token_ids[slot, :num_prompt_tokens].long(), 1)
        self._state.num_counted[slot].fill_(num_prompt_tokens)
        self.count(self._uploaded([slot], np.int32))

    def clear(self, slot: int) -> None:
        self._penalise(slot, 1, 0, 0)

    def _penalise(self, slot: int, repetition: float, frequency: float, presence: float) -> None:
        self._state.repetition[slot].fill_(repetition)
        self._state.frequency[slot].fill_(frequency)
        self._state.presence[slot].fill_(presence)

    def count(self, slots: Tensor) -> None:
        count_tokens(self._state, slots, self._slots.token_ids, self._slots.num_tokens)

    def apply(self, logits: Tensor, at: EditRows) -> None:
        apply_penalties(logits, at, self._state, self._slots.token_ids)
