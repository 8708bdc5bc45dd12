"""K4: settle how many drafts of a sampled request stand, draw the last token, emit.

The last token is drawn in two stages by inverse CDF, first a block and then a token inside it,
each with 40 random bits over int64 weights; one block is read. `match` draws as match.py says.
"""

import torch
import triton
import triton.language as tl

from outrider.kernels.decide import Plan, Worklist
from outrider.kernels.drafts import (
    COLUMNS,
    Drafts,
    Verified,
    emit,
    emit_reference,
    row_index_reference,
    rows_of,
)
from outrider.kernels.match import match_reference, unpack_best
from outrider.kernels.philox import (
    FIXED_ONE,
    Purpose,
    exp,
    fixed,
    philox,
    philox_reference,
    pick,
    pick_reference,
)
from outrider.kernels.residual import load_block, probs, residual_weights, weights_reference
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    BLOCK,
    STATE_LOG_Z,
    STATE_MAX,
    Rule,
    Sampling,
    block_width,
    is_filtered,
    log_prob_reference,
)
from outrider.kernels.scan import BlockStats, blocks_reference
from outrider.kernels.settle import accept_blocks, accept_blocks_reference


def draw_reference(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    mass: torch.Tensor,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    words: torch.Tensor | None = None,
) -> Verified:
    """Tokens of every request; `position` [B] is that of a request's row 0."""
    k_max = drafts.token_ids.shape[1]
    offset = torch.arange(k_max + 1, device=logits.device)
    k = drafts.num_drafts.long()
    row_index = row_index_reference(cu_rows, drafts)
    greedy = sampling.temperature <= 0
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = accept_blocks_reference(plan, mass, drafts, sampling, anchor, words)
    last = torch.zeros_like(k)
    pairs = match.nonzero().squeeze(-1)
    if len(pairs):
        at = row_index[pairs].flatten()  # those past a request's last row are not looked at
        own = sampling.take(pairs.repeat_interleave(k_max + 1))
        tokens = match_reference(
            logits[at], rows.state[at], own.inverse_temperature(), own.seed,
            (position[pairs, None] + offset).flatten(), vocab_size,
        ).view(-1, k_max + 1)  # fmt: skip
        same = (tokens[:, :-1] == drafts.token_ids[pairs]) & (offset[:-1] < k[pairs, None])
        accepted[pairs] = same.long().cumprod(-1).sum(-1)
        last[pairs] = tokens.gather(1, accepted[pairs, None]).squeeze(1)
    row = row_index.gather(1, accepted[:, None]).squeeze(1)
    last = torch.where(greedy, rows.argmax[row].long(), last)
    sampled = (~greedy & ~match).nonzero().squeeze(-1)
    if len(sampled):
        last[sampled] = _draw_last_reference(
            logits, stats, rows, drafts, plan, mass, sampling, anchor, position, purpose,
            vocab_size, words, sampled, accepted[sampled], row[sampled],
        )  # fmt: skip
    return emit_reference(drafts, accepted, last, rows.state[row_index, STATE_LOG_Z].isnan())


def _block_mass_reference(
    stats: BlockStats, rows: RowStates, row: torch.Tensor, inv_t: torch.Tensor
) -> torch.Tensor:
    """Block masses of unfiltered rows, from their stats. Shape: [R] -> [R, num_blocks] int64."""
    state = rows.state[row]
    relative = (stats.max[row] - state[:, STATE_MAX, None]) * inv_t[:, None]
    block_p = stats.total[row] * torch.exp(relative - state[:, STATE_LOG_Z, None])
    return (block_p * FIXED_ONE).long()


