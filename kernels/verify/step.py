"""A step of requests in slots: what kernels read of it, and the tokens that it writes.

A sequence's anchor, the position of the step's first new token, is the number of its known tokens.
The last slot is a dummy that padding reads and writes; its number of known tokens stays 0.

A scan waits for everything before it. Of the kernels after it only `emit` writes to the slots, only
to those of requests that it ends, and nothing reads these afterwards but to drop it. So the kernels
may read slots before they wait. (The tokens of the dummy slot change while others read them: it is
greedy, so that any tokens will do.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..triton_or_none import tl, triton
from .philox import Purpose
from .sampling import Sampling

COLUMNS = tl.constexpr(64)  # lanes for a request's outcome: a power of two above MAX_DRAFTS + 1


class SlotContents(NamedTuple):
    """The contents of the slots."""

    token_ids: Tensor  # [num_slots, width] int32, known ones and then drafts
    num_tokens: Tensor  # [num_slots] int64, known ones
    sampling: Sampling  # [num_slots] each

    def drafts(self, slot: Tensor, num_drafts: int) -> Tensor:
        """The tokens after the known ones. Shape: slot [B] -> [B, num_drafts] int64."""
        slot = slot.long()
        offset = torch.arange(num_drafts, device=slot.device)
        at = self.num_tokens[slot, None] + offset
        return self.token_ids[slot[:, None], at].long()


class Step(NamedTuple):
    """A batch's rows of logits, and the slots of the requests that they belong to."""

    logits: Tensor  # [N, V] raw; request i has rows cu_rows[i]:cu_rows[i + 1]
    cu_rows: Tensor | None  # [B + 1] int32; None: one row a request
    slots: SlotContents
    slot: Tensor  # [B] of any integers
    num_drafts: Tensor | None  # [B] int32, 0..K; None: no drafts
    max_drafts: int  # K
    # [B] of any integers: how many drafts of the step come before the one to draw; None: these are
    # no draws of drafts, but what verification emits
    offset: Tensor | None
    # [num_slots, K', V'] raw draft logits, and states: [num_slots, K, 4] float32, K' <= K. Draws of
    # drafts write them if they are there. Without them drafts are one-hot; also where the log_z of
    # a state is NaN, as it must be for drafts from K' on.
    kept: tuple[Tensor, Tensor] | None
    vocab_size: int
    words: Tensor | None  # [B, K + 2, 4] int64 random words to use instead of Philox's
    log_odds: Tensor | None = None  # [num_slots, K] float32, where draws of drafts keep theirs

    @property
    def purpose(self) -> Purpose:
        """Of the draw of the last token."""
        return Purpose.FINAL if self.offset is None else Purpose.DRAFT

    def arguments(self, num_blocks: int) -> tuple[object, ...]:
        """The first arguments of every kernel after the scan."""
        logits, slots = self.logits, self.slots
        kept_state = None if self.kept is None or self.offset is None else self.kept[1]
        odds = self.log_odds
        step = StepArguments(
            logits, logits.stride(0), logits.shape[1], self.vocab_size, self.cu_rows,
            self.num_drafts, slots.token_ids, slots.token_ids.stride(0), slots.num_tokens,
            self.slot, self.offset, kept_state,
            0 if kept_state is None else kept_state.stride(0), self.words,
            odds, 0 if odds is None else odds.stride(0),
        )  # fmt: skip
        return step, self.max_drafts + 1, num_blocks, self._draft_logits(), slots.sampling

    def _draft_logits(self) -> "DraftLogits":
        if self.kept is None or self.max_drafts == 0:
            return DraftLogits(None, 0, 0, 0, 0, None)
        logits, state = self.kept
        _, columns, width = logits.shape
        return DraftLogits(logits, logits.stride(0), logits.stride(1), columns, width, state)


class StepArguments(NamedTuple):
    """The parts of a step that kernels take together."""

    logits: Tensor  # [N, V]
    logits_stride: int
    width: int  # V
    vocab_size: int
    cu_rows: Tensor | None  # [B + 1]
    num_drafts: Tensor | None  # [B]
    token_ids: Tensor  # [num_slots, token_stride]
    token_stride: int
    num_tokens: Tensor  # [num_slots]
    slot: Tensor  # [B]
    offset: Tensor | None  # [B]
    kept_state: Tensor | None  # [num_slots, kept_stride], where draws keep their states, if they do
    kept_stride: int
    words: Tensor | None  # [B, K + 2, 4]
    log_odds: Tensor | None  # [num_slots, odds_stride]
    odds_stride: int


class DraftLogits(NamedTuple):
    """Raw draft logits as the kernels take them; with `raw` None, all drafts are one-hot."""

    raw: Tensor | None  # [num_slots, K', V']
    slot_stride: int
    column_stride: int
    columns: int  # K'
    width: int  # V'
    state: Tensor | None  # [num_slots, K, 4]


class GatheredStep(NamedTuple):
    """A step as the references take it: without slots, and with a column also for the last row."""

    logits: Tensor  # [N, V]
    cu_rows: Tensor  # [B + 1]
    num_drafts: Tensor  # [B] int64
    draft_ids: Tensor  # [B, K + 1] int64, -1 from num_drafts on
    draft_logits: Tensor  # [B, K + 1, V']
    draft_state: Tensor  # [B, K + 1, 4], with a log_z of NaN where drafts are one-hot
    sampling: Sampling  # [B] each
    anchor: Tensor  # [B] int64
    position: Tensor  # [B] int64, of the first token to draw
    purpose: Purpose
    vocab_size: int
    words: Tensor | None  # [B, K + 2, 4]


