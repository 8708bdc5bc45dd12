"""K3: the rows that the decision left open, block by block.

Of a row with a draft the mass of max(P p - q, 0), of a request's last row that of p, as int64
multiples of 2**-40; of the rows of `match` requests their own tokens (match.py).
"""

import torch
import triton
import triton.language as tl

from outrider.kernels._dispatch import num_programs
from outrider.kernels.decide import Plan, Worklist
from outrider.kernels.drafts import Drafts, row_index_reference
from outrider.kernels.match import match_block
from outrider.kernels.philox import FIXED_ONE, exp, fixed
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import (
    BLOCK,
    GROUP,
    STATE_LOG_Z,
    Sampling,
    log_prob_reference,
    num_blocks,
)
from outrider.kernels.scan import BlockStats, blocks_reference

_PROGRAMS_PER_SM = 16


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


def residual_reference(
    logits: torch.Tensor,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    sampling: Sampling,
    vocab_size: int,
) -> torch.Tensor:
    """Block masses of the rows that the plan names; 0 elsewhere.

    Shape: [B, K + 1, num_blocks] int64.
    """
    batch, width = plan.log_scale.shape
    shape = (batch, width, num_blocks(vocab_size))
    mass = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    offset = torch.arange(width, device=logits.device)
    b, j = ((plan.rows_to_read[:, None] >> offset) & 1).nonzero(as_tuple=True)
    if not len(b):
        return mass
    row = row_index_reference(cu_rows, drafts)[b, j]
    x = blocks_reference(logits[row], vocab_size)
    ids = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    draft = draft_state = None
    slot = j.clamp_max(max(width - 2, 0))
    if drafts.logits is not None and drafts.state is not None and width > 1:
        narrow = drafts.logits[b, slot, :vocab_size].float()
        pad = x[0].numel() - narrow.shape[1]
        draft = torch.nn.functional.pad(narrow, (0, pad), value=-torch.inf).view(x.shape)
        draft_state = drafts.state[b, slot]
    draft_id = drafts.token_ids[b, slot] if width > 1 else torch.full_like(b, -1)
    weight = weights_reference(
        x, ids, rows.state[row], draft, draft_state, draft_id, j < drafts.num_drafts[b],
        plan.log_scale[b, j], sampling.inverse_temperature()[b],
    )  # fmt: skip
    mass[b, j] = weight.sum(-1)
    return mass


@triton.jit
def load_block(row_ptr, block, width, vocab_size, BLOCK: tl.constexpr):
    """Logits of one block of a row, -inf where the row or the vocabulary ends."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < width, other=-float("inf")).to(tl.float32)
    if block * BLOCK + BLOCK > vocab_size:
        x = tl.where(ids < vocab_size, x, -float("inf"))
    return x


@triton.jit
def probs(x, ids, row_max, log_z, threshold, cutoff, inv_t):
    """Processed probabilities of raw logits."""
    p = exp((x - row_max) * inv_t - log_z)
    if threshold > -float("inf"):
        p = tl.where((x > threshold) | ((x == threshold) & (ids <= cutoff.to(tl.int32))), p, 0.0)
    return p


@triton.jit
def residual_weights(p, y, ids, draft_state_ptr, draft_id, scale, inv_t, HAS_Q: tl.constexpr):
    """max(P p - q, 0), the draft's logits being y."""
    weight = p * scale
    is_one_hot = True
    if HAS_Q:
        q_log_z = tl.load(draft_state_ptr + 1)
        is_one_hot = q_log_z != q_log_z
        if not is_one_hot:
            q = probs(
                y.to(tl.float32), ids, tl.load(draft_state_ptr), q_log_z,
                tl.load(draft_state_ptr + 2), tl.load(draft_state_ptr + 3), inv_t,
            )  # fmt: skip
            weight = tl.maximum(weight - q, 0.0)
    if is_one_hot:
        weight = tl.where(ids == draft_id, 0.0, weight)  # P p(X) - 1 <= 0
    return weight


