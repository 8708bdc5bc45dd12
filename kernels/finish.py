"""K3 and K4 in one launch: the last program of a request to have read its rows draws and emits."""

import torch
import triton
import triton.language as tl

from outrider.kernels._dispatch import num_programs
from outrider.kernels.decide import Drafts, Plan
from outrider.kernels.draw import Verified, accept_blocks, draw_last, match_drafts
from outrider.kernels.philox import Purpose
from outrider.kernels.residual import read_rows
from outrider.kernels.row_state import RowStates
from outrider.kernels.sampling import BLOCK, Sampling, is_filtered
from outrider.kernels.scan import BlockStats

_PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["num_columns", "draft_stride"])
def _finish_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    max_ptr,  # [N, num_blocks], as the next
    total_ptr,
    num_blocks,
    state_ptr,  # [N, 4]
    row_argmax_ptr,  # [N]
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
    num_arrived_ptr,  # [B]
    residual_ptr,  # [B, K + 1, num_blocks], scratch, as the next
    target_ptr,
    token_ids_ptr,  # [B, K + 1]
    num_tokens_ptr,  # [B]
    is_bad_ptr,  # [B]
    PURPOSE: tl.constexpr,
    HAS_Q: tl.constexpr,
    NB: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    strip = tl.program_id(0)
    num_strips = tl.num_programs(0)
    request = tl.program_id(1)
    rows_to_read = tl.load(rows_to_read_ptr + request)
    if (rows_to_read == 0) & (strip != 0):
        return
    k = tl.load(num_drafts_ptr + request)
    row0 = tl.load(cu_rows_ptr + request)
    temperature = tl.load(temperature_ptr + request)
    greedy = temperature <= 0.0
    inv_t = 1.0 / tl.where(greedy, 1.0, temperature)
    rule = tl.load(rule_ptr + request)
    is_match = (rule == 2) & (temperature > 0.0)
    is_block = (rule == 1) & (temperature > 0.0)
    seed = tl.load(seed_ptr + request)
    anchor = tl.load(anchor_ptr + request)
    position = tl.load(position_ptr + request)
    if rows_to_read != 0:
        read_rows(
            request, strip, num_strips, num_blocks, rows_to_read, k, row0, num_columns,
            logits_ptr, logits_stride, width, vocab_size, max_ptr, state_ptr, draft_ids_ptr,
            draft_stride, draft_logits_ptr, draft_logits_stride_b, draft_logits_stride_k,
            draft_width, draft_state_ptr, log_scale_ptr, is_match, seed, position, inv_t,
            residual_ptr, target_ptr, HAS_Q, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # the whole program's stores come before its arrival
        if tl.atomic_add(num_arrived_ptr + request, 1) != num_strips - 1:
            return

    accepted = tl.load(accepted_ptr + request)
    last = tl.zeros((), tl.int64)
    if is_match:
        accepted, last = match_drafts(
            request, k, num_columns, num_blocks, draft_ids_ptr, draft_stride, residual_ptr, NB
        )
    elif greedy:
        last = tl.load(row_argmax_ptr + row0 + accepted).to(tl.int64)
    else:
        if is_block:
            accepted = accept_blocks(
                accepted, rows_to_read, request, k, num_columns, num_blocks, log_scale_ptr,
                residual_ptr, seed, anchor, words_ptr, NB,
            )  # fmt: skip
        filtered = is_filtered(request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
        last = draw_last(
            request, accepted, k, row0 + accepted, num_columns, num_blocks, logits_ptr,
            logits_stride, width, vocab_size, max_ptr, total_ptr, state_ptr, draft_ids_ptr,
            draft_stride, draft_logits_ptr, draft_logits_stride_b, draft_logits_stride_k,
            draft_width, draft_state_ptr, log_scale_ptr, residual_ptr, target_ptr, filtered, seed,
            anchor, position - anchor, inv_t, words_ptr, PURPOSE, HAS_Q, NB, BLOCK,
        )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    log_z = tl.load(state_ptr + (row0 + column) * 4 + 1, mask=column <= accepted, other=0.0)
    is_bad = tl.sum((log_z != log_z).to(tl.int32), 0) > 0
    last = tl.where(is_bad, 0, last)
    token = tl.load(
        draft_ids_ptr + request * draft_stride + column, mask=column < accepted, other=-1
    )
    token = tl.where(column == accepted, last, token)
    tl.store(token_ids_ptr + request * num_columns + column, token, mask=column < num_columns)
    tl.store(num_tokens_ptr + request, accepted + 1)
    tl.store(is_bad_ptr + request, is_bad)


def finish(
    logits: torch.Tensor,
    stats: BlockStats,
    rows: RowStates,
    cu_rows: torch.Tensor,
    drafts: Drafts,
    plan: Plan,
    num_arrived: torch.Tensor,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    words: torch.Tensor | None,
) -> Verified:
    """Tokens of every request; `position` [B] is that of a request's row 0."""
    batch, k_max = drafts.token_ids.shape
    blocks = stats.max.shape[1]
    new = logits.new_empty
    verified = Verified(
        new((batch, k_max + 1), dtype=torch.int64),
        new(batch, dtype=torch.int32),
        new(batch, dtype=torch.bool),
    )
    masses = new((2, batch, k_max + 1, blocks), dtype=torch.int64)
    q, q_state = drafts.logits, drafts.state
    has_q = q is not None and q_state is not None and k_max > 0
    # A request's blocks are spread over enough programs to fill the device, and no more.
    strips = min(blocks, -(-num_programs(logits.device, _PROGRAMS_PER_SM) // batch))
    _finish_kernel[(strips, batch)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        stats.max,
        stats.total,
        blocks,
        rows.state,
        rows.argmax,
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
        *sampling,
        anchor,
        position,
        words,
        *plan,
        num_arrived,
        masses[0],
        masses[1],
        *verified,
        PURPOSE=int(purpose),
        HAS_Q=has_q,
        NB=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        COLUMNS=64,
        num_warps=8,
        maxnreg=128,
    )
    return verified
