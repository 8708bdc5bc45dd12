"""The edits that requests make to their logits, before temperature and filters."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.edits.edit_rows import EditRows

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .allowed_tokens import AllowedTokens
from .bad_words import BadWords
from .base import LogitEdit, RequestRows
from .custom import CustomProcessors
from .grammars import Grammars
from .penalties import Penalties
from .thinking import ThinkingLimit
from .token_bias import TokenBias

__all__ = ["LogitEdit", "LogitEdits", "RequestRows"]


class LogitEdits:
    """All edits, applied in one fixed order, to rows of the draft and of the target alike.

    Order and meaning are vLLM's:

    1. grammar and allowed_token_ids ban every other token (-inf).
    2. bad_words bans the last token of a word if it would complete the word in the output.
    3. min_tokens bans eos and stop_token_ids until the output has that many tokens, unless
       nothing else is left; logit_bias is added.
    4. logits_processors, the custom ones, run in the order of the request.
    5. repetition_penalty counts prompt and output; then frequency_penalty and presence_penalty
       count the output.
    6. thinking bans all but the token that closes a thought, once its tokens are spent and unless
       that token is banned.

    The drafts before a row belong to its prefix. Temperature, top-k, top-p and min-p come later, in
    verification. A banned token stays banned: no later edit makes -inf finite.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        num_slots = len(slots.token_ids)
        edits = (
            Grammars,
            AllowedTokens,
            BadWords,
            TokenBias,
            CustomProcessors,
            Penalties,
            ThinkingLimit,
        )
        self._chain: tuple[LogitEdit, ...] = tuple(edit(slots) for edit in edits)
        # [edits, num_slots] which edits each slot's last request asks for
        self._asked_np = np.zeros((len(self._chain), num_slots), dtype=bool)

    def need_host(self, params: SamplingParams) -> bool:
        """Whether the host must know all tokens of such a request before it can edit logits."""
        return any(edit.needs_host and edit.is_asked_by(params) for edit in self._chain)

    def are_asked_by(self, params: SamplingParams) -> bool:
        return any(edit.is_asked_by(params) for edit in self._chain)

    def asked_by(self, slots_np: np.ndarray) -> np.ndarray:
        """Which of these slots' last requests ask for any edit. Shape: [B] -> [B] bool."""
        asked_np: np.ndarray = np.logical_or.reduce(self._asked_np)[slots_np]
        return asked_np

    def seat(self, request: Request) -> None:
        """Prepare the edits that a request asks for; its tokens must be in its slot already."""
        assert request.slot is not None
        for i, edit in enumerate(self._chain):
            self._asked_np[i, request.slot] = asks = edit.is_asked_by(request.params)
            if asks:
                edit.seat(request)

    def rehearse(self, logits: Tensor) -> Tensor:
        """Run every edit's kernel on rows of the dummy slot, which no edit changes."""
        dummy, num_rows = self._slots.dummy, len(logits)
        rows = RequestRows.in_turn(np.full(num_rows, dummy), np.ones(num_rows, dtype=np.int64))
        edited, at = self._copied(logits, rows)
        for edit in self._chain:
            if not edit.needs_host:
                edit.apply(edited, rows, at)
        return edited

    def apply(self, logits: Tensor, rows: RequestRows) -> Tensor:
        """An edited copy of these rows' logits; all their requests must ask for edits.

        A copy, because logprobs report the raw logits. In float32, because bfloat16 would round
        away a small penalty on a large logit.
        Shape: [N, V'] -> [M, V'].
        """
        edited, at = self._copied(logits, rows)
        rows = rows._replace(row_np=np.arange(len(edited)))
        for edit, of_np in zip(self._chain, self._asked_np[:, rows.slot_np], strict=True):
            if of_np.all():
                edit.apply(edited, rows, at)
            elif of_np.any():
                some = rows.take(of_np)
                edit.apply(edited, some, some.behind(self._slots.num_tokens))
        return edited

    def _copied(self, logits: Tensor, rows: RequestRows) -> tuple[Tensor, EditRows]:
        at = rows.behind(self._slots.num_tokens)
        copied = logits.index_select(0, at.row).float()
        return copied, at._replace(row=torch.arange(len(copied), device=copied.device))
