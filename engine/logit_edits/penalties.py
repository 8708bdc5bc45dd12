"""repetition_penalty, frequency_penalty, presence_penalty."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.penalties import PenaltyState, apply_penalties

from ..api import SamplingParams
from ..request import Request
from ..state.host_copy import uploaded
from ..state.ragged import ragged_arange
from ..state.slots import Slots
from .base import LogitEdit, RequestRows


class Penalties(LogitEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._state = PenaltyState(
            repetition=self._table(dtype=torch.float32, fill=1),
            frequency=self._table(dtype=torch.float32),
            presence=self._table(dtype=torch.float32),
            seen=self._table(slots.vocab_size, dtype=torch.int32),
            num_counted=self._table(dtype=torch.int64),
        )
        self._num_counted_np = np.zeros(len(slots.token_ids), dtype=np.int64)

    def is_asked_by(self, params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )

    def seat(self, request: Request) -> None:
        slot, num_prompt_tokens = request.slot, request.num_prompt_tokens
        self._state.repetition[slot].fill_(request.params.repetition_penalty)
        self._state.frequency[slot].fill_(request.params.frequency_penalty)
        self._state.presence[slot].fill_(request.params.presence_penalty)
        seen = self._state.seen[slot]
        seen.zero_()
        # index_fill_, because an indexed assignment would wait for the GPU.
        seen.index_fill_(0, self._slots.token_ids[slot, :num_prompt_tokens].long(), 1)
        self._state.num_counted[slot].fill_(num_prompt_tokens)
        self._num_counted_np[slot] = num_prompt_tokens
        self._count(np.array([slot]))

    def apply(self, logits: Tensor, rows: RequestRows, at: EditRows) -> None:
        self._count(np.unique(rows.slot_np))
        apply_penalties(logits, at, self._state, self._slots.token_ids)

    def _count(self, slots_np: np.ndarray) -> None:
        """Add newly known tokens to the tables, so that kernels have few left to count."""
        requests = [self._slots.requests.get(slot) for slot in slots_np.tolist()]
        known_np = np.array([each.num_tokens if each else 0 for each in requests])  # the dummy: 0
        first_np = self._num_counted_np[slots_np]
        lens_np = known_np - first_np
        if not lens_np.any():
            return
        positions_np = ragged_arange(first_np, lens_np)
        index_np = np.stack((np.repeat(slots_np, lens_np), positions_np))
        slot, position = uploaded(index_np, self._slots.device)
        at = slot * self._slots.vocab_size + self._slots.token_ids[slot, position]
        twice = torch.full_like(at, 2, dtype=torch.int32)
        self._state.seen.view(-1).index_add_(0, at, twice)
        slot, known = uploaded(np.stack((slots_np, known_np)), self._slots.device)
        self._state.num_counted[slot] = known
        self._num_counted_np[slots_np] = known_np
