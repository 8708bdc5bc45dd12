"""bad_words: token sequences that the output must not contain."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.bad_words import BadWordsState, apply_bad_words
from outrider.kernels.edits.edit_rows import EditRows

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .base import DeviceEdit

MAX_WORDS = 256  # a word of text takes up to two: with and without a space before it
MAX_TOKENS = 2048  # in all words together


class BadWords(DeviceEdit):
    def __init__(self, slots: Slots) -> None:
        super().__init__(slots)
        self._state = BadWordsState(
            token_ids=self._table(MAX_TOKENS, dtype=torch.int32),
            end=self._table(MAX_WORDS, dtype=torch.int32),
            num_words=self._table(dtype=torch.int32),
            output_start=self._table(dtype=torch.int64),
        )

    def is_asked_by(self, params: SamplingParams) -> bool:
        return len(params.bad_words) > 0

    def seat(self, request: Request) -> None:
        slot, words = request.slot, request.params.bad_words
        flat = [token_id for word in words for token_id in word]
        self._state.token_ids[slot, : len(flat)] = self._uploaded(flat, np.int32)
        ends_np = np.cumsum([len(word) for word in words])
        self._state.end[slot, : len(words)] = self._uploaded(ends_np, np.int32)
        self._state.num_words[slot].fill_(len(words))
        self._state.output_start[slot].fill_(request.num_prompt_tokens)

    def clear(self, slot: int) -> None:
        self._state.num_words[slot].fill_(0)

    def apply(self, logits: Tensor, at: EditRows) -> None:
        apply_bad_words(logits, at, self._state, self._slots.token_ids)
