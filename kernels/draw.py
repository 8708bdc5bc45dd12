"""K4: settle how many drafts stand, draw the last token, emit.

The last token is drawn in two stages by inverse CDF, first a block and then a token inside it,
each with 40 random bits over int64 weights; one block is read.
"""

from typing import NamedTuple

import torch

from outrider.kernels.decide import (
    Drafts,
    Plan,
    accept_words_reference,
    row_index_reference,
)
from outrider.kernels.philox import (
    FIXED_ONE,
    Purpose,
    philox_reference,
    pick_reference,
    uniform_reference,
)
from outrider.kernels.residual import Masses, unpack_best_reference, weights_reference
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    BLOCK,
    STATE_LOG_Z,
    STATE_MAX,
    Rule,
    Sampling,
    block_width,
)
from outrider.kernels.scan import BlockStats


class Verified(NamedTuple):
    token_ids: torch.Tensor  # [B, K + 1] int64, padded with -1
    num_tokens: torch.Tensor  # [B] int32, 1..k_i + 1
    is_bad: torch.Tensor  # [B] bool: a row that was needed held NaN, inf or no finite logit


def accept_blocks_reference(
    plan: Plan,
    masses: Masses,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    words: torch.Tensor | None,
) -> torch.Tensor:
    """Accepted drafts once Z is known: of `block`, the last i with u_i <= h_i. Shape: [B]."""
    accepted = plan.num_accepted.long()
    k_max = drafts.token_ids.shape[1]
    if k_max == 0:
        return accepted
    offset = torch.arange(1, k_max, device=accepted.device)
    u = uniform_reference(accept_words_reference(sampling, anchor, k_max, words))[:, :-1]
    z = masses.residual[:, 1:-1].sum(-1).float() / FIXED_ONE
    h = z / (z + 1.0 - plan.log_scale[:, 1:-1].exp())
    open_rows = ((plan.rows_to_read[:, None] >> offset) & 1).bool()
    open_rows &= (sampling.rule == Rule.BLOCK)[:, None] & (offset > accepted[:, None])
    passed = torch.where(open_rows & ((u <= h) | h.isnan()), offset, 0)
    return torch.maximum(accepted, passed.amax(-1)) if k_max > 1 else accepted


def draw_reference(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    masses: Masses,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    words: torch.Tensor | None = None,
) -> Verified:
    """Tokens of every request; `position` [B] is that of a request's row 0."""
    batch, k_max = drafts.token_ids.shape
    requests = torch.arange(batch, device=logits.device)
    offset = torch.arange(k_max + 1, device=logits.device)
    k = drafts.num_drafts.long()
    row_index = row_index_reference(cu_rows, drafts)
    greedy = sampling.temperature <= 0
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = accept_blocks_reference(plan, masses, drafts, sampling, anchor, words)
    last = torch.zeros_like(k)
    if bool(match.any()):
        best = unpack_best_reference(masses.residual.amax(-1))  # [B, K + 1]
        same = (best[:, :-1] == drafts.token_ids) & (offset[:-1] < k[:, None])
        accepted = torch.where(match, same.long().cumprod(-1).sum(-1), accepted)
        last = best.gather(1, accepted[:, None]).squeeze(1)
    row = row_index.gather(1, accepted[:, None]).squeeze(1)
    last = torch.where(greedy, rows.argmax[row].long(), last)
    sampled = (~greedy & ~match).nonzero().squeeze(-1)
    if len(sampled):
        last[sampled] = _draw_last_reference(
            logits, stats, rows, drafts, plan, masses, sampling, anchor, position, purpose,
            vocab_size, words, sampled, accepted[sampled], row[sampled],
        )  # fmt: skip
    bad_rows = rows.state[row_index, STATE_LOG_Z].isnan() & (offset <= accepted[:, None])
    is_bad = bad_rows.any(-1)
    last = torch.where(is_bad, 0, last)
    token_ids = torch.full((batch, k_max + 1), -1, dtype=torch.int64, device=logits.device)
    if k_max:
        token_ids[:, :-1] = torch.where(offset[:-1] < accepted[:, None], drafts.token_ids, -1)
    token_ids[requests, accepted] = last
    return Verified(token_ids, (accepted + 1).int(), is_bad)


def _draw_last_reference(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    drafts: Drafts,
    plan: Plan,
    masses: Masses,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    words: torch.Tensor | None,
    b: torch.Tensor,
    accepted: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """Last token of the requests `b`, whose `accepted` drafts stand. Shape: [R]."""
    k_max = drafts.token_ids.shape[1]
    own = sampling.take(b)
    inv_t = own.inverse_temperature()
    state = rows.state[row]
    plain = accepted == drafts.num_drafts[b]
    residual, target = masses.residual[b, accepted], masses.target[b, accepted]
    # Rounding can reject where p = q and nothing is left to recover: fall back to p.
    use_residual = ~plain & (residual.sum(-1) > 0)
    relative = (stats.max[row] - state[:, STATE_MAX, None]) * inv_t[:, None]
    block_p = stats.total[row] * torch.exp(relative - state[:, STATE_LOG_Z, None])
    from_stats = plain & ~own.is_filtered(vocab_size)
    mass = torch.where(from_stats[:, None], (block_p * FIXED_ONE).long(), target)
    mass = torch.where(use_residual[:, None], residual, mass)
    if words is None:
        start, zero = anchor[b], torch.zeros_like(b)
        offset = position[b] - start + accepted
        w = philox_reference(own.seed, start, offset, torch.full_like(b, purpose), zero)
    else:
        w0, w1, w2, w3 = words[b, k_max + 1].unbind(-1)
        w = (w0, w1, w2, w3)
    block = _choose(mass, pick_reference(w[0], w[1], mass.sum(-1)))

    ids = block[:, None] * BLOCK + torch.arange(block_width(vocab_size), device=logits.device)
    inside = ids < vocab_size
    x = logits[row[:, None], ids.clamp_max(vocab_size - 1)].float()
    x = torch.where(inside, x, -torch.inf)
    draft = draft_state = None
    slot = accepted.clamp_max(max(k_max - 1, 0))
    draft_id = drafts.token_ids[b, slot] if k_max else torch.full_like(b, -1)
    if drafts.logits is not None and drafts.state is not None and k_max:
        width = min(drafts.logits.shape[-1], vocab_size)
        draft = drafts.logits[b[:, None], slot[:, None], ids.clamp_max(width - 1)].float()
        draft = torch.where(ids < width, draft, -torch.inf)
        draft_state = drafts.state[b, slot]
    residual_w, target_w = weights_reference(
        x, ids, state, draft, draft_state, draft_id, use_residual,
        plan.log_scale[b, accepted], inv_t,
    )  # fmt: skip
    # Plain rows are normalised by their block, so that few bits are lost in a light one.
    block_max = stats.max[row].gather(1, block[:, None])
    block_total = stats.total[row].gather(1, block[:, None])
    block_w = torch.exp((x - block_max) * inv_t[:, None]) / block_total
    weight = torch.where(use_residual[:, None], residual_w, target_w)
    weight = torch.where(from_stats[:, None], (block_w * FIXED_ONE).long(), weight)
    inner = _choose(weight, pick_reference(w[2], w[3], weight.sum(-1)))
    return ids.gather(1, inner[:, None]).squeeze(1).clamp_max(vocab_size - 1)


def _choose(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose inclusive prefix sum exceeds the target. Shape: [R, n], [R] -> [R]."""
    index = (weight.cumsum(-1) <= target[:, None]).sum(-1)
    return index.clamp_max(weight.shape[1] - 1)
