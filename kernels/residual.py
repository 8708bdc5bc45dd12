"""K3: the rows that the decision left open, block by block.

Of each such row, the mass of max(P p - q, 0) and of p, as int64 multiples of 2**-40; of a `match`
request, its best token under the noise of the row's position.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.decide import Drafts, Plan, row_index_reference
from outrider.kernels.philox import (
    FIXED_ONE,
    Purpose,
    log_exponential,
    log_exponential_reference,
    philox,
    philox_reference,
)
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    STATE_LOG_Z,
    Rule,
    Sampling,
    log_prob,
    log_prob_reference,
    num_blocks,
)
from outrider.kernels.scan import blocks_reference

NO_ID = 0x7FFFFFFF


class Masses(NamedTuple):
    """Defined where the plan asks for the row; `residual` of a `match` row holds packed bests."""

    residual: torch.Tensor  # [B, K + 1, num_blocks] int64
    target: torch.Tensor  # [B, K + 1, num_blocks] int64


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fixed-point max(P p - q, 0) and p. Shape: target, draft [R, ...]; the rest a row each."""
    lead = (-1,) + (1,) * (target.ndim - 1)
    log_p = log_prob_reference(target, token_ids, target_state, inv_t)
    p = log_p.exp()
    scaled = (log_p + log_scale.reshape(lead)).exp()
    is_draft = token_ids == draft_id.reshape(lead)
    residual = torch.where(is_draft, 0.0, scaled)  # one-hot: P p(X) - 1 <= 0
    if draft is not None and draft_state is not None:
        q = log_prob_reference(draft, token_ids, draft_state, inv_t).exp()
        one_hot = draft_state[:, STATE_LOG_Z].isnan().reshape(lead)
        residual = torch.where(one_hot, residual, (scaled - q).clamp_min(0.0))
    residual = torch.where(has_draft.reshape(lead), residual, scaled)
    return (residual * FIXED_ONE).long(), (p * FIXED_ONE).long()


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
) -> Masses:
    """Read the rows that the plan names. `position` [B] is that of a request's row 0."""
    batch, width = plan.log_scale.shape
    k = drafts.num_drafts
    shape = (batch, width, num_blocks(vocab_size))
    masses = Masses(
        torch.zeros(shape, dtype=torch.int64, device=logits.device),
        torch.zeros(shape, dtype=torch.int64, device=logits.device),
    )
    offset = torch.arange(width, device=logits.device)
    b, j = ((plan.rows_to_read[:, None] >> offset) & 1).nonzero(as_tuple=True)
    if not len(b):
        return masses
    row = row_index_reference(cu_rows, drafts)[b, j]
    of_match = (sampling.rule == Rule.MATCH)[b]
    pick = of_match.nonzero().squeeze(-1)
    if len(pick):
        bp, jp, rp = b[pick], j[pick], row[pick]
        x = blocks_reference(logits[rp], vocab_size)
        own = sampling.take(bp)
        best = best_reference(x, rows.state[rp], position[bp] + jp, own, vocab_size)
        masses.residual[bp, jp] = best
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
        residual, target = weights_reference(
            x, ids, rows.state[rp], draft, draft_state, ids_of_drafts, jp < k[bp],
            plan.log_scale[bp, jp], inv_t,
        )  # fmt: skip
        masses.residual[bp, jp] = residual.sum(-1)
        masses.target[bp, jp] = target.sum(-1)
    return masses