def gather_reference(step: Step) -> GatheredStep:
    slots, slot, k_max = step.slots, step.slot.long(), step.max_drafts
    num_drafts, cu_rows = step.num_drafts, step.cu_rows
    if num_drafts is None or cu_rows is None:
        num_drafts = torch.zeros_like(slot)
        cu_rows = torch.arange(len(slot) + 1, device=slot.device)
    column = torch.arange(k_max + 1, device=slot.device)
    draft_ids = slots.drafts(slot, k_max + 1)
    if step.kept is None or k_max == 0:
        logits = step.logits.new_zeros(*draft_ids.shape, 1)
        state = logits.new_full((*draft_ids.shape, 4), torch.nan, dtype=torch.float32)
    else:
        logits, state = (
            each[slot[:, None], column.clamp_max(each.shape[1] - 1)] for each in step.kept
        )
    anchor = slots.num_tokens[slot]
    return GatheredStep(
        step.logits[: int(cu_rows[-1])],
        cu_rows.long(),
        num_drafts.long(),
        torch.where(column < num_drafts[:, None], draft_ids, -1),
        logits,
        state,
        slots.sampling.take(slot),
        anchor,
        anchor if step.offset is None else anchor + step.offset,
        step.purpose,
        step.vocab_size,
        step.words,
    )


def row_index_reference(step: GatheredStep) -> Tensor:
    """Row of each (request, offset), clamped to the request's last. Shape: [B, K + 1] int64."""
    offset = torch.arange(step.draft_ids.shape[1], device=step.cu_rows.device)
    return step.cu_rows[:-1, None] + torch.minimum(offset, step.num_drafts[:, None])


def outcome_reference(draft_ids: Tensor, accepted: Tensor, last: Tensor, bad: Tensor) -> Tensor:
    """The accepted drafts, then the last token, then -1; and whether a row up to it is bad.

    Shape: draft_ids [B, K + 1] int64; accepted, last [B] int64; bad [B, K + 1] bool, whether each
    row is bad -> [B, K + 2].
    """
    offset = torch.arange(bad.shape[1], device=last.device)
    is_bad = (bad & (offset <= accepted[:, None])).any(-1)
    out = torch.where(offset < accepted[:, None], draft_ids, -1)
    out.scatter_(1, accepted[:, None], torch.where(is_bad, 0, last)[:, None])
    return torch.cat((out, is_bad[:, None]), 1)


def emit_reference(step: Step, position: Tensor, out: Tensor) -> None:
    """Write an outcome into the slots, as `emit` does. Shape: position [B], out [B, K + 2]."""
    slot, token_ids, num_tokens = step.slot.long(), out[:, :-1], step.slots.num_tokens
    at = position[:, None] + torch.arange(token_ids.shape[1], device=out.device)
    step.slots.token_ids[slot[:, None], at] = token_ids.clamp_min(0).int()
    if step.offset is None:
        known = position + (token_ids >= 0).sum(1)
        num_tokens[slot] = torch.where(position > 0, known, 0)


@triton.jit
def rows_of(request, step):
    """A request's number of drafts, and its first row."""
    if step.cu_rows is None:
        k, row0 = tl.zeros((), tl.int32), request
    else:
        k, row0 = tl.load(step.num_drafts + request), tl.load(step.cu_rows + request)
    return k, row0


@triton.jit
def in_slot(request, step):
    """A request's slot, its anchor, the position of the first token to draw, and a pointer to that
    position in the slot: the drafts to verify, and the place for new tokens.
    """
    slot = tl.load(step.slot + request).to(tl.int64)
    anchor = tl.load(step.num_tokens + slot)
    position = anchor
    if step.offset is not None:
        position += tl.load(step.offset + request)
    return slot, anchor, position, step.token_ids + slot * step.token_stride + position


@triton.jit
def emit(request, accepted, last, is_bad, num_columns, slot, anchor, tokens_ptr, step, out_ptr):
    """Write a request's outcome: the accepted drafts, then the last token, then -1; in the last
    column of `out_ptr` [B, K + 2], whether a row is bad. A slot gets the tokens and then 0, and
    knows them unless they are a draft.

    `is_bad` says for each column whether the row is bad; rows after the last token do not count.
    """
    column = tl.arange(0, COLUMNS)
    is_bad = tl.sum((is_bad & (column <= accepted)).to(tl.int32), 0) > 0
    token = tl.load(tokens_ptr + column, mask=column < accepted, other=-1).to(tl.int64)
    token = tl.where(column == accepted, tl.where(is_bad, 0, last), token)
    tl.debug_barrier()  # all warps have read the drafts
    tl.store(tokens_ptr + column, tl.maximum(token, 0).to(tl.int32), mask=column < num_columns)
    token = tl.where(column == num_columns, is_bad.to(tl.int64), token)
    at = out_ptr + request * (num_columns + 1) + column
    tl.store(at, token, mask=column <= num_columns)
    if step.offset is None:
        num_known = tl.where(anchor > 0, anchor + accepted + 1, 0)  # 0: the dummy slot
        tl.store(step.num_tokens + slot, num_known)
