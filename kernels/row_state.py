"""K1b: a row's state (maximum, log-normaliser, threshold, tie cutoff) from its blocks' stats.

Top-k, top-p (of what top-k leaves) and min-p (relative to the maximum) each keep a prefix of the
order (logit descending, token id ascending), so together they keep the shortest of the three, and
(threshold, cutoff) describes it without any probability being stored.

The kernel ranks the few tokens that can matter against each other (candidates.py); rows where they
are not few are left to a second one, which bisects the logits' bit patterns (bisection.py).
"""

import torch
import triton
import triton.language as tl

from outrider.kernels.bisection import bisect_rows
from outrider.kernels.candidates import (
    CANDIDATE_SCRATCH,
    CHUNK,
    MAX_CANDIDATES,
    MAX_GROUPS,
    threshold_from_candidates,
)
from outrider.kernels.decide import BAD, OPEN, accept_test, load_draft
from outrider.kernels.drafts import COLUMNS, Drafts, Verified, rows_of
from outrider.kernels.draw import draw_from_candidates, draw_from_sums, draw_words
from outrider.kernels.keys import value_of
from outrider.kernels.philox import FIXED_ONE, Purpose, log, log_of_fixed
from outrider.kernels.residual import open_row
from outrider.kernels.row_outcome import Rows, conclude_row, greedy_token, settle_row
from outrider.kernels.sampling import (
    BLOCK,
    GROUP,
    STATE_WIDTH,
    RowStates,
    Sampling,
    is_filtered,
)
from outrider.kernels.scan import BlockStats, merge_max, merge_totals

_WARPS = 4
_MAX_REGISTERS = 128  # 4 programs a multiprocessor
_FIRST_CANDIDATES = 1024  # a nucleus is rarely wider; wider ones are sorted in full


def row_state_reference(
    logits: torch.Tensor, stats: BlockStats, sampling: Sampling, vocab_size: int
) -> RowStates:
    """States of rows under their own parameters. Shape: logits [N, V], sampling [N]."""
    row_max, argmax = logits[:, :vocab_size].max(-1)
    row_max = row_max.float()
    inv_t = sampling.inverse_temperature()
    relative = torch.exp((stats.max - row_max[:, None]) * inv_t[:, None])
    z = (stats.total.double() * relative).sum(-1)
    # Greedy rows need no normaliser, only to be told from bad ones.
    log_z = torch.where(sampling.temperature > 0, z.log().float(), 0.0)
    bad = ~row_max.isfinite()
    state = torch.empty(len(logits), STATE_WIDTH, device=logits.device)
    state[:, 0] = row_max
    state[:, 1] = torch.where(bad, torch.nan, log_z)
    state[:, 2] = -torch.inf
    state[:, 3] = vocab_size
    filtered = (sampling.is_filtered(vocab_size) & ~bad).nonzero().squeeze(-1)
    if len(filtered):
        x = logits[filtered, :vocab_size].float()
        state[filtered] = _filter_reference(
            x, state[filtered], z[filtered], sampling.take(filtered)
        )
    return RowStates(state, torch.where(bad, -1, argmax))


