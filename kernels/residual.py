"""K3: the rows that the decision left open, block by block.

Of a row with a draft the mass of max(P p - q, 0), of a request's last row that of p, as int64
multiples of 2**-40; of a `match` request, the best token under the noise of the row's position.
"""

import torch
import triton
import triton.language as tl

from outrider.kernels._dispatch import num_programs
from outrider.kernels.decide import Drafts, Plan, row_index_reference
from outrider.kernels.philox import (
    FIXED_ONE,
    Purpose,
    exp,
    fixed,
    log_exponential,
    log_exponential_reference,
    philox,
    philox_reference,
)
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    BLOCK,
    STATE_LOG_Z,
    Rule,
    Sampling,
    log_prob,
    log_prob_reference,
    num_blocks,
)
from outrider.kernels.scan import BlockStats, blocks_reference

_PROGRAMS_PER_SM = 32
NO_ID = 0x7FFFFFFF


def weights_reference(
    target: torch.Tensor,
    token_ids: torch.Tensor,
    target_state: torch.Tensor,
    draft: torch.Tensor | None,
    draft_state: torch.Tensor | None,
    draft_id: torch.Tensor,
    has_draft: torch.Tensor,
    log_scale: torch.Tensor,
    inv_t: torch.Tensor,
) -> torch.Tensor:
    """Fixed-point max(P p - q, 0), or p of rows without a draft.

    Shape: target, draft [R, ...]; the rest a row each.
    """
    lead = (-1,) + (1,) * (target.ndim - 1)
    has_draft = has_draft.reshape(lead)
    p = log_prob_reference(target, token_ids, target_state, inv_t).exp()
    scaled = p * log_scale.exp().reshape(lead)
    is_draft = token_ids == draft_id.reshape(lead)
    residual = torch.where(is_draft, 0.0, scaled)  # one-hot: P p(X) - 1 <= 0
    if draft is not None and draft_state is not None:
        q = log_prob_reference(draft, token_ids, draft_state, inv_t).exp()
        one_hot = draft_state[:, STATE_LOG_Z].isnan().reshape(lead)
        residual = torch.where(one_hot, residual, (scaled - q).clamp_min(0.0))
    return (torch.where(has_draft, residual, p) * FIXED_ONE).long()


