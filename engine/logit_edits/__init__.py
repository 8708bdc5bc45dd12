"""What requests change about their logits, before temperature and filters."""

import numpy as np
import torch
from torch import Tensor

from outrider.engine.logit_edits.allowed_tokens import AllowedTokens
from outrider.engine.logit_edits.bad_words import BadWords
from outrider.engine.logit_edits.base import LogitEdit, RequestRows
from outrider.engine.logit_edits.custom import CustomProcessors, ProcessorRegistry
from outrider.engine.logit_edits.grammars import Grammars
from outrider.engine.logit_edits.penalties import Penalties
from outrider.engine.logit_edits.token_bias import TokenBias
from outrider.engine.request import Request

__all__ = ["LogitEdit", "LogitEdits", "ProcessorRegistry", "RequestRows"]


class LogitEdits:
    """The edits of all requests, in one order, for the rows of the draft and the target alike.

    The order and the meaning are vLLM's:

    1. grammar, and allowed_token_ids: all others are banned (-inf).
    2. bad_words: the last token of each is banned where it would complete the word in the output.
    3. min_tokens: eos and stop_token_ids are banned until the output has so many tokens;
       logit_bias is added.
    4. logits_processors, custom ones, as the request lists them.
    5. repetition_penalty, over prompt and output; then frequency_penalty and presence_penalty,
       over the output.

    Each row's prefix holds the drafts before it. Temperature, top-k, top-p and min-p come after,
    in verification. What is banned stays banned: no later edit makes -inf finite.
    """

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        """token_ids: [num_slots, width] int32, the sequences in their slots."""
        self._chain: tuple[LogitEdit, ...] = (
            Grammars(token_ids, vocab_size),
            AllowedTokens(token_ids, vocab_size),
            BadWords(token_ids, vocab_size),
            TokenBias(token_ids, vocab_size),
            CustomProcessors(token_ids, vocab_size),
            Penalties(token_ids, vocab_size),
        )
        # [edits, num_slots] which of them each slot's request asks for
        self._asked_np = np.zeros((len(self._chain), len(token_ids)), dtype=bool)
        self._slots: set[int] = set()  # whose request asks for any
        # [num_slots] whether the request asks for more than bans
        self._reweighs_np = np.zeros(len(token_ids), dtype=bool)

    def __bool__(self) -> bool:
        """Whether any seated request asks for any."""
        return bool(self._slots)

    def seat(self, request: Request) -> None:
        """Take up what a request asks for; its tokens are in its slot already."""
        assert request.slot is not None
        for i, edit in enumerate(self._chain):
            if edit.is_asked_by(request.params):
                self._asked_np[i, request.slot] = True
                self._slots.add(request.slot)
                self._reweighs_np[request.slot] |= edit.reweighs(request.params)
                edit.seat(request)

    def unseat(self, slot: int) -> None:
        self._asked_np[:, slot] = False
        self._slots.discard(slot)
        self._reweighs_np[slot] = False

    def apply(self, logits: Tensor, rows: RequestRows) -> Tensor:
        """The logits as these rows' requests want them: a copy, or, where none of them asks for an
        edit, the logits themselves.

        A copy, because raw logits are reported as logprobs; in float32 unless all edits are bans,
        because bfloat16 would round a small penalty on a large logit away.
        Shape: [N, V'] -> [N, V'].
        """
        if not self._slots:
            return logits
        asked_np = self._asked_np[:, rows.slots_np]
        if not asked_np.any():
            return logits
        reweighs = bool(self._reweighs_np[rows.slots_np].any())
        logits = logits.to(torch.float32 if reweighs else logits.dtype, copy=True)
        for edit, of_np in zip(self._chain, asked_np, strict=True):
            if of_np.any():
                edit.apply(logits, rows.take(of_np))
        return logits
