"""The input and output of verification: drafts in, tokens out."""

from typing import NamedTuple

import torch

from ..triton_or_none import tl, triton
from .philox import Purpose
from .sampling import Sampling

COLUMNS = tl.constexpr(64)  # lanes for a request's tokens: a power of two above MAX_DRAFTS


class Drafts(NamedTuple):
    """The proposed drafts. q is one-hot without logits, and if the log_z of a state is NaN."""

    token_ids: torch.Tensor  # [B, K] int64, ignored from num_drafts on
    num_drafts: torch.Tensor  # [B] int32, 0..K; empty if every request has one row
    logits: torch.Tensor | None  # [B or more, K, V'] raw draft logits
    state: torch.Tensor | None  # [B or more, K, 4] float32, from draft_sample
    rows: torch.Tensor | None  # [B] int, each request's index into these two; None: in order

    def draft_logits(self) -> "DraftLogits":
        q, state = self.logits, self.state
        if q is None or state is None or q.shape[1] == 0:
            return DraftLogits(None, 0, 0, 0, None, None)
        return DraftLogits(q, q.stride(0), q.stride(1), q.shape[2], state, self.rows)

    def in_order(self) -> "Drafts":
        """Logits and states copied into the order of the requests."""
        if self.rows is None or self.logits is None or self.state is None:
            return self
        return self._replace(logits=self.logits[self.rows], state=self.state[self.rows], rows=None)


class DraftLogits(NamedTuple):
    """Raw draft logits as the kernels take them; with `raw` None, all drafts are one-hot."""

    raw: torch.Tensor | None  # [B or more, K, V']
    stride_b: int
    stride_k: int
    width: int  # V'
    state: torch.Tensor | None  # [B or more, K, 4]
    rows: torch.Tensor | None  # [B]


class Step(NamedTuple):
    """A batch's rows of logits, and the requests that they belong to."""

    logits: torch.Tensor  # [N, V] raw; request i has rows cu_rows[i]:cu_rows[i + 1]
    cu_rows: torch.Tensor | None  # [B + 1] int32; None: one row a request
    drafts: Drafts
    sampling: Sampling  # [B]
    anchor: torch.Tensor  # [B] int64 position of the first draft
    position: torch.Tensor  # [B] int64 position of the token that the first row predicts
    purpose: Purpose  # of the draw of the last token
    vocab_size: int
    words: torch.Tensor | None  # [B, K + 2, 4] int64 random words to use instead of Philox's

    def arguments(self, num_blocks: int) -> tuple[object, ...]:
        """The first arguments of every kernel after the scan."""
        logits, ids = self.logits, self.drafts.token_ids
        step = StepArguments(
            logits, logits.stride(0), logits.shape[1], self.vocab_size, self.cu_rows,
            self.drafts.num_drafts, ids, self.anchor, self.position, self.words,
        )  # fmt: skip
        columns = ids.shape[1] + 1, ids.stride(0)
        return step, *columns, num_blocks, self.drafts.draft_logits(), self.sampling


class StepArguments(NamedTuple):
    """The parts of a step that kernels take together. B requests, K drafts each at most."""

    logits: torch.Tensor  # [N, V]
    logits_stride: int
    width: int  # V
    vocab_size: int
    cu_rows: torch.Tensor | None  # [B + 1], or None: a row a request
    num_drafts: torch.Tensor  # [B]
    draft_ids: torch.Tensor  # [B, K]
    anchor: torch.Tensor  # [B]
    position: torch.Tensor  # [B]
    words: torch.Tensor | None  # [B, K + 2, 4]


class DraftSample(NamedTuple):
    token_ids: torch.Tensor  # [N] int64
    state: torch.Tensor  # [N, 4] float32, which `verify` needs besides the raw logits


class Verified(NamedTuple):
    token_ids: torch.Tensor  # [B, K + 1] int64, padded with -1
    num_tokens: torch.Tensor  # [B] int32, 1..k_i + 1
    is_bad: torch.Tensor  # [B] bool: a needed row held NaN, inf or no finite logit


def row_index_reference(step: Step) -> torch.Tensor:
    """Row of each (request, offset), clamped to the request's last. Shape: [B, K + 1] int64."""
    drafts, cu_rows = step.drafts, step.cu_rows
    assert cu_rows is not None
    offset = torch.arange(drafts.token_ids.shape[1] + 1, device=cu_rows.device)
    return cu_rows[:-1, None].long() + torch.minimum(offset, drafts.num_drafts[:, None].long())


def emit_reference(
    drafts: Drafts, accepted: torch.Tensor, last: torch.Tensor, bad: torch.Tensor
) -> Verified:
    """The drafts that stand, then the last token.

    Shape: accepted, last [B] int64; bad [B, K + 1] bool, whether each row is bad.
    """
    num_columns = bad.shape[1]
    offset = torch.arange(num_columns, device=last.device)
    is_bad = (bad & (offset <= accepted[:, None])).any(-1)
    token_ids = torch.full(bad.shape, -1, dtype=torch.int64, device=last.device)
    if num_columns > 1:
        token_ids[:, :-1] = torch.where(offset[:-1] < accepted[:, None], drafts.token_ids, -1)
    token_ids.scatter_(1, accepted[:, None], torch.where(is_bad, 0, last)[:, None])
    return Verified(token_ids, (accepted + 1).int(), is_bad)


@triton.jit
def rows_of(request, step):
    """A request's number of drafts, and its first row."""
    if step.cu_rows is None:
        k, row0 = tl.zeros((), tl.int32), request
    else:
        k, row0 = tl.load(step.num_drafts + request), tl.load(step.cu_rows + request)
    return k, row0


@triton.jit
def draft_row(request, draft):
    """Index of a request's draft logits and states."""
    row = request.to(tl.int64)
    if draft.rows is not None:
        row = tl.load(draft.rows + request).to(tl.int64)
    return row


@triton.jit
def emit(request, accepted, last, is_bad, num_columns, draft_ids_ptr, verified):
    """Write a request's outcome: the drafts that stand, then the last token.

    `is_bad` says for each column whether the row is bad; rows after the last token do not count.
    """
    column = tl.arange(0, COLUMNS)
    is_bad = tl.sum((is_bad & (column <= accepted)).to(tl.int32), 0) > 0
    token = tl.load(draft_ids_ptr + column, mask=column < accepted, other=-1)
    token = tl.where(column == accepted, tl.where(is_bad, 0, last), token)
    at = verified.token_ids + request * num_columns + column
    tl.store(at, token, mask=column < num_columns)
    tl.store(verified.num_tokens + request, accepted + 1)
    tl.store(verified.is_bad + request, is_bad)
