"""The block masses of rows that are still open after the accept tests.

For a row with a draft the mass of max(P p - q, 0), for a request's last row the mass of p; as int64
multiples of 2**-40.
"""

import torch

from ..triton_or_none import tl, triton
from .decide import Decision
from .philox import FIXED_ONE, exp2, fixed
from .sampling import BLOCK, STATE_LOG_Z, RowStates, log_prob_reference, num_blocks
from .scan import blocks_reference, rows_in_cache
from .step import GatheredStep, row_index_reference

_BLOCK = tl.constexpr(BLOCK)
_LOG2_E = tl.constexpr(1.4426950408889634)


def weights_reference(
    target: torch.Tensor,
    token_ids: torch.Tensor,
    target_state: torch.Tensor,
    draft: torch.Tensor,
    draft_state: torch.Tensor,
    draft_id: torch.Tensor,
    has_draft: torch.Tensor,
    log_scale: torch.Tensor,
    inv_t: torch.Tensor,
) -> torch.Tensor:
    """Fixed-point max(P p - q, 0), or p for rows without a draft.

    Shape: target, draft [R, ...]; the others one entry a row.
    """
    lead = (-1,) + (1,) * (target.ndim - 1)
    p = log_prob_reference(target, token_ids, target_state, inv_t).exp()
    scale = torch.where(has_draft, log_scale.exp(), 1.0)
    q = log_prob_reference(draft, token_ids, draft_state, inv_t).exp()
    one_hot = has_draft & draft_state[:, STATE_LOG_Z].isnan()
    q[one_hot | ~has_draft] = 0.0
    if bool(one_hot.any()):
        drafted = one_hot.reshape(lead) & (token_ids == draft_id.reshape(lead))
        q.masked_fill_(drafted, torch.inf)  # P p(X) - 1 <= 0
    return ((p * scale.reshape(lead) - q).clamp_min(0.0) * FIXED_ONE).long()


def residual_reference(step: GatheredStep, rows: RowStates, decision: Decision) -> torch.Tensor:
    """Block masses of the rows that the decision wants read; 0 for all others.

    Shape: [B, K + 1, num_blocks] int64.
    """
    logits, vocab_size, shape = step.logits, step.vocab_size, decision.log_scale.shape
    mass = torch.zeros(*shape, num_blocks(vocab_size), dtype=torch.int64, device=logits.device)
    offset = torch.arange(shape[1], device=logits.device)
    to_read = ((decision.rows_to_read[:, None] >> offset) & 1).nonzero()
    for b, j in (pairs.unbind(1) for pairs in to_read.split(rows_in_cache(vocab_size))):
        if not len(b):
            break
        row = row_index_reference(step)[b, j]
        x = blocks_reference(logits[row], vocab_size)
        ids = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
        narrow = step.draft_logits[b, j, :vocab_size].float()
        pad = x[0].numel() - narrow.shape[1]
        draft = torch.nn.functional.pad(narrow, (0, pad), value=-torch.inf).view(x.shape)
        weight = weights_reference(
            x, ids, rows.state[row], draft, step.draft_state[b, j], step.draft_ids[b, j],
            j < step.num_drafts[b], decision.log_scale[b, j],
            step.sampling.inverse_temperature()[b],
        )  # fmt: skip
        mass[b, j] = weight.sum(-1)
    return mass


@triton.jit
def probs(x, ids, state, log_scale, inv_t):
    """Processed probabilities of raw logits, times exp(log_scale)."""
    row_max, log_z, threshold, cutoff = state
    p = exp2((x - row_max) * (inv_t * _LOG2_E) - (log_z - log_scale) * _LOG2_E)
    if threshold > -float("inf"):
        p = tl.where((x > threshold) | ((x == threshold) & (ids <= cutoff.to(tl.int32))), p, 0.0)
    return p


