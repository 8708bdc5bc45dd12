"""K1b: a row's state (maximum, log-normaliser, threshold, tie cutoff) from its blocks' stats.

Top-k, top-p (of what top-k leaves) and min-p (relative to the maximum) each keep a prefix of the
order (logit descending, token id ascending), so together they keep the shortest of the three, and
(threshold, cutoff) describes it without any probability being stored.

The kernel bisects the logits' bit patterns, first over the maxima of groups of 64 tokens, which
bound the threshold from below, then over the few groups that reach the bound. Masses are summed
in fixed point, so the outcome depends on no order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.philox import FIXED_ONE
from outrider.kernels.sampling import GROUP, STATE_WIDTH, Sampling, is_filtered
from outrider.kernels.scan import BlockStats, merge_blocks

_FIRST_CANDIDATES = 1024  # a nucleus is rarely wider; wider ones are sorted in full


class RowStates(NamedTuple):
    state: torch.Tensor  # [N, 4] float32 (max, log_z, threshold, cutoff); log_z NaN: a bad row
    argmax: torch.Tensor  # [N] int32 token id


def row_state_reference(
    logits: torch.Tensor, stats: BlockStats, sampling: Sampling, vocab_size: int
) -> RowStates:
    """States of rows under their own parameters. Shape: logits [N, V], sampling [N]."""
    row_max, block = stats.max.max(-1)
    argmax = stats.argmax.gather(1, block[:, None]).squeeze(1)
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
    return RowStates(state, torch.where(bad, 0, argmax).int())


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
    num_candidates = min(vocab_size, _FIRST_CANDIDATES)
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
        if num_candidates == vocab_size or bool((num_kept < num_candidates).all()):
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


# In the kernel, -0x80000000 is the key of no token, below the key of -inf, -0x7F800001.
@triton.jit
def _key(x):
    """int32 in the order of the floats; -0 is +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _relative(key, row_max, inv_t):
    """exp((l - max) / t) of keys; 0 for the key of no token."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    x = tl.where(key > -0x7F800001, bits.to(tl.float32, bitcast=True), -float("inf"))
    return tl.exp((x - row_max) * inv_t)


@triton.jit
def _weight(key, row_max, inv_t):
    return (_relative(key, row_max, inv_t) * 1099511627776.0).to(tl.int64)


@triton.jit
def _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, G: tl.constexpr):
    """Ids and keys of 64 candidate groups, ids ascending."""
    lane = tl.arange(0, 64 * G)
    slot = tile * 64 + lane // G
    valid = slot < num_groups
    ids = tl.load(groups_ptr + slot, mask=valid, other=0) * G + lane % G
    valid = valid & (ids < vocab_size)
    x = tl.load(row_ptr + ids, mask=valid, other=0.0).to(tl.float32)
    return ids, tl.where(valid, _key(x), -0x80000000)


@triton.jit
def _count(keys, at_least, row_ptr, groups_ptr, num_groups, width, vocab_size, G: tl.constexpr):
    count = tl.sum((keys >= at_least).to(tl.int32), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, G)
        count += tl.sum((more >= at_least).to(tl.int32), 0)
    return count


@triton.jit
def _mass(
    keys, weight, at_least, row_max, inv_t,
    row_ptr, groups_ptr, num_groups, width, vocab_size, G: tl.constexpr,
):  # fmt: skip
    mass = tl.sum(tl.where(keys >= at_least, weight, 0), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, G)
        mass += tl.sum(tl.where(more >= at_least, _weight(more, row_max, inv_t), 0), 0)
    return mass


@triton.jit
def _highest_below(
    keys, limit, row_ptr, groups_ptr, num_groups, width, vocab_size, G: tl.constexpr
):
    best = tl.max(tl.where(keys < limit, keys, -0x80000000), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, G)
        best = tl.maximum(best, tl.max(tl.where(more < limit, more, -0x80000000), 0))
    return tl.maximum(best, -0x7F800001)


@triton.jit(do_not_specialize=["num_columns"])
def _row_state_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    max_ptr,  # [N, num_blocks], as the next two
    argmax_ptr,
    total_ptr,
    group_max_ptr,  # [N, num_blocks * groups of a block]
    num_blocks,
    cu_rows_ptr,  # [B + 1]
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    temperature_ptr,  # [B], as the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    groups_ptr,  # [N, num_blocks * groups of a block], scratch
    state_ptr,  # [N, 4]
    NB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,  # no two distinct logits have keys closer than this
):
    request = tl.program_id(0) // num_columns
    offset = tl.program_id(0) % num_columns
    temperature = tl.load(temperature_ptr + request)
    if not is_filtered(request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
        return
    if offset > tl.load(num_drafts_ptr + request):
        return
    row = (tl.load(cu_rows_ptr + request) + offset).to(tl.int64)
    inv_t = 1.0 / temperature
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1.0

    one = tl.arange(0, 1)
    row_max, _argmax, z, bad = merge_blocks(
        row + one, one == 0, max_ptr, argmax_ptr, total_ptr, num_blocks, inv_t, NB
    )
    row_max, z = tl.sum(row_max, 0), tl.sum(z, 0)
    at = state_ptr + row * 4
    if tl.sum(bad.to(tl.int32), 0) > 0:
        tl.store(at, 0.0)
        tl.store(at + 1, float("nan"))
        tl.store(at + 2, -float("inf"))
        tl.store(at + 3, vocab_size.to(tl.float32))
        return

    # A lower bound of the threshold, from the maxima of the groups.
    row_groups = num_blocks * BLOCK_GROUPS
    lane = tl.arange(0, NB * BLOCK_GROUPS)
    group_max = tl.load(
        group_max_ptr + row * row_groups + lane, mask=lane < row_groups, other=-float("inf")
    )
    group_key = tl.where(lane < row_groups, _key(group_max), -0x80000000)
    full = (z * 1099511627776.0).to(tl.int64)
    top = tl.max(group_key, 0).to(tl.int64) + 1
    low = tl.full((), -0x7F800001, tl.int64)
    high = top
    if by_k:
        if top_k <= row_groups:
            while high - low > 65536:
                middle = low + ((high - low) >> 1)
                if tl.sum((group_key >= middle.to(tl.int32)).to(tl.int32), 0) >= top_k:
                    low = middle
                else:
                    high = middle
    elif by_p:
        group_weight = _weight(group_key, row_max, inv_t)
        target = top_p.to(tl.float64) * full.to(tl.float64)
        while high - low > 65536:
            middle = low + ((high - low) >> 1)
            above = tl.where(group_key >= middle.to(tl.int32), group_weight, 0)
            if tl.sum(above, 0).to(tl.float64) >= target:
                low = middle
            else:
                high = middle
    else:
        likely = _relative(group_key, row_max, inv_t) >= min_p
        low = tl.min(tl.where(likely, group_key, 0x7FFFFFFF), 0).to(tl.int64)
    chosen = group_key >= low.to(tl.int32)
    num_groups = tl.sum(chosen.to(tl.int32), 0)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    groups_ptr += row * row_groups
    tl.store(groups_ptr + slot, lane, mask=chosen)
    tl.debug_barrier()

    row_ptr = logits_ptr + row * logits_stride
    ids, keys = _load_tile(row_ptr, groups_ptr, 0, num_groups, width, vocab_size, GROUP)
    weight = _weight(keys, row_max, inv_t)
    threshold = tl.full((), -0x7F800001, tl.int32)
    num_ties = tl.full((), 0x7FFFFFFF, tl.int32)
    mass = full
    if by_k:
        high = top
        while high - low > STEP:
            middle = low + ((high - low) >> 1)
            count = _count(
                keys, middle.to(tl.int32), row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP
            )
            if count >= top_k:
                low = middle
            else:
                high = middle
        limit = high.to(tl.int32)
        threshold = _highest_below(
            keys, limit, row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP
        )
        num_ties = top_k - _count(
            keys, limit, row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP
        )
        mass = _mass(
            keys, weight, limit, row_max, inv_t,
            row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP,
        )  # fmt: skip
        mass += num_ties * _weight(threshold, row_max, inv_t)
    if by_p:
        target = top_p.to(tl.float64) * mass.to(tl.float64)
        high = top
        while high - low > STEP:
            middle = low + ((high - low) >> 1)
            above = _mass(
                keys, weight, middle.to(tl.int32), row_max, inv_t,
                row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP,
            )  # fmt: skip
            if above.to(tl.float64) >= target:
                low = middle
            else:
                high = middle
        limit = high.to(tl.int32)
        boundary = _highest_below(
            keys, limit, row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP
        )
        above = _mass(
            keys, weight, limit, row_max, inv_t,
            row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP,
        )  # fmt: skip
        # Ties i = 0, 1, .. are kept while above + i * each < target; the first one always is.
        each = _weight(boundary, row_max, inv_t)
        ties = ((target - above.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64)).to(tl.int64)
        ties += ((above + ties * each).to(tl.float64) < target).to(tl.int64)
        ties = tl.minimum(tl.maximum(ties, 1), 0x7FFFFFFF)
        ties = tl.where(each > 0, ties, 0x7FFFFFFF).to(tl.int32)
        num_ties = tl.where(boundary == threshold, tl.minimum(ties, num_ties), ties)
        threshold = boundary
    if min_p > 0.0:
        lowest = tl.full((), 0x7FFFFFFF, tl.int32)
        for tile in range(0, (num_groups + 63) // 64):
            _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, GROUP)
            likely = _relative(more, row_max, inv_t) >= min_p
            lowest = tl.minimum(lowest, tl.min(tl.where(likely, more, 0x7FFFFFFF), 0))
        lowest = tl.minimum(lowest, _key(row_max))
        num_ties = tl.where(lowest > threshold, 0x7FFFFFFF, num_ties)
        threshold = tl.maximum(lowest, threshold)

    above = _mass(
        keys, weight, threshold + 1, row_max, inv_t,
        row_ptr, groups_ptr, num_groups, width, vocab_size, GROUP,
    )  # fmt: skip
    tied = 0
    last_tie = 0x7FFFFFFF
    for tile in range(0, (num_groups + 63) // 64):
        ids, keys = _load_tile(row_ptr, groups_ptr, tile, num_groups, width, vocab_size, GROUP)
        is_tie = (keys == threshold).to(tl.int32)
        is_last = (is_tie > 0) & (tied + tl.cumsum(is_tie, 0) == num_ties)
        last_tie = tl.minimum(last_tie, tl.min(tl.where(is_last, ids, 0x7FFFFFFF), 0))
        tied += tl.sum(is_tie, 0)
    cutoff = tl.where(tied > num_ties, last_tie, vocab_size)
    kept = above + tl.minimum(tied, num_ties) * _weight(threshold, row_max, inv_t)
    bits = tl.where(threshold >= 0, threshold, threshold ^ 0x7FFFFFFF)
    tl.store(at, row_max)
    tl.store(at + 1, tl.log(kept.to(tl.float32) * 9.094947017729282e-13))
    tl.store(at + 2, bits.to(tl.float32, bitcast=True))
    tl.store(at + 3, cutoff.to(tl.float32))


_KEY_STEPS = {torch.float32: 1, torch.float16: 1 << 13, torch.bfloat16: 1 << 16}


def row_state(
    logits: torch.Tensor,
    stats: BlockStats,
    cu_rows: torch.Tensor,
    num_drafts: torch.Tensor,
    num_columns: int,
    sampling: Sampling,
    vocab_size: int,
    filters: bool,
) -> RowStates:
    """Room for every row's state, with those of filtered rows; `decide` writes the others.

    Shape: logits [N, V], cu_rows [B + 1], sampling [B]. `filters` false promises no filtered row.
    """
    new = logits.new_empty
    rows = RowStates(
        new((len(logits), STATE_WIDTH), dtype=torch.float32),
        new(len(logits), dtype=torch.int32),
    )
    group_max = stats.group_max
    if filters and group_max is not None:
        _row_state_kernel[(len(num_drafts) * num_columns,)](
            logits,
            logits.stride(0),
            logits.shape[1],
            vocab_size,
            stats.max,
            stats.argmax,
            stats.total,
            group_max,
            stats.max.shape[1],
            cu_rows,
            num_drafts,
            num_columns,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            torch.empty_like(group_max, dtype=torch.int32),
            rows.state,
            NB=triton.next_power_of_2(stats.max.shape[1]),
            BLOCK_GROUPS=group_max.shape[2],
            GROUP=GROUP,
            STEP=_KEY_STEPS[logits.dtype],
            num_warps=8,
        )
    return rows