@triton.jit(do_not_specialize=["num_columns", "draft_stride", "capacity"])
def _residual_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    num_blocks,
    max_ptr,  # [N, num_blocks]
    state_ptr,  # [N, 4]
    num_columns,  # K + 1
    draft_ids_ptr,  # [B, K]
    draft_stride,
    draft_logits_ptr,  # [B, K, V'] or None
    draft_logits_stride_b,
    draft_logits_stride_k,
    draft_width,
    draft_state_ptr,  # [B, K, 4] or None
    temperature_ptr,  # [B], as the next two
    seed_ptr,
    position_ptr,
    group_max_ptr,  # [N, num_blocks * groups of a block]
    log_scale_ptr,  # [B, K + 1]
    num_items_ptr,  # [1]
    items_ptr,  # [B * (K + 1)]
    best_ptr,  # [B, K + 1]
    capacity,
    mass_ptr,  # [B, K + 1, num_blocks]
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs of one warp walk over the blocks of the rows in the list.
    HAS_Q: tl.constexpr = draft_logits_ptr is not None
    task = tl.program_id(0)
    item = tl.load(items_ptr + task // num_blocks, mask=task // num_blocks < capacity, other=0)
    num_tasks = tl.load(num_items_ptr) * num_blocks
    lane = tl.arange(0, BLOCK)
    while task < num_tasks:
        block = task % num_blocks
        row = item >> 32
        column = (item & 0x1FFFFFFF).to(tl.int32)
        is_match = ((item >> 29) & 1) != 0
        has_draft = ((item >> 30) & 1) != 0
        filtered = ((item >> 31) & 1) != 0
        request = column // num_columns
        j = column % num_columns
        task += tl.num_programs(0)
        at_item = task // num_blocks
        item = tl.load(items_ptr + at_item, mask=at_item < capacity, other=0)

        state = state_ptr + row * 4
        row_max, log_z = tl.load(state), tl.load(state + 1)
        threshold, cutoff = tl.load(state + 2), tl.load(state + 3)
        inv_t = 1.0 / tl.load(temperature_ptr + request)
        row_ptr = logits_ptr + row * logits_stride
        is_empty = False
        if filtered:
            is_empty = tl.load(max_ptr + row * num_blocks + block) < threshold
        if is_match:
            groups: tl.constexpr = BLOCK // GROUP
            match_block(
                best_ptr + column, block, row_ptr, vocab_size,
                group_max_ptr + row * num_blocks * groups, row_max, log_z, threshold, cutoff,
                inv_t, tl.load(seed_ptr + request), tl.load(position_ptr + request) + j, groups,
                GROUP,
            )  # fmt: skip
        else:
            mass = tl.zeros((), tl.int64)
            if not is_empty:
                ids = block * BLOCK + lane
                y = 0.0
                if HAS_Q:
                    draft_row = draft_logits_ptr + request.to(tl.int64) * draft_logits_stride_b
                    draft_row += j.to(tl.int64) * draft_logits_stride_k
                    of_draft = ids < tl.where(has_draft, draft_width, 0)
                    y = tl.load(draft_row + ids, mask=of_draft, other=-float("inf"))
                x = load_block(row_ptr, block, width, vocab_size, BLOCK)
                weight = probs(x, ids, row_max, log_z, threshold, cutoff, inv_t)
                if has_draft:
                    at = draft_state_ptr
                    if HAS_Q:
                        at += (request * (num_columns - 1) + j) * 4
                    draft_id = tl.load(draft_ids_ptr + request * draft_stride + j)
                    scale = exp(tl.load(log_scale_ptr + column))
                    weight = residual_weights(weight, y, ids, at, draft_id, scale, inv_t, HAS_Q)
                mass = fixed(tl.sum(weight, 0))
            tl.store(mass_ptr + column.to(tl.int64) * num_blocks + block, mass)


def residual(
    logits: torch.Tensor,
    stats: BlockStats,
    state: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    worklist: Worklist,
    sampling: Sampling,
    position: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Block masses of the rows in the worklist, undefined elsewhere; bests of `match` rows.

    `position` [B] is that of a request's row 0. Shape: [B, K + 1, num_blocks] int64.
    """
    batch, columns = plan.log_scale.shape
    blocks = stats.max.shape[1]
    mass = logits.new_empty((batch, columns, blocks), dtype=torch.int64)
    capacity = batch * columns
    programs = min(capacity * blocks, num_programs(logits.device, _PROGRAMS_PER_SM))
    _residual_kernel[(programs,)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        blocks,
        stats.max,
        state,
        *drafts.launch_arguments(),
        sampling.temperature,
        sampling.seed,
        position,
        stats.group_max,
        plan.log_scale,
        *worklist,
        capacity,
        mass,
        BLOCK=BLOCK,
        GROUP=GROUP,
        num_warps=1,
        maxnreg=128,
    )
    return mass