def pack_best_reference(score: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 whose order is (score ascending, token id descending); NaN counts as -inf."""
    bits = torch.where(score.isnan(), -torch.inf, score).view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, bits ^ NO_ID)
    return (ordered << 32) | (NO_ID - token_ids)


def unpack_best_reference(packed: torch.Tensor) -> torch.Tensor:
    return NO_ID - (packed & 0xFFFFFFFF)


def best_reference(
    target: torch.Tensor,
    state: torch.Tensor,
    position: torch.Tensor,
    sampling: Sampling,
    vocab_size: int,
) -> torch.Tensor:
    """Best token of each block under Gumbel noise, packed. Shape: [R, nb, BLOCK] -> [R, nb]."""
    ids = torch.arange(target[0].numel(), device=target.device)
    log_p = log_prob_reference(
        target, ids.view(target.shape[1:]), state, sampling.inverse_temperature()
    )
    group = ids[: -(-vocab_size // 4)]
    words = philox_reference(
        sampling.seed[:, None],
        position[:, None],
        torch.zeros_like(group),
        torch.full_like(group, Purpose.FINAL),
        group,
    )
    noise = log_exponential_reference(torch.stack(words, -1).flatten(1))
    score = torch.full_like(target, -torch.inf).flatten(1)
    size = min(noise.shape[1], score.shape[1])
    score[:, :size] = log_p.flatten(1)[:, :size] - noise[:, :size]
    return pack_best_reference(score, ids).view(target.shape).amax(-1)


def residual_reference(
    logits: torch.Tensor,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    sampling: Sampling,
    position: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Block masses of the rows that the plan names, of `match` rows packed bests; 0 elsewhere.

    `position` [B] is that of a request's row 0. Shape: [B, K + 1, num_blocks] int64.
    """
    batch, width = plan.log_scale.shape
    k = drafts.num_drafts
    shape = (batch, width, num_blocks(vocab_size))
    mass = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    offset = torch.arange(width, device=logits.device)
    b, j = ((plan.rows_to_read[:, None] >> offset) & 1).nonzero(as_tuple=True)
    if not len(b):
        return mass
    row = row_index_reference(cu_rows, drafts)[b, j]
    of_match = (sampling.rule == Rule.MATCH)[b]
    pick = of_match.nonzero().squeeze(-1)
    if len(pick):
        bp, jp, rp = b[pick], j[pick], row[pick]
        x = blocks_reference(logits[rp], vocab_size)
        own = sampling.take(bp)
        best = best_reference(x, rows.state[rp], position[bp] + jp, own, vocab_size)
        mass[bp, jp] = best
    rest = (~of_match).nonzero().squeeze(-1)
    if len(rest):
        bp, jp, rp = b[rest], j[rest], row[rest]
        x = blocks_reference(logits[rp], vocab_size)
        ids = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
        draft = draft_state = None
        slot = jp.clamp_max(max(width - 2, 0))
        if drafts.logits is not None and drafts.state is not None and width > 1:
            narrow = drafts.logits[bp, slot, :vocab_size].float()
            pad = x[0].numel() - narrow.shape[1]
            draft = torch.nn.functional.pad(narrow, (0, pad), value=-torch.inf).view(x.shape)
            draft_state = drafts.state[bp, slot]
        ids_of_drafts = drafts.token_ids[bp, slot] if width > 1 else torch.full_like(bp, -1)
        inv_t = sampling.inverse_temperature()[bp]
        weight = weights_reference(
            x, ids, rows.state[rp], draft, draft_state, ids_of_drafts, jp < k[bp],
            plan.log_scale[bp, jp], inv_t,
        )  # fmt: skip
        mass[bp, jp] = weight.sum(-1)
    return mass


@triton.jit
def probs(
    block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff, inv_t,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Processed probabilities of one block of a row, and its raw logits."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < width, other=0.0).to(tl.float32)
    if block * BLOCK + BLOCK > vocab_size:
        x = tl.where(ids < vocab_size, x, -float("inf"))
    p = exp((x - row_max) * inv_t - log_z)
    if threshold > -float("inf"):
        p = tl.where((x > threshold) | ((x == threshold) & (ids <= cutoff.to(tl.int32))), p, 0.0)
    return p, x


@triton.jit
def weights(
    block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff, draft_row_ptr,
    draft_width, draft_state_ptr, draft_id, has_draft, scale, inv_t, HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """max(P p - q, 0) of one block, or p of a row without a draft; and the raw logits."""
    weight, x = probs(
        block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff, inv_t, BLOCK
    )
    if has_draft:
        is_one_hot = True
        if HAS_Q:
            q_log_z = tl.load(draft_state_ptr + 1)
            if q_log_z == q_log_z:
                is_one_hot = False
                q, _ = probs(
                    block, draft_row_ptr, draft_width, tl.minimum(draft_width, vocab_size),
                    tl.load(draft_state_ptr), q_log_z, tl.load(draft_state_ptr + 2),
                    tl.load(draft_state_ptr + 3), inv_t, BLOCK,
                )  # fmt: skip
                weight = tl.maximum(weight * scale - q, 0.0)
        if is_one_hot:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            weight = tl.where(ids == draft_id, 0.0, weight * scale)  # P p(X) - 1 <= 0
    return weight, x


@triton.jit
def best_of_block(
    block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff, seed, position, inv_t,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Best token of a block under the Gumbel noise of its position, packed for a maximum."""
    best = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    zero = tl.zeros((64,), tl.int32)
    for start in range(block * BLOCK, block * BLOCK + BLOCK, 256):
        group = start // 4 + tl.arange(0, 64)
        words = philox(seed, zero + position.to(tl.int32), zero, zero + 2, group)
        for part in tl.static_range(4):
            ids = group * 4 + part
            x = tl.load(row_ptr + ids, mask=ids < width, other=0.0)
            x = tl.where(ids < vocab_size, x.to(tl.float32), -float("inf"))
            log_p = log_prob(x, ids, row_max, log_z, threshold, cutoff, inv_t)
            score = log_p - log_exponential(words[part])
            score = tl.where(score == score, score, -float("inf"))
            bits = score.to(tl.int32, bitcast=True)
            ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)
            best = tl.maximum(best, tl.max((ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64), 0))
    return best


@triton.jit(do_not_specialize=["num_columns", "draft_stride"])
def _residual_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    num_blocks,
    max_ptr,  # [N, num_blocks]
    state_ptr,  # [N, 4]
    cu_rows_ptr,  # [B + 1]
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    draft_ids_ptr,  # [B, K]
    draft_stride,
    draft_logits_ptr,  # [B, K, V'] or None
    draft_logits_stride_b,
    draft_logits_stride_k,
    draft_width,
    draft_state_ptr,  # [B, K, 4] or None
    temperature_ptr,  # [B], as the next three
    seed_ptr,
    rule_ptr,
    position_ptr,
    rows_to_read_ptr,  # [B]
    log_scale_ptr,  # [B, K + 1]
    mass_ptr,  # [B, K + 1, num_blocks]
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Programs of one warp, as in the scan: no barriers, and many loads in flight.
    strip = tl.program_id(0)
    num_strips = tl.num_programs(0)
    request = tl.program_id(1)
    rows_to_read = tl.load(rows_to_read_ptr + request)
    if rows_to_read == 0:
        return
    k = tl.load(num_drafts_ptr + request)
    row0 = tl.load(cu_rows_ptr + request)
    inv_t = 1.0 / tl.load(temperature_ptr + request)
    is_match = tl.load(rule_ptr + request) == 2
    seed = tl.load(seed_ptr + request)
    position = tl.load(position_ptr + request)
    for j in range(0, k + 1):
        if ((rows_to_read >> j) & 1) != 0:
            row = (row0 + j).to(tl.int64)
            row_ptr = logits_ptr + row * logits_stride
            state = state_ptr + row * 4
            row_max, log_z = tl.load(state), tl.load(state + 1)
            threshold, cutoff = tl.load(state + 2), tl.load(state + 3)
            scale = exp(tl.load(log_scale_ptr + request * num_columns + j))
            draft_id = tl.load(draft_ids_ptr + request * draft_stride + j, mask=j < k, other=-1)
            draft_row = draft_logits_ptr
            draft_state = draft_state_ptr
            if HAS_Q:
                draft_row += request.to(tl.int64) * draft_logits_stride_b
                draft_row += tl.cast(j, tl.int64) * draft_logits_stride_k
                draft_state += (request * (num_columns - 1) + j) * 4
            for block in range(strip, num_blocks, num_strips):
                at = (request * num_columns + j) * num_blocks + block
                is_empty = False
                if threshold > -float("inf"):
                    is_empty = tl.load(max_ptr + row * num_blocks + block) < threshold
                if is_match:
                    best = best_of_block(
                        block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff,
                        seed, position + j, inv_t, BLOCK,
                    )  # fmt: skip
                    tl.store(mass_ptr + at, best)
                elif is_empty:
                    tl.store(mass_ptr + at, tl.zeros((), tl.int64))
                else:
                    weight, _ = weights(
                        block, row_ptr, width, vocab_size, row_max, log_z, threshold, cutoff,
                        draft_row, draft_width, draft_state, draft_id, j < k, scale, inv_t,
                        HAS_Q, BLOCK,
                    )  # fmt: skip
                    tl.store(mass_ptr + at, fixed(tl.sum(weight, 0)))


def residual(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    sampling: Sampling,
    position: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Block masses of the rows that the plan names, of `match` rows packed bests; else undefined.

    `position` [B] is that of a request's row 0. Shape: [B, K + 1, num_blocks] int64.
    """
    batch, k_max = drafts.token_ids.shape
    blocks = stats.max.shape[1]
    mass = logits.new_empty((batch, k_max + 1, blocks), dtype=torch.int64)
    q, q_state = drafts.logits, drafts.state
    has_q = q is not None and q_state is not None and k_max > 0
    # A request's blocks are spread over enough programs to fill the device, and no more.
    strips = min(blocks, triton.cdiv(num_programs(logits.device, _PROGRAMS_PER_SM), batch))
    _residual_kernel[(strips, batch)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        blocks,
        stats.max,
        rows.state,
        cu_rows,
        drafts.num_drafts,
        k_max + 1,
        drafts.token_ids,
        drafts.token_ids.stride(0),
        q if has_q else None,
        q.stride(0) if q is not None else 0,
        q.stride(1) if q is not None else 0,
        q.shape[2] if q is not None else 0,
        q_state if has_q else None,
        sampling.temperature,
        sampling.seed,
        sampling.rule,
        position,
        plan.rows_to_read,
        plan.log_scale,
        mass,
        HAS_Q=has_q,
        BLOCK=BLOCK,
        num_warps=1,
        maxnreg=128,
    )
    return mass
