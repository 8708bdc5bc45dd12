"""K2: the accept tests of every request, which rows must be read again, and greedy tokens.

`token` (arXiv 2211.17192, 2302.01318) accepts X_i while u_i <= p(X_i) / q(X_i). `block`
(arXiv 2403.10444) follows P_i = min(1, P_{i-1} p(X_i) / q(X_i)) and accepts up to the last i with
u_i <= h_i = Z_i / (Z_i + 1 - P_i), where Z_i = sum max(P_i p - q, 0) is only known after K3. As
h_i <= P_i, and h_i = 1 where P_i = 1, only the last i with P_i = 1 and the later ones with
u_i <= P_i are read, and none at all when u_k <= P_k = h_k.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.drafts import (
    COLUMNS,
    Drafts,
    Verified,
    emit,
    row_index_reference,
    rows_of,
)
from outrider.kernels.greedy import greedy_tokens
from outrider.kernels.match import NO_BEST
from outrider.kernels.philox import (
    Purpose,
    log,
    philox,
    philox_reference,
    uniform,
    uniform_reference,
)
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    BLOCK,
    STATE_LOG_Z,
    Rule,
    Sampling,
    is_filtered,
    log_prob,
    log_prob_reference,
)
from outrider.kernels.scan import BlockStats, merge_totals


class Plan(NamedTuple):
    num_accepted: torch.Tensor  # [B] int32; of `block`, what needs no Z; of `match`, 0
    rows_to_read: torch.Tensor  # [B] int64, bit j: K3 reads row j
    log_scale: torch.Tensor  # [B, K + 1] float32 log P_j (0 for `token`)


class Worklist(NamedTuple):
    """Rows for K3 in any order: row << 32 | filtered << 31 | draft << 30 | match << 29 | column."""

    num_items: torch.Tensor  # [1] int32; 0 before K2
    items: torch.Tensor  # [B * (K + 1)] int64
    best: torch.Tensor  # [B, K + 1] int64, of `match` rows: packed, the lowest after K2


def accept_words_reference(
    sampling: Sampling, anchor: torch.Tensor, num_drafts: int, words: torch.Tensor | None
) -> torch.Tensor:
    """One 32-bit word a draft, held in int64. Shape: [B, K]."""
    if words is not None:
        return words[:, :num_drafts, 0]
    offset = torch.arange(num_drafts, device=anchor.device)
    purpose = torch.full_like(offset, Purpose.ACCEPT)
    zero = torch.zeros_like(offset)
    return philox_reference(sampling.seed[:, None], anchor[:, None], offset, purpose, zero)[0]


def log_ratio_reference(
    logits: torch.Tensor,
    rows: RowStates,
    row_index: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling,
    vocab_size: int,
) -> torch.Tensor:
    """log p(X_i) - log q(X_i), -inf where p is 0, q is 0 or X_i is no token. Shape: [B, K]."""
    ids = drafts.token_ids
    offset = torch.arange(ids.shape[1], device=ids.device)
    valid = (offset < drafts.num_drafts[:, None]) & (ids >= 0) & (ids < vocab_size)
    safe_ids = torch.where(valid, ids, 0)
    at = row_index[:, :-1]
    inv_t = sampling.inverse_temperature()[:, None].expand(at.shape)
    log_p = log_prob_reference(logits[at, safe_ids].float(), safe_ids, rows.state[at], inv_t)
    if drafts.logits is None or drafts.state is None:
        log_q = torch.zeros_like(log_p)
    else:
        width = drafts.logits.shape[-1]
        raw = drafts.logits.gather(2, safe_ids.clamp_max(width - 1)[..., None])[..., 0].float()
        raw = torch.where(safe_ids < width, raw, -torch.inf)
        log_q = log_prob_reference(raw, safe_ids, drafts.state, inv_t)
        log_q = torch.where(drafts.state[..., STATE_LOG_Z].isnan(), 0.0, log_q)
    # A draft of q = 0 breaks the proposer's contract: rejected. NaN compares false: rejected.
    possible = valid & (log_p > -torch.inf) & (log_q > -torch.inf)
    return torch.where(possible, log_p - log_q, -torch.inf)


def decide_reference(
    logits: torch.Tensor,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    vocab_size: int,
    words: torch.Tensor | None = None,
) -> Plan:
    """Accept tests of every request; `words` [B, K + 2, 4] int64 replaces the random words."""
    batch, k_max = drafts.token_ids.shape
    k = drafts.num_drafts.long()
    row_index = row_index_reference(cu_rows, drafts)
    greedy = sampling.temperature <= 0
    log_scale = torch.zeros(batch, k_max + 1, device=logits.device)
    accepted = torch.zeros_like(k)
    later = torch.zeros_like(k)  # bits of the rows whose Z decides
    if k_max:
        offset = torch.arange(k_max, device=logits.device)
        in_range = offset < k[:, None]
        ratio = log_ratio_reference(logits, rows, row_index, drafts, sampling, vocab_size)
        log_u = uniform_reference(accept_words_reference(sampling, anchor, k_max, words)).log()
        same = rows.argmax[row_index[:, :-1]] == drafts.token_ids
        ok = torch.where(greedy[:, None], same, log_u <= ratio) & in_range
        accepted = ok.long().cumprod(-1).sum(-1)
        block = (sampling.rule == Rule.BLOCK) & ~greedy
        if bool(block.any()):
            scale = log_scale[:, 0]
            for i in range(k_max):
                scale = (scale + ratio[:, i]).clamp_max(0.0)
                log_scale[:, i + 1] = torch.where(block, scale, 0.0)
            index = torch.arange(k_max + 1, device=logits.device)
            certain = (log_scale == 0) & (index <= k[:, None])
            first = torch.where(certain, index, 0).amax(-1)  # h = 1: accepted without a Z
            passed = torch.zeros_like(certain)
            passed[:, 1:] = (log_u <= log_scale[:, 1:]) & in_range
            whole = (k == 0) | passed.gather(1, k[:, None]).squeeze(1)
            needed = (index == first[:, None]) | (passed & (index > first[:, None]))
            bits = ((needed & (index < k[:, None])).long() << index).sum(-1)
            accepted = torch.where(block, torch.where(whole, k, first), accepted)
            later = torch.where(block & ~whole, bits, 0)
    match = (sampling.rule == Rule.MATCH) & ~greedy
    accepted = torch.where(match, 0, accepted)
    # The last row: a residual, or a filtered row whose blocks' sums K1 could not know.
    read_last = ~greedy & ((accepted < k) | sampling.is_filtered(vocab_size))
    rows_to_read = later | (read_last.long() << accepted)
    rows_to_read = torch.where(match, 0, rows_to_read)
    return Plan(accepted.int(), rows_to_read, log_scale)


_ROWS = 8  # rows that a program takes at a time


@triton.jit(do_not_specialize=["num_columns", "draft_stride"])
def _decide_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    vocab_size,
    max_ptr,  # [N, num_blocks], as the next
    total_ptr,
    num_blocks,
    state_ptr,  # [N, 4], of filtered rows read, of the others written
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
    temperature_ptr,  # [B], as the next six
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    rule_ptr,
    anchor_ptr,
    words_ptr,  # [B, K + 2, 4] or None
    accepted_ptr,  # [B]
    rows_to_read_ptr,  # [B]
    log_scale_ptr,  # [B, K + 1]
    num_items_ptr,  # [1]
    items_ptr,  # [B * (K + 1)]
    best_ptr,  # [B, K + 1]
    token_ids_ptr,  # [B, K + 1], this and the next two written for greedy requests
    num_tokens_ptr,  # [B]
    is_bad_ptr,  # [B]
    NB: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    k, row0 = rows_of(request, cu_rows_ptr, num_drafts_ptr)
    draft_ids_ptr += request * draft_stride
    temperature = tl.load(temperature_ptr + request)
    if temperature <= 0:
        accepted, last, is_bad = greedy_tokens(
            row0, k, logits_ptr, logits_stride, vocab_size, max_ptr, num_blocks, draft_ids_ptr,
            NB, ROWS, BLOCK,
        )  # fmt: skip
        emit(
            request, accepted, last, is_bad, num_columns, draft_ids_ptr, token_ids_ptr,
            num_tokens_ptr, is_bad_ptr, COLUMNS,
        )  # fmt: skip
        tl.store(rows_to_read_ptr + request, tl.zeros((), tl.int64))
        return
    inv_t = 1.0 / temperature
    filtered = is_filtered(request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    rule = tl.load(rule_ptr + request)
    is_block = rule == 1
    is_match = rule == 2
    seed = tl.load(seed_ptr + request)
    anchor = tl.load(anchor_ptr + request)
    lane = tl.arange(0, ROWS)

    accepted = k  # of `token`: the first offset that fails, so far
    log_scale = 0.0  # log P_i
    first = 0  # the last i with P_i = 1
    later = tl.full((), 1, tl.int64)  # bits of `first` and of the i after it with u_i <= P_i
    whole = k == 0
    tl.store(log_scale_ptr + request * num_columns, 0.0)
    for start in range(0, k + 1, ROWS):
        j = start + lane
        row = row0 + j
        valid = j <= k
        drafted = j < k
        token = tl.load(draft_ids_ptr + j, mask=drafted, other=-1)
        exists = drafted & (token >= 0) & (token < vocab_size)
        raw = tl.load(
            logits_ptr + row.to(tl.int64) * logits_stride + token, mask=exists, other=0.0
        ).to(tl.float32)
        row_max, z, bad = merge_totals(row, valid, max_ptr, total_ptr, num_blocks, inv_t, NB)
        log_z = tl.where(bad, float("nan"), log(z))
        at = state_ptr + row * 4
        is_set = j <= tl.where(filtered, k, -1)
        row_max = tl.load(at, mask=is_set, other=row_max)
        log_z = tl.load(at + 1, mask=is_set, other=log_z)
        threshold = tl.load(at + 2, mask=is_set, other=-float("inf"))
        cutoff = tl.load(at + 3, mask=is_set, other=vocab_size.to(tl.float32))
        tl.store(at, row_max, mask=valid)
        tl.store(at + 1, log_z, mask=valid)
        tl.store(at + 2, threshold, mask=valid)
        tl.store(at + 3, cutoff, mask=valid)

        scale = tl.zeros((ROWS,), tl.float32)
        log_p = log_prob(raw, token, row_max, log_z, threshold, cutoff, inv_t)
        log_q = tl.zeros((ROWS,), tl.float32)
        if draft_logits_ptr is not None:
            at_q = draft_state_ptr + (request * (num_columns - 1) + j) * 4
            q_max = tl.load(at_q, mask=drafted, other=0.0)
            q_log_z = tl.load(at_q + 1, mask=drafted, other=float("nan"))
            q_threshold = tl.load(at_q + 2, mask=drafted, other=0.0)
            q_cutoff = tl.load(at_q + 3, mask=drafted, other=0.0)
            q_exists = exists & (token < draft_width)
            at_q = request.to(tl.int64) * draft_logits_stride_b + token
            at_q += j.to(tl.int64) * draft_logits_stride_k
            raw_q = tl.load(draft_logits_ptr + at_q, mask=q_exists, other=0.0).to(tl.float32)
            log_q = log_prob(raw_q, token, q_max, q_log_z, q_threshold, q_cutoff, inv_t)
            log_q = tl.where(q_exists, log_q, -float("inf"))
            log_q = tl.where(q_log_z != q_log_z, 0.0, log_q)
        possible = exists & (log_p > -float("inf")) & (log_q > -float("inf"))
        ratio = tl.where(possible, log_p - log_q, -float("inf"))
        if words_ptr is None:
            zero = tl.zeros((ROWS,), tl.int32)
            word, _, _, _ = philox(seed, zero + anchor.to(tl.int32), j, zero + 1, zero)
        else:
            at_word = words_ptr + (request * (num_columns + 1) + j) * 4
            word = tl.load(at_word, mask=drafted, other=0).to(tl.uint32)
        log_u = log(uniform(word))
        failed = tl.where(drafted & (log_u <= ratio), k, j)
        if is_block:
            for c in tl.static_range(ROWS):
                i = start + c + 1
                here = lane == c
                log_scale = tl.minimum(log_scale + tl.sum(tl.where(here, ratio, 0.0), 0), 0.0)
                scale = tl.where(here, log_scale, scale)
                passed = tl.sum(tl.where(here, log_u, 0.0), 0) <= log_scale
                whole = whole | (passed & (i == k))
                bit = tl.full((), 1, tl.int64) << i
                certain = (log_scale == 0.0) & (i <= k)
                later = tl.where(certain, bit, tl.where(passed & (i < k), later | bit, later))
                first = tl.where(certain, i, first)
        accepted = tl.minimum(accepted, tl.min(failed, 0))
        tl.store(log_scale_ptr + request * num_columns + j + 1, scale, mask=drafted)
    if is_block:
        accepted = tl.where(whole, k, first)
        below_k = (tl.full((), 1, tl.int64) << k) - 1
        later = tl.where(whole, 0, later & below_k)
    else:
        later = tl.zeros((), tl.int64)
    accepted = tl.where(is_match, 0, accepted)
    rows_to_read = later | (((accepted < k) | filtered).to(tl.int64) << accepted)
    rows_to_read = tl.where(is_match, 0, rows_to_read)
    tl.store(accepted_ptr + request, accepted)
    tl.store(rows_to_read_ptr + request, rows_to_read)
    j = tl.arange(0, COLUMNS)
    is_read = tl.where(is_match, (j <= k).to(tl.int64), (rows_to_read >> j) & 1).to(tl.int32)
    has_draft = j < k
    item = (row0 + j).to(tl.int64) << 32
    item |= (filtered.to(tl.int64) << 31) | (has_draft.to(tl.int64) << 30)
    item |= is_match.to(tl.int64) << 29
    item |= (request * num_columns + j).to(tl.int64)
    slot = tl.atomic_add(num_items_ptr, tl.sum(is_read, 0), sem="relaxed")
    tl.store(items_ptr + slot + tl.cumsum(is_read, 0) - 1, item, mask=is_read > 0)
    best = tl.zeros((COLUMNS,), tl.int64) + NO_BEST
    tl.store(best_ptr + request * num_columns + j, best, mask=is_match & (j <= k))


def decide(
    logits: torch.Tensor,
    stats: BlockStats,
    state: torch.Tensor,
    cu_rows: torch.Tensor | None,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    vocab_size: int,
    worklist: Worklist,
    words: torch.Tensor | None,
) -> tuple[Plan, Verified]:
    """Plan of every request, the worklist, and room for outcomes, with those of greedy requests.

    `state` [N, 4] holds the states of filtered rows already; those of the others are written here.
    """
    batch, k_max = drafts.token_ids.shape
    blocks = stats.max.shape[1]
    new = logits.new_empty
    plan = Plan(
        new(batch, dtype=torch.int32),
        new(batch, dtype=torch.int64),
        new((batch, k_max + 1), dtype=torch.float32),
    )
    verified = Verified(
        new((batch, k_max + 1), dtype=torch.int64),
        new(batch, dtype=torch.int32),
        new(batch, dtype=torch.bool),
    )
    _decide_kernel[(batch,)](
        logits,
        logits.stride(0),
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
        words,
        *plan,
        *worklist,
        *verified,
        NB=triton.next_power_of_2(blocks),
        ROWS=_ROWS,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return plan, verified