def _draw_last_reference(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    drafts: Drafts,
    plan: Plan,
    mass: torch.Tensor,
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
    own_mass = mass[b, accepted]
    # Rounding can reject where p = q and nothing is left to recover: fall back to p.
    lost = ~plain & (own_mass.sum(-1) == 0)
    if bool(lost.any()):
        x = blocks_reference(logits[row], vocab_size)
        ids = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
        p = log_prob_reference(x, ids, state, inv_t).exp()
        own_mass = torch.where(lost[:, None], (p * FIXED_ONE).long().sum(-1), own_mass)
    from_stats = plain & ~own.is_filtered(vocab_size)
    plain_mass = _block_mass_reference(stats, rows, row, inv_t)
    own_mass = torch.where(from_stats[:, None], plain_mass, own_mass)
    if words is None:
        start, zero = anchor[b], torch.zeros_like(b)
        offset = position[b] - start + accepted
        w = philox_reference(own.seed, start, offset, torch.full_like(b, purpose), zero)
    else:
        w0, w1, w2, w3 = words[b, k_max + 1].unbind(-1)
        w = (w0, w1, w2, w3)
    block = _choose(own_mass, pick_reference(w[0], w[1], own_mass.sum(-1)))

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
    weight = weights_reference(
        x, ids, state, draft, draft_state, draft_id, ~plain & ~lost,
        plan.log_scale[b, accepted], inv_t,
    )  # fmt: skip
    # Plain rows are normalised by their block, so that few bits are lost in a light one.
    block_max = stats.max[row].gather(1, block[:, None])
    block_total = stats.total[row].gather(1, block[:, None])
    block_w = torch.exp((x - block_max) * inv_t[:, None]) / block_total
    weight = torch.where(from_stats[:, None], (block_w * FIXED_ONE).long(), weight)
    inner = _choose(weight, pick_reference(w[2], w[3], weight.sum(-1)))
    return ids.gather(1, inner[:, None]).squeeze(1).clamp_max(vocab_size - 1)


def _choose(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose inclusive prefix sum exceeds the target. Shape: [R, n], [R] -> [R]."""
    index = (weight.cumsum(-1) <= target[:, None]).sum(-1)
    return index.clamp_max(weight.shape[1] - 1)


@triton.jit
def _draw_last(
    request, accepted, k, row, num_columns, num_blocks, logits_ptr, logits_stride, width,
    vocab_size, max_ptr, total_ptr, state_ptr, draft_ids_ptr, draft_logits_ptr,
    draft_logits_stride_b, draft_logits_stride_k, draft_width, draft_state_ptr, log_scale_ptr,
    mass_ptr, filtered, seed, anchor, offset, inv_t, words_ptr,
    PURPOSE: tl.constexpr, HAS_Q: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token after `accepted` drafts: a block by its mass, then a token inside it."""
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
    row = row.to(tl.int64)
    column = request * num_columns + accepted
    state = state_ptr + row * 4
    row_ptr = logits_ptr + row * logits_stride
    row_max, log_z = tl.load(state), tl.load(state + 1)
    threshold, cutoff = tl.load(state + 2), tl.load(state + 3)
    scale = exp(tl.load(log_scale_ptr + column))
    from_stats = (accepted == k) & (filtered == 0)
    use_residual = accepted < k
    lane = tl.arange(0, NB)
    in_row = lane < num_blocks
    own_mass = mass_ptr + column.to(tl.int64) * num_blocks
    if from_stats:
        at = row * num_blocks + lane
        block_max = tl.load(max_ptr + at, mask=in_row, other=-float("inf"))
        total = tl.load(total_ptr + at, mask=in_row, other=0.0)
        mass = fixed(tl.where(in_row, total * exp((block_max - row_max) * inv_t - log_z), 0.0))
    else:
        mass = tl.load(own_mass + lane, mask=in_row, other=0)
    if use_residual & (tl.sum(mass, 0) == 0):
        # Rounding can reject where p = q and nothing is left to recover: fall back to p.
        use_residual = accepted > k
        for block in range(0, num_blocks):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = load_block(row_ptr, block, width, vocab_size, BLOCK)
            p = probs(x, ids, row_max, log_z, threshold, cutoff, inv_t)
            tl.store(own_mass + block, fixed(tl.sum(p, 0)))
        tl.debug_barrier()
        mass = tl.load(own_mass + lane, mask=in_row, other=0)
    below = tl.cumsum(mass, 0) <= pick(w0, w1, tl.sum(mass, 0))
    block = tl.minimum(tl.sum(below.to(tl.int32), 0), num_blocks - 1)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = load_block(row_ptr, block, width, vocab_size, BLOCK)
    if from_stats:
        # Normalised by its block, so that few bits are lost in a light one.
        own_max = tl.load(max_ptr + row * num_blocks + block)
        own_total = tl.load(total_ptr + row * num_blocks + block)
        weight = exp((x - own_max) * inv_t) / own_total
    else:
        weight = probs(x, ids, row_max, log_z, threshold, cutoff, inv_t)
        if use_residual:
            y = 0.0
            at = draft_state_ptr
            if HAS_Q:
                draft_row = draft_logits_ptr + request.to(tl.int64) * draft_logits_stride_b
                draft_row += accepted.to(tl.int64) * draft_logits_stride_k
                y = tl.load(draft_row + ids, mask=ids < draft_width, other=-float("inf"))
                at += (request * (num_columns - 1) + accepted) * 4
            draft_id = tl.load(draft_ids_ptr + accepted)
            weight = residual_weights(weight, y, ids, at, draft_id, scale, inv_t, HAS_Q)
    weight = fixed(weight)
    # The same inverse CDF again, through the sums of groups: a short scan twice, not a long one.
    part: tl.constexpr = BLOCK // 32
    by_group = tl.reshape(weight, (part, 32))
    mass = tl.sum(by_group, 1)
    target = pick(w2, w3, tl.sum(mass, 0))
    prefix = tl.cumsum(mass, 0)
    group = tl.minimum(tl.sum((prefix <= target).to(tl.int32), 0), part - 1)
    here = tl.arange(0, part) == group
    target -= tl.sum(tl.where(here, prefix - mass, 0), 0)
    inner = tl.cumsum(tl.sum(tl.where(here[:, None], by_group, 0), 0), 0)
    token = block * BLOCK + group * 32 + tl.sum((inner <= target).to(tl.int32), 0)
    return tl.minimum(token, vocab_size - 1).to(tl.int64)


@triton.jit(do_not_specialize=["num_columns", "draft_stride"])
def _draw_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    max_ptr,  # [N, num_blocks], as the next
    total_ptr,
    num_blocks,
    state_ptr,  # [N, 4]
    cu_rows_ptr,  # [B + 1], or None: a row a request
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    draft_ids_ptr,  # [B, K]
    draft_stride,
    draft_logits_ptr,  # [B, K, V'] or None
    draft_logits_stride_b,
    draft_logits_stride_k,
    draft_width,
    draft_state_ptr,  # [B, K, 4] or None
    temperature_ptr,  # [B], as the next seven
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    rule_ptr,
    anchor_ptr,
    position_ptr,
    words_ptr,  # [B, K + 2, 4] or None
    accepted_ptr,  # [B]
    rows_to_read_ptr,  # [B]
    log_scale_ptr,  # [B, K + 1]
    mass_ptr,  # [B, K + 1, num_blocks]
    best_ptr,  # [B, K + 1]
    token_ids_ptr,  # [B, K + 1]
    num_tokens_ptr,  # [B]
    is_bad_ptr,  # [B]
    PURPOSE: tl.constexpr,
    NB: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    HAS_Q: tl.constexpr = draft_logits_ptr is not None
    request = tl.program_id(0)
    temperature = tl.load(temperature_ptr + request)
    accepted = tl.load(accepted_ptr + request)
    rows_to_read = tl.load(rows_to_read_ptr + request)
    rule = tl.load(rule_ptr + request)
    seed = tl.load(seed_ptr + request)
    anchor = tl.load(anchor_ptr + request)
    position = tl.load(position_ptr + request)
    k, row0 = rows_of(request, cu_rows_ptr, num_drafts_ptr)
    if temperature <= 0:
        return
    inv_t = 1.0 / temperature
    filtered = is_filtered(request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    draft_ids_ptr += request * draft_stride
    last = tl.zeros((), tl.int64)
    if rule == 2:
        column = tl.arange(0, COLUMNS)
        own = tl.load(best_ptr + request * num_columns + column, mask=column <= k, other=0)
        own = tl.minimum(unpack_best(own), vocab_size - 1)
        token = tl.load(draft_ids_ptr + column, mask=column < k, other=-1)
        accepted = tl.min(tl.where((column < k) & (own == token), k, column), 0)
        last = tl.sum(tl.where(column == accepted, own, 0), 0)
    else:
        if rule == 1:
            accepted = accept_blocks(
                accepted, rows_to_read, request, k, num_columns, num_blocks, log_scale_ptr,
                mass_ptr, seed, anchor, words_ptr, NB,
            )  # fmt: skip
        last = _draw_last(
            request, accepted, k, row0 + accepted, num_columns, num_blocks, logits_ptr,
            logits_stride, width, vocab_size, max_ptr, total_ptr, state_ptr, draft_ids_ptr,
            draft_logits_ptr, draft_logits_stride_b, draft_logits_stride_k, draft_width,
            draft_state_ptr, log_scale_ptr, mass_ptr, filtered, seed, anchor, position - anchor,
            inv_t, words_ptr, PURPOSE, HAS_Q, NB, BLOCK,
        )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    log_z = tl.load(state_ptr + (row0 + column) * 4 + 1, mask=column <= accepted, other=0.0)
    is_bad = tl.sum((log_z != log_z).to(tl.int32), 0) > 0
    emit(
        request, accepted, last, is_bad, num_columns, draft_ids_ptr, token_ids_ptr,
        num_tokens_ptr, is_bad_ptr, COLUMNS,
    )  # fmt: skip


def draw(
    logits: torch.Tensor,
    stats: BlockStats,
    state: torch.Tensor,
    cu_rows: torch.Tensor | None,
    drafts: Drafts,
    plan: Plan,
    mass: torch.Tensor,
    worklist: Worklist,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    words: torch.Tensor | None,
    verified: Verified,
) -> None:
    """Write the tokens of sampled requests; `position` [B] is that of a request's row 0."""
    blocks = stats.max.shape[1]
    _draw_kernel[(len(plan.num_accepted),)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        stats.max,
        stats.total,
        blocks,
        state,
        cu_rows,
        drafts.num_drafts,
        *drafts.launch_arguments(),
        *sampling,
        anchor,
        position,
        words,
        *plan,
        mass,
        worklist.best,
        *verified,
        PURPOSE=int(purpose),
        NB=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
