"""K1b: a row's state (maximum, log-normaliser, threshold, tie cutoff) from its blocks' stats.

Top-k, top-p (of what top-k leaves) and min-p (relative to the maximum) each keep a prefix of the
order (logit descending, token id ascending), so together they keep the shortest of the three, and
(threshold, cutoff) describes it without any probability being stored.

The kernel ranks the few tokens that can matter against each other (candidates.py); rows where they
are not few are left to a second one, which bisects the logits' bit patterns (bisection.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.bisection import bisect_rows
from outrider.kernels.candidates import (
    CANDIDATE_SCRATCH,
    MIN_LANES,
    threshold_from_candidates,
)
from outrider.kernels.drafts import Drafts, rows_of
from outrider.kernels.keys import value_of
from outrider.kernels.philox import FIXED_ONE, log
from outrider.kernels.sampling import GROUP, STATE_WIDTH, Sampling, is_filtered
from outrider.kernels.scan import BlockStats, merge_totals

_FIRST_CANDIDATES = 1024  # a nucleus is rarely wider; wider ones are sorted in full


class RowStates(NamedTuple):
    """Of the references; the kernels keep the first alone."""

    state: torch.Tensor  # [N, 4] float32 (max, log_z, threshold, cutoff); log_z NaN: a bad row
    argmax: torch.Tensor  # [N] int64 token id


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
    return RowStates(state, torch.where(bad, 0, argmax))


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


@triton.jit(do_not_specialize=["num_columns"])
def _row_state_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    vocab_size,
    max_ptr,  # [N, num_blocks], as the next
    total_ptr,
    group_max_ptr,  # [N, num_blocks * groups of a block]
    num_blocks,
    cu_rows_ptr,  # [B + 1], or None: a row a request
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    temperature_ptr,  # [B], as the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    scratch_ptr,  # [N, scratch_stride] int64
    scratch_stride,
    state_ptr,  # [N, 4]
    NB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
):
    request = tl.program_id(0) // num_columns
    offset = tl.program_id(0) % num_columns
    temperature = tl.load(temperature_ptr + request)
    if not is_filtered(request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
        return
    k, row0 = rows_of(request, cu_rows_ptr, num_drafts_ptr)
    if offset > k:
        return
    row = (row0 + offset).to(tl.int64)
    inv_t = 1.0 / temperature
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1.0

    row_groups = num_blocks * BLOCK_GROUPS
    lane = tl.arange(0, LANES)
    group_max = tl.load(
        group_max_ptr + row * row_groups + lane, mask=lane < row_groups, other=-float("inf")
    )
    one = tl.arange(0, 1)
    row_max, z, bad = merge_totals(row + one, one == 0, max_ptr, total_ptr, num_blocks, inv_t, NB)
    row_max, z = tl.sum(row_max, 0), tl.sum(z, 0)
    at = state_ptr + row * 4
    if tl.sum(bad.to(tl.int32), 0) > 0:
        tl.store(at, 0.0)
        tl.store(at + 1, float("nan"))
        tl.store(at + 2, -float("inf"))
        tl.store(at + 3, vocab_size.to(tl.float32))
        return

    row_ptr = logits_ptr + row * logits_stride
    scratch_ptr += row * scratch_stride
    found, threshold, cutoff, kept = threshold_from_candidates(
        row_ptr, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, by_p, group_max,
        scratch_ptr, row_groups, LANES, GROUP,
    )  # fmt: skip
    if not found:
        tl.store(at + 1, float("inf"))  # for bisection
        return
    tl.store(at, row_max)
    tl.store(at + 1, log(kept.to(tl.float32) * 9.094947017729282e-13))
    tl.store(at + 2, value_of(threshold))
    tl.store(at + 3, cutoff.to(tl.float32))


def row_state(
    logits: torch.Tensor,
    stats: BlockStats,
    cu_rows: torch.Tensor | None,
    drafts: Drafts,
    sampling: Sampling,
    vocab_size: int,
    filters: bool,
) -> torch.Tensor:
    """Room for every row's state, with those of filtered rows; `decide` writes the others.

    `filters` false promises no filtered row. Shape: [N, 4] float32.
    """
    new = logits.new_empty
    state = new((len(logits), STATE_WIDTH), dtype=torch.float32)
    group_max = stats.group_max
    if filters and group_max is not None:
        batch, k_max = drafts.token_ids.shape
        columns = k_max + 1
        _row_state_kernel[(batch * columns,)](
            logits,
            logits.stride(0),
            vocab_size,
            stats.max,
            stats.total,
            group_max,
            stats.max.shape[1],
            cu_rows,
            drafts.num_drafts,
            columns,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            new((len(logits), CANDIDATE_SCRATCH), dtype=torch.int64),
            CANDIDATE_SCRATCH,
            state,
            NB=triton.next_power_of_2(stats.max.shape[1]),
            BLOCK_GROUPS=group_max.shape[2],
            LANES=max(MIN_LANES, triton.next_power_of_2(stats.max.shape[1]) * group_max.shape[2]),
            GROUP=GROUP,
            num_warps=4,
            maxnreg=128,  # 4 programs a multiprocessor
        )
        bisect_rows(logits, stats, state, cu_rows, drafts, sampling, vocab_size)
    return state