def _filter_reference(
    x: torch.Tensor, state: torch.Tensor, z: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Threshold, cutoff and log_z of filtered rows.

    Shape: x [F, V] float32, state [F, 4], z [F] float64 sum of exp((l - max) / t).
    """
    vocab_size = x.shape[1]
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocab_size).clamp_max(vocab_size)
    inv_t = sampling.inverse_temperature()[:, None]
    top_p, row_max = sampling.top_p.double()[:, None], state[:, 0, None]
    num_candidates = min(vocab_size, int(top_k.max().clamp_max(_FIRST_CANDIDATES)))
    while True:
        value = x.topk(num_candidates, sorted=True).values  # [F, C], best first
        relative = torch.exp((value - row_max) * inv_t)
        weight = (relative * FIXED_ONE).long()
        rank = torch.arange(num_candidates, device=x.device)
        below_k = rank < top_k[:, None]
        mass = (weight * below_k).sum(-1).double()
        mass = torch.where(top_k < vocab_size, mass, z * FIXED_ONE)
        before = (weight.cumsum(-1) - weight).double()
        keep = below_k & ((top_p >= 1) | (before < top_p * mass[:, None]))
        keep &= relative >= sampling.min_p[:, None]
        keep[:, 0] = True
        num_kept = keep.sum(-1, keepdim=True)
        is_known = (num_kept < num_candidates) | (num_kept == top_k[:, None])
        if num_candidates == vocab_size or bool(is_known.all()):
            break
        num_candidates = vocab_size
    threshold = value.gather(1, num_kept - 1)
    num_ties = num_kept - (value > threshold).sum(-1, keepdim=True)
    tied = x == threshold
    state = state.clone()
    state[:, 1] = ((weight * keep).sum(-1).double() / FIXED_ONE).log().float()
    state[:, 2] = threshold[:, 0]
    cut = (tied.sum(-1, keepdim=True) > num_ties).squeeze(1).nonzero().squeeze(-1)
    if len(cut):
        reached = tied[cut].cumsum(-1) >= num_ties[cut]
        state[cut, 3] = reached.float().argmax(-1).float()
    return state


@triton.jit(do_not_specialize=["num_columns", "draft_stride"])
def _row_state_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    stats,
    num_blocks,
    cu_rows_ptr,  # [B + 1], or None: a row a request
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    draft_ids_ptr,  # [B, K]
    draft_stride,
    draft,
    sampling,
    anchor_ptr,  # [B], as the next
    position_ptr,
    words_ptr,  # [B, K + 2, 4] or None
    scratch_ptr,  # [N, scratch_stride] int64, if anything filters
    scratch_stride,
    rows,
    verified,
    PURPOSE: tl.constexpr,
    FILTERS: tl.constexpr,
    NB: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0) // num_columns
    offset = tl.program_id(0) % num_columns
    k, row0 = rows_of(request, cu_rows_ptr, num_drafts_ptr)
    if offset > k:
        return
    row = (row0 + offset).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    draft_ids_ptr += request * draft_stride
    temperature = tl.load(sampling.temperature + request)
    if temperature <= 0:
        row_max, block, bad = merge_max(row, stats, num_blocks, NB)
        own = greedy_token(row_max, block, row_ptr, vocab_size, BLOCK)
        conclude_row(
            tl.where(bad, BAD, own.to(tl.int64)), False, request, offset, k, num_columns,
            draft_ids_ptr, rows, verified, COLUMNS,
        )  # fmt: skip
        return
    inv_t = 1.0 / temperature
    rule = tl.load(sampling.rule + request)
    seed = tl.load(sampling.seed + request)
    anchor = tl.load(anchor_ptr + request)
    drafted = load_draft(
        request, offset, k, row_ptr, vocab_size, num_columns, draft_ids_ptr, draft, seed, anchor,
        words_ptr,
    )  # fmt: skip
    row_max, z, bad = merge_totals(row, stats, num_blocks, inv_t, NB)
    log_z = tl.where(bad, float("nan"), log(z))
    threshold = -float("inf")
    cutoff = vocab_size.to(tl.float32)
    groups = num_blocks * (BLOCK // GROUP)
    group_max_ptr = stats.group_max + row * groups
    scratch_ptr += row * scratch_stride
    candidates_ptr = scratch_ptr + MAX_GROUPS
    found = offset <= k
    filtered = offset > k
    num_candidates = 0
    if FILTERS:  # noqa: SIM102 (known when compiled)
        if is_filtered(request, sampling, vocab_size) & (bad == 0):
            filtered = offset <= k
            top_k = tl.load(sampling.top_k + request)
            found, key, last_tie, kept, num_candidates = threshold_from_candidates(
                row_ptr, vocab_size, row_max, z, inv_t, top_k, tl.load(sampling.top_p + request),
                tl.load(sampling.min_p + request), (top_k > 0) & (top_k < vocab_size),
                group_max_ptr, groups, scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True),
                candidates_ptr, GROUPS, GROUP,
            )  # fmt: skip
            log_z = log_of_fixed(kept)
            threshold = value_of(key)
            cutoff = last_tie.to(tl.float32)
    if not found:
        slot = tl.atomic_add(rows.counters + 1, 1, sem="relaxed")
        tl.store(rows.to_bisect + slot, request * COLUMNS + offset)
        return
    state = row_max, log_z, threshold, cutoff
    test = accept_test(drafted, state, inv_t)
    drawn = tl.full((), OPEN, tl.int64)
    is_last = offset == k
    if ((rule != 2) & is_last) | ((rule == 0) & filtered & (test[2] == 0)):
        words = draw_words(
            request, offset, num_columns, seed, anchor,
            tl.load(position_ptr + request) - anchor, words_ptr, PURPOSE,
        )  # fmt: skip
        if filtered:
            HAS_Q: tl.constexpr = draft.raw is not None
            own = open_row(
                request, offset, is_last == 0, row_ptr, width, state, drafted[4], draft_ids_ptr,
                draft, 0.0,
            )  # fmt: skip
            drawn = draw_from_candidates(
                own, candidates_ptr, num_candidates, vocab_size, inv_t, words, HAS_Q,
                MAX_CANDIDATES, BLOCK,
            )  # fmt: skip
        else:
            drawn = draw_from_sums(
                row, row_ptr, state, inv_t, stats, num_blocks, vocab_size, words, NB, BLOCK
            )
    settle_row(
        test, drawn, request, offset, k, row, row_ptr, state, inv_t, group_max_ptr, groups,
        vocab_size, num_columns, draft_ids_ptr, sampling, position_ptr, rows, verified, CHUNK,
        GROUP, COLUMNS,
    )  # fmt: skip


def row_state(
    logits: torch.Tensor,
    stats: BlockStats,
    cu_rows: torch.Tensor | None,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    vocab_size: int,
    filters: bool,
    words: torch.Tensor | None,
    rows: Rows,
    verified: Verified,
) -> None:
    """Write what comes of every row, and the outcomes of greedy and of `match` requests.

    `filters` false promises no filtered row.
    """
    new = logits.new_empty
    batch, k_max = drafts.token_ids.shape
    columns = k_max + 1
    blocks = stats.max.shape[1]
    scratch_rows = len(logits) if filters else 0
    _row_state_kernel[(batch * columns,)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        stats,
        blocks,
        cu_rows,
        drafts.num_drafts,
        columns,
        drafts.token_ids,
        drafts.token_ids.stride(0),
        drafts.draft_logits(),
        sampling,
        anchor,
        position,
        words,
        new((scratch_rows, CANDIDATE_SCRATCH), dtype=torch.int64),
        CANDIDATE_SCRATCH,
        rows,
        verified,
        PURPOSE=int(purpose),
        FILTERS=filters,
        NB=triton.next_power_of_2(blocks),
        GROUPS=triton.next_power_of_2(blocks * (BLOCK // GROUP)),
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        GROUP=GROUP,
        COLUMNS=COLUMNS,
        num_warps=_WARPS,
        maxnreg=_MAX_REGISTERS,
    )
    if filters:
        bisect_rows(
            logits, stats, cu_rows, drafts, sampling, anchor, position, vocab_size, words,
            rows, verified,
        )  # fmt: skip
