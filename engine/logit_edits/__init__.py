"""The edits that requests make to their logits, before temperature and filters."""

import numpy as np
import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.edits.edit_rows import EditRows
from outrider.kernels.edits.edited_rows import put_back, take_rows

from ..api import SamplingParams
from ..request import Request
from ..state.slots import Slots
from .allowed_tokens import AllowedTokens
from .bad_words import BadWords
from .base import DeviceEdit, HostEdit, RequestRows
from .custom import CustomProcessors
from .grammars import Grammars
from .penalties import Penalties
from .thinking import ThinkingLimit
from .token_bias import TokenBias

__all__ = ["LogitEdits", "RequestRows"]


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
        num_slots, device = len(slots.token_ids), slots.device
        edits = (
            Grammars,
            AllowedTokens,
            BadWords,
            TokenBias,
            CustomProcessors,
            Penalties,
            ThinkingLimit,
        )
        self._chain: tuple[HostEdit | DeviceEdit, ...] = tuple(edit(slots) for edit in edits)
        # [edits, num_slots] which edits each slot's last request asks for
        self._asked_np = np.zeros((len(self._chain), num_slots), dtype=bool)
        self._need_host_np = np.array([isinstance(edit, HostEdit) for edit in self._chain])
        # [num_slots] whether it asks for any
        self._is_edited = torch.zeros(num_slots, dtype=torch.bool, device=device)
        # Whether the host would wait to see which rows of a batch are edited, and how.
        self._is_blind = uses_triton(self._is_edited)

    def need_host(self, params: SamplingParams) -> bool:
        """Whether the host must know all tokens of such a request before it can edit logits."""
        return any(isinstance(e, HostEdit) and e.is_asked_by(params) for e in self._chain)

    def are_asked_by(self, params: SamplingParams) -> bool:
        return any(edit.is_asked_by(params) for edit in self._chain)

    def asked_by(self, slots_np: np.ndarray) -> np.ndarray:
        """Which of these slots' last requests ask for any edit. Shape: [B] -> [B] bool."""
        edited_np: np.ndarray = np.logical_or.reduce(self._asked_np[:, slots_np])
        return edited_np

    def needing_host(self, slots_np: np.ndarray) -> np.ndarray:
        """Which of them ask for one that the host makes. Shape: [B] -> [B] bool."""
        on_host_np = self._asked_np[np.ix_(self._need_host_np, slots_np)]
        needing_np: np.ndarray = np.logical_or.reduce(on_host_np)
        return needing_np

    def seat(self, request: Request) -> None:
        """Prepare the edits that a request asks for; its tokens must be in its slot already."""
        slot = request.slot
        assert slot is not None
        asked_np = np.array([edit.is_asked_by(request.params) for edit in self._chain])
        for edit, asks, asked in zip(self._chain, asked_np, self._asked_np[:, slot], strict=True):
            if isinstance(edit, DeviceEdit) and asks:
                edit.seat(request)
            elif isinstance(edit, DeviceEdit) and asked:
                edit.clear(slot)
        if asked_np.any() or self._asked_np[:, slot].any():
            self._is_edited[slot].fill_(bool(asked_np.any()))
        self._asked_np[:, slot] = asked_np

    def count(self, slots: Tensor) -> None:
        """Take the known tokens of these slots into the tables: call it once a step, so that rows
        have few left to count. Shape: [B] int32.
        """
        for edit, asked_np in zip(self._chain, self._asked_np, strict=True):
            if isinstance(edit, DeviceEdit) and self._may_ask(asked_np, slots):
                edit.count(slots)

    def apply(self, logits: Tensor, at: EditRows, rows: RequestRows | None = None) -> Tensor:
        """Edited copies of the rows whose slots ask for edits; what others hold is undefined.

        Copies, because logprobs report the raw logits. In float32, because bfloat16 would round
        away a small penalty on a large logit.

        Parameters
        ----------
        logits
            Shape: [N, V'].
        at
            Shape: [M] each.
        rows
            The same, for edits that need the host. None: nobody asks for such an edit.

        Returns
        -------
        Shape: [M, V'] float32.
        """
        edited = take_rows(logits, at, self._is_edited)
        if rows is not None:
            rows = rows._replace(row_np=np.arange(len(edited)))
        own = at._replace(row=torch.arange(len(edited), device=edited.device))
        for edit, asked_np in zip(self._chain, self._asked_np, strict=True):
            if isinstance(edit, DeviceEdit) and self._may_ask(asked_np, at.slot):
                edit.apply(edited, own)
            elif isinstance(edit, HostEdit) and rows is not None:
                of_np = asked_np[rows.slot_np]
                if of_np.any():
                    edit.apply(edited, rows.take(of_np))
        return edited

    def edit_drafts(self, logits: Tensor, slot: Tensor, offset: Tensor) -> None:
        """Edit rows of drafts in place, as far as their slots ask for edits that need no host.

        They are rounded to the logits' dtype: drafts are drawn from that, and it is what
        verification gets. Shape: logits [N, V'], slot and `offset` (how many drafts come before
        each row) [N] int64.
        """
        row = torch.arange(len(slot), device=slot.device)
        at = EditRows(row, slot, self._slots.num_tokens[slot] + offset)
        if not self._is_blind:
            own = self._is_edited[slot]
            at = EditRows(*(of_each[own] for of_each in at))
        put_back(logits, at, self._is_edited, self.apply(logits, at))

    def rehearse(self, logits: Tensor) -> Tensor:
        """Run every edit's kernel on rows of the dummy slot, which no edit changes."""
        row = torch.arange(len(logits), device=logits.device)
        dummy = torch.full_like(row, self._slots.dummy)
        self.count(dummy[:1].int())
        return self.apply(logits, EditRows(row, dummy, 0 * row))

    def _may_ask(self, asked_np: np.ndarray, slots: Tensor) -> bool:
        """Whether any of these slots may be one that asks. Shape: asked_np [num_slots]."""
        return self._is_blind or bool(asked_np[slots.numpy()].any())