@triton.jit
def open_row(slot, j, has_draft, row_ptr, width, state, q_state, tokens_ptr, draft, log_scale):
    """Everything that the functions below need of a request's row j.

    Without a draft, their weights are p alone.
    """
    q_ptr = row_ptr
    q_width = 0
    if draft.raw is not None:
        q_ptr = draft.raw + slot * draft.slot_stride + j.to(tl.int64) * draft.column_stride
        q_width = tl.where(has_draft & (j < draft.columns), draft.width, 0)
    draft_id = tl.load(tokens_ptr + j, mask=has_draft, other=-1)
    log_scale = tl.where(has_draft, log_scale, 0.0)
    return row_ptr, width, state, q_ptr, q_width, q_state, draft_id, log_scale


@triton.jit
def without_draft(lost, row):
    """The row; if `lost`, without its draft, so that the weights are p alone."""
    row_ptr, width, state, q_ptr, q_width, q_state, draft_id, log_scale = row
    q_max, q_log_z, q_threshold, q_cutoff = q_state
    q_state = q_max, tl.where(lost, float("nan"), q_log_z), q_threshold, q_cutoff
    draft_id = tl.where(lost, -1, draft_id)
    log_scale = tl.where(lost, 0.0, log_scale)
    return row_ptr, width, state, q_ptr, q_width, q_state, draft_id, log_scale


@triton.jit
def load_draft_logits(ids, row, HAS_Q: tl.constexpr):
    """Raw draft logits of tokens; unused if all drafts are one-hot."""
    _row_ptr, _width, _state, q_ptr, q_width, _q_state, _draft_id, _log_scale = row
    y = 0.0
    if HAS_Q:
        y = tl.load(q_ptr + ids, mask=ids < q_width, other=-float("inf"))
    return y


@triton.jit
def token_weights(x, y, ids, row, inv_t, HAS_Q: tl.constexpr):
    """max(P p - q, 0) of tokens with raw logits x and y."""
    _row_ptr, _width, state, _q_ptr, _q_width, q_state, draft_id, log_scale = row
    weight = probs(x, ids, state, log_scale, inv_t)
    is_one_hot = True
    if HAS_Q:
        is_one_hot = q_state[1] != q_state[1]
        if not is_one_hot:
            q = probs(tl.cast(y, tl.float32), ids, q_state, 0.0, inv_t)
            weight = tl.maximum(weight - q, 0.0)
    if is_one_hot:
        weight = tl.where(ids == draft_id, 0.0, weight)  # P p(X) - 1 <= 0
    return weight


@triton.jit
def load_block(block, row, HAS_Q: tl.constexpr):
    """Raw logits of a block's tokens, the target's and the draft's."""
    ids = block * _BLOCK + tl.arange(0, _BLOCK)
    x = tl.load(row[0] + ids, mask=ids < row[1], other=-float("inf"))
    return x, load_draft_logits(ids, row, HAS_Q)


@triton.jit
def block_weights(block, loaded, row, vocab_size, inv_t, HAS_Q: tl.constexpr):
    """max(P p - q, 0) of a loaded block's tokens."""
    ids = block * _BLOCK + tl.arange(0, _BLOCK)
    x = loaded[0].to(tl.float32)
    if block * _BLOCK + _BLOCK > vocab_size:
        x = tl.where(ids < vocab_size, x, -float("inf"))
    return token_weights(x, loaded[1], ids, row, inv_t, HAS_Q)


@triton.jit
def read_blocks(mass_ptr, part, parts, num_blocks, row, vocab_size, inv_t, HAS_Q: tl.constexpr):
    """Write the masses of every parts-th block of a row, starting at `part`; loads one ahead."""
    ahead = load_block(part, row, HAS_Q)
    for block in range(part, num_blocks, parts):
        loaded = ahead
        ahead = load_block(block + parts, row, HAS_Q)
        weight = block_weights(block, loaded, row, vocab_size, inv_t, HAS_Q)
        tl.store(mass_ptr + block, fixed(tl.sum(weight, 0)))