@triton.jit
def weights(
    ids, row_ptr, width, vocab_size, state_ptr, draft_row_ptr, draft_width, draft_state_ptr,
    draft_id, has_draft, log_scale, inv_t, HAS_Q: tl.constexpr,
):  # fmt: skip
    """max(P p - q, 0) and p of the tokens `ids` of one row, and its raw logits."""
    x = tl.load(row_ptr + ids, mask=ids < width, other=0.0)
    x = tl.where(ids < vocab_size, x.to(tl.float32), -float("inf"))
    log_p = log_prob(
        x, ids, tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2),
        tl.load(state_ptr + 3), inv_t,
    )  # fmt: skip
    p = tl.exp(log_p)
    scaled = tl.exp(log_p + log_scale)
    residual = scaled
    if has_draft:
        residual = tl.where(ids == draft_id, 0.0, scaled)  # one-hot: P p(X) - 1 <= 0
        if HAS_Q:
            q_log_z = tl.load(draft_state_ptr + 1)
            if q_log_z == q_log_z:
                xq = tl.load(draft_row_ptr + ids, mask=ids < draft_width, other=0.0)
                in_both = (ids < draft_width) & (ids < vocab_size)
                xq = tl.where(in_both, xq.to(tl.float32), -float("inf"))
                log_q = log_prob(
                    xq, ids, tl.load(draft_state_ptr), q_log_z, tl.load(draft_state_ptr + 2),
                    tl.load(draft_state_ptr + 3), inv_t,
                )  # fmt: skip
                residual = tl.maximum(scaled - tl.exp(log_q), 0.0)
    return residual, p, x


@triton.jit
def fixed(p):
    return (p * 1099511627776.0).to(tl.int64)


@triton.jit
def best_of_block(
    block, row_ptr, width, vocab_size, state_ptr, seed, position, inv_t, BLOCK: tl.constexpr
):
    """Best token of a block under the Gumbel noise of its position, packed for a maximum."""
    group = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    zero = tl.zeros((BLOCK // 4,), tl.int32)
    words = philox(seed, zero + position.to(tl.int32), zero, zero + 2, group)
    row_max, log_z = tl.load(state_ptr), tl.load(state_ptr + 1)
    threshold, cutoff = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    best = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
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


@triton.jit
def read_rows(
    request, strip, num_strips, num_blocks, rows_to_read, k, row0, num_columns, logits_ptr,
    logits_stride, width, vocab_size, max_ptr, state_ptr, draft_ids_ptr, draft_stride,
    draft_logits_ptr, draft_logits_stride_b, draft_logits_stride_k, draft_width, draft_state_ptr,
    log_scale_ptr, is_match, seed, position, inv_t, residual_ptr, target_ptr,
    HAS_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the masses of every num_strips-th block of the rows that a request's plan names."""
    for j in range(0, k + 1):
        if ((rows_to_read >> j) & 1) != 0:
            row = (row0 + j).to(tl.int64)
            row_ptr = logits_ptr + row * logits_stride
            state = state_ptr + row * 4
            threshold = tl.load(state + 2)
            log_scale = tl.load(log_scale_ptr + request * num_columns + j)
            draft_id = tl.load(draft_ids_ptr + request * draft_stride + j, mask=j < k, other=-1)
            draft_row = draft_logits_ptr
            draft_state = draft_state_ptr
            if HAS_Q:
                draft_row += request.to(tl.int64) * draft_logits_stride_b
                draft_row += tl.cast(j, tl.int64) * draft_logits_stride_k
                draft_state += (request * (num_columns - 1) + j) * 4
            for block in range(strip, num_blocks, num_strips):
                at = (request * num_columns + j) * num_blocks + block
                if is_match:
                    best = best_of_block(
                        block, row_ptr, width, vocab_size, state, seed, position + j, inv_t, BLOCK
                    )
                    tl.store(residual_ptr + at, best)
                elif tl.load(max_ptr + row * num_blocks + block) < threshold:
                    tl.store(residual_ptr + at, tl.zeros((), tl.int64))  # p keeps nothing here
                    tl.store(target_ptr + at, tl.zeros((), tl.int64))
                else:
                    ids = block * BLOCK + tl.arange(0, BLOCK)
                    residual, target, _ = weights(
                        ids, row_ptr, width, vocab_size, state, draft_row, draft_width,
                        draft_state, draft_id, j < k, log_scale, inv_t, HAS_Q,
                    )  # fmt: skip
                    tl.store(residual_ptr + at, tl.sum(fixed(residual), 0))
                    tl.store(target_ptr + at, tl.sum(fixed(target), 0))
