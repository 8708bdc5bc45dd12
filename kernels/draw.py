"""K4: settle how many drafts stand, draw the last token, emit.

The last token is drawn in two stages by inverse CDF, first a block and then a token inside it,
each with 40 random bits over int64 weights; one block is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.decide import (
    Drafts,
    Plan,
    accept_words_reference,
    row_index_reference,
)
from outrider.kernels.philox import (
    FIXED_ONE,
    Purpose,
    philox,
    philox_reference,
    pick,
    pick_reference,
    uniform,
    uniform_reference,
)
from outrider.kernels.residual import (
    Masses,
    fixed,
    unpack_best_reference,
    weights,
    weights_reference,
)
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


@triton.jit
def accept_blocks(
    accepted, rows_to_read, request, k, num_columns, num_blocks, log_scale_ptr, residual_ptr,
    seed, anchor, words_ptr, NB: tl.constexpr,
):  # fmt: skip
    """Accepted drafts of a `block` request now that Z is known: the last i with u_i <= h_i."""
    lane = tl.arange(0, NB)
    one = tl.full((), 1, tl.int32)
    first = accepted
    for i in range(first + 1, k):
        if ((rows_to_read >> i) & 1) != 0:
            at = request * num_columns + i
            mass = tl.load(residual_ptr + at * num_blocks + lane, mask=lane < num_blocks, other=0)
            z = tl.sum(mass, 0).to(tl.float32) * 9.094947017729282e-13
            h = z / (z + 1.0 - tl.exp(tl.load(log_scale_ptr + at)))
            if words_ptr is None:
                word, _, _, _ = philox(seed, anchor.to(tl.int32), one * (i - 1), one, one - one)
            else:
                at_word = words_ptr + (request * (num_columns + 1) + i - 1) * 4
                word = tl.load(at_word).to(tl.uint32)
            passed = (uniform(word) <= h) | (h != h)
            accepted = tl.where(passed, i, accepted)
    return accepted


@triton.jit
def match_drafts(
    request, k, num_columns, num_blocks, draft_ids_ptr, draft_stride, residual_ptr,
    NB: tl.constexpr,
):  # fmt: skip
    """Drafts that equal the target's own tokens, and its own token after them."""
    lane = tl.arange(0, NB)
    accepted = 0
    last = tl.zeros((), tl.int64)
    standing = True
    for j in range(0, k + 1):
        at = residual_ptr + (request * num_columns + j) * num_blocks + lane
        lowest = -0x7FFFFFFFFFFFFFFF
        best = tl.max(tl.load(at, mask=lane < num_blocks, other=lowest), 0)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        drafted = tl.load(draft_ids_ptr + request * draft_stride + j, mask=j < k, other=-1)
        accepted = tl.where(standing, j, accepted)
        last = tl.where(standing, token, last)
        standing = standing & (drafted == token)
    return accepted, last


@triton.jit
def draw_last(
    request, accepted, k, row, num_columns, num_blocks, logits_ptr, logits_stride, width,
    vocab_size, max_ptr, total_ptr, state_ptr, draft_ids_ptr, draft_stride, draft_logits_ptr,
    draft_logits_stride_b, draft_logits_stride_k, draft_width, draft_state_ptr, log_scale_ptr,
    residual_ptr, target_ptr, filtered, seed, anchor, offset, inv_t, words_ptr,
    PURPOSE: tl.constexpr, HAS_Q: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token after `accepted` drafts: a block by its mass, then a token inside it."""
    lane = tl.arange(0, NB)
    in_row = lane < num_blocks
    plain = accepted == k
    row = row.to(tl.int64)
    state = state_ptr + row * 4
    block_max = tl.load(max_ptr + row * num_blocks + lane, mask=in_row, other=-float("inf"))
    block_total = tl.load(total_ptr + row * num_blocks + lane, mask=in_row, other=0.0)
    from_stats = plain & (filtered == 0)
    use_residual = False
    at = (request * num_columns + accepted) * num_blocks + lane
    if from_stats:
        p = block_total * tl.exp((block_max - tl.load(state)) * inv_t - tl.load(state + 1))
        mass = fixed(p)
    else:
        mass = tl.load(residual_ptr + at, mask=in_row, other=0)
        # Rounding can reject where p = q and nothing is left to recover: fall back to p.
        use_residual = (accepted < k) & (tl.sum(mass, 0) > 0)
        if not use_residual:
            mass = tl.load(target_ptr + at, mask=in_row, other=0)
    if words_ptr is None:
        one = tl.full((), 1, tl.int32)
        w0, w1, w2, w3 = philox(
            seed, anchor.to(tl.int32), (offset + accepted).to(tl.int32), one * PURPOSE, one - one
        )
    else:
        at_word = words_ptr + (request * (num_columns + 1) + num_columns) * 4
        w0 = tl.load(at_word).to(tl.uint32)
        w1 = tl.load(at_word + 1).to(tl.uint32)
        w2 = tl.load(at_word + 2).to(tl.uint32)
        w3 = tl.load(at_word + 3).to(tl.uint32)
    below = tl.cumsum(mass, 0) <= pick(w0, w1, tl.sum(mass, 0))
    block = tl.minimum(tl.sum(below.to(tl.int32), 0), num_blocks - 1)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    draft_id = tl.load(
        draft_ids_ptr + request * draft_stride + accepted, mask=accepted < k, other=-1
    )
    draft_row = draft_logits_ptr
    draft_state = draft_state_ptr
    if HAS_Q:
        slot = tl.minimum(accepted, num_columns - 2)
        draft_row += request.to(tl.int64) * draft_logits_stride_b
        draft_row += slot.to(tl.int64) * draft_logits_stride_k
        draft_state += (request * (num_columns - 1) + slot) * 4
    residual, target, x = weights(
        ids, logits_ptr + row * logits_stride, width, vocab_size, state, draft_row, draft_width,
        draft_state, draft_id, use_residual,
        tl.load(log_scale_ptr + request * num_columns + accepted), inv_t, HAS_Q,
    )  # fmt: skip
    # Plain rows are normalised by their block, so that few bits are lost in a light one.
    own_max = tl.load(max_ptr + row * num_blocks + block)
    own_total = tl.load(total_ptr + row * num_blocks + block)
    of_block = tl.exp((x - own_max) * inv_t) / own_total
    weight = tl.where(use_residual, residual, target)
    weight = fixed(tl.where(from_stats, of_block, weight))
    # The same inverse CDF again, through the sums of groups: a short scan twice, not a long one.
    part: tl.constexpr = BLOCK // 64
    by_group = tl.reshape(weight, (part, 64))
    mass = tl.sum(by_group, 1)
    target = pick(w2, w3, tl.sum(mass, 0))
    prefix = tl.cumsum(mass, 0)
    group = tl.minimum(tl.sum((prefix <= target).to(tl.int32), 0), part - 1)
    here = tl.arange(0, part) == group
    target -= tl.sum(tl.where(here, prefix - mass, 0), 0)
    inner = tl.cumsum(tl.sum(tl.where(here[:, None], by_group, 0), 0), 0)
    token = block * BLOCK + group * 64 + tl.sum((inner <= target).to(tl.int32), 0)
    return tl.minimum(token, vocab_size - 1).to(tl.int64)
