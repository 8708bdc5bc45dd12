"""A row's threshold by bisection over bit patterns: any filter, any distribution, no sort.

First over the maxima of groups of 64 tokens, which bound the threshold from below, then over the
groups that reach the bound. Masses are fixed-point sums, so the outcome depends on no order.
"""

import torch
import triton
import triton.language as tl

from outrider.kernels.drafts import Drafts, rows_of
from outrider.kernels.keys import key_of, relative_of, value_of, weight_of
from outrider.kernels.philox import log
from outrider.kernels.sampling import GROUP, Sampling, is_filtered
from outrider.kernels.scan import BlockStats, merge_totals

_KEY_STEPS = {torch.float32: 1, torch.float16: 1 << 13, torch.bfloat16: 1 << 16}


@triton.jit
def _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, G: tl.constexpr):
    """Ids and keys of 64 candidate groups, ids ascending."""
    lane = tl.arange(0, 64 * G)
    slot = tile * 64 + lane // G
    valid = slot < num_groups
    ids = tl.load(groups_ptr + slot, mask=valid, other=0) * G + lane % G
    valid = valid & (ids < vocab_size)
    x = tl.load(row_ptr + ids, mask=valid, other=0.0).to(tl.float32)
    return ids, tl.where(valid, key_of(x), -0x80000000)


@triton.jit
def _count(keys, at_least, row_ptr, groups_ptr, num_groups, vocab_size, G: tl.constexpr):
    count = tl.sum((keys >= at_least).to(tl.int32), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, G)
        count += tl.sum((more >= at_least).to(tl.int32), 0)
    return count


@triton.jit
def _mass(
    keys, weight, at_least, row_max, inv_t,
    row_ptr, groups_ptr, num_groups, vocab_size, G: tl.constexpr,
):  # fmt: skip
    mass = tl.sum(tl.where(keys >= at_least, weight, 0), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, G)
        mass += tl.sum(tl.where(more >= at_least, weight_of(more, row_max, inv_t), 0), 0)
    return mass


@triton.jit
def _highest_below(keys, limit, row_ptr, groups_ptr, num_groups, vocab_size, G: tl.constexpr):
    best = tl.max(tl.where(keys < limit, keys, -0x80000000), 0)
    for tile in range(1, (num_groups + 63) // 64):
        _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, G)
        best = tl.maximum(best, tl.max(tl.where(more < limit, more, -0x80000000), 0))
    return tl.maximum(best, -0x7F800001)


@triton.jit
def _threshold_by_bisection(
    row_ptr, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, by_p, group_max_ptr,
    groups_ptr, row_groups, LANES: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Key of the lowest logit that is kept, id of the last kept of its ties, and the kept mass."""
    # A lower bound of the threshold, from the maxima of the groups.
    lane = tl.arange(0, LANES)
    group_max = tl.load(group_max_ptr + lane, mask=lane < row_groups, other=-float("inf"))
    group_key = tl.where(lane < row_groups, key_of(group_max), -0x80000000)
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
        group_weight = weight_of(group_key, row_max, inv_t)
        target = top_p.to(tl.float64) * full.to(tl.float64)
        while high - low > 65536:
            middle = low + ((high - low) >> 1)
            above = tl.where(group_key >= middle.to(tl.int32), group_weight, 0)
            if tl.sum(above, 0).to(tl.float64) >= target:
                low = middle
            else:
                high = middle
    else:
        likely = relative_of(group_key, row_max, inv_t) >= min_p
        low = tl.min(tl.where(likely, group_key, 0x7FFFFFFF), 0).to(tl.int64)
    chosen = group_key >= low.to(tl.int32)
    num_groups = tl.sum(chosen.to(tl.int32), 0)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups_ptr + slot, lane, mask=chosen)
    tl.debug_barrier()

    ids, keys = _load_tile(row_ptr, groups_ptr, 0, num_groups, vocab_size, GROUP)
    weight = weight_of(keys, row_max, inv_t)
    threshold = tl.full((), -0x7F800001, tl.int32)
    num_ties = tl.full((), 0x7FFFFFFF, tl.int32)
    mass = full
    if by_k:
        high = top
        while high - low > STEP:
            middle = low + ((high - low) >> 1)
            count = _count(
                keys, middle.to(tl.int32), row_ptr, groups_ptr, num_groups, vocab_size, GROUP
            )
            if count >= top_k:
                low = middle
            else:
                high = middle
        limit = high.to(tl.int32)
        threshold = _highest_below(keys, limit, row_ptr, groups_ptr, num_groups, vocab_size, GROUP)
        num_ties = top_k - _count(keys, limit, row_ptr, groups_ptr, num_groups, vocab_size, GROUP)
        mass = _mass(
            keys, weight, limit, row_max, inv_t,
            row_ptr, groups_ptr, num_groups, vocab_size, GROUP,
        )  # fmt: skip
        mass += num_ties * weight_of(threshold, row_max, inv_t)
    if by_p:
        target = top_p.to(tl.float64) * mass.to(tl.float64)
        high = top
        while high - low > STEP:
            middle = low + ((high - low) >> 1)
            above = _mass(
                keys, weight, middle.to(tl.int32), row_max, inv_t,
                row_ptr, groups_ptr, num_groups, vocab_size, GROUP,
            )  # fmt: skip
            if above.to(tl.float64) >= target:
                low = middle
            else:
                high = middle
        limit = high.to(tl.int32)
        boundary = _highest_below(keys, limit, row_ptr, groups_ptr, num_groups, vocab_size, GROUP)
        above = _mass(
            keys, weight, limit, row_max, inv_t,
            row_ptr, groups_ptr, num_groups, vocab_size, GROUP,
        )  # fmt: skip
        # Ties i = 0, 1, .. are kept while above + i * each < target; the first one always is.
        each = weight_of(boundary, row_max, inv_t)
        ties = ((target - above.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64)).to(tl.int64)
        ties += ((above + ties * each).to(tl.float64) < target).to(tl.int64)
        ties = tl.minimum(tl.maximum(ties, 1), 0x7FFFFFFF)
        ties = tl.where(each > 0, ties, 0x7FFFFFFF).to(tl.int32)
        num_ties = tl.where(boundary == threshold, tl.minimum(ties, num_ties), ties)
        threshold = boundary
    if min_p > 0.0:
        lowest = tl.full((), 0x7FFFFFFF, tl.int32)
        for tile in range(0, (num_groups + 63) // 64):
            _ids, more = _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, GROUP)
            likely = relative_of(more, row_max, inv_t) >= min_p
            lowest = tl.minimum(lowest, tl.min(tl.where(likely, more, 0x7FFFFFFF), 0))
        lowest = tl.minimum(lowest, key_of(row_max))
        num_ties = tl.where(lowest > threshold, 0x7FFFFFFF, num_ties)
        threshold = tl.maximum(lowest, threshold)

    above = _mass(
        keys, weight, threshold + 1, row_max, inv_t,
        row_ptr, groups_ptr, num_groups, vocab_size, GROUP,
    )  # fmt: skip
    tied = 0
    last_tie = 0x7FFFFFFF
    for tile in range(0, (num_groups + 63) // 64):
        ids, keys = _load_tile(row_ptr, groups_ptr, tile, num_groups, vocab_size, GROUP)
        is_tie = (keys == threshold).to(tl.int32)
        is_last = (is_tie > 0) & (tied + tl.cumsum(is_tie, 0) == num_ties)
        last_tie = tl.minimum(last_tie, tl.min(tl.where(is_last, ids, 0x7FFFFFFF), 0))
        tied += tl.sum(is_tie, 0)
    cutoff = tl.where(tied > num_ties, last_tie, vocab_size)
    kept = above + tl.minimum(tied, num_ties) * weight_of(threshold, row_max, inv_t)
    return threshold, cutoff, kept


@triton.jit(do_not_specialize=["num_columns"])
def _bisect_kernel(
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
    groups_ptr,  # [N, num_blocks * groups of a block], scratch
    state_ptr,  # [N, 4]; log_z inf marks the rows that are left to this kernel
    NB: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,  # no two distinct logits have keys closer than this
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
    at = state_ptr + row * 4
    if tl.load(at + 1) != float("inf"):
        return
    inv_t = 1.0 / temperature
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    one = tl.arange(0, 1)
    row_max, z, _bad = merge_totals(row + one, one == 0, max_ptr, total_ptr, num_blocks, inv_t, NB)
    row_max, z = tl.sum(row_max, 0), tl.sum(z, 0)
    row_groups = num_blocks * BLOCK_GROUPS
    threshold, cutoff, kept = _threshold_by_bisection(
        logits_ptr + row * logits_stride, vocab_size, row_max, z, inv_t, top_k, top_p,
        tl.load(min_p_ptr + request), (top_k > 0) & (top_k < vocab_size), top_p < 1.0,
        group_max_ptr + row * row_groups, groups_ptr + row * row_groups, row_groups, LANES, GROUP,
        STEP,
    )  # fmt: skip
    tl.store(at, row_max)
    tl.store(at + 1, log(kept.to(tl.float32) * 9.094947017729282e-13))
    tl.store(at + 2, value_of(threshold))
    tl.store(at + 3, cutoff.to(tl.float32))


def bisect_rows(
    logits: torch.Tensor,
    stats: BlockStats,
    state: torch.Tensor,
    cu_rows: torch.Tensor | None,
    drafts: Drafts,
    sampling: Sampling,
    vocab_size: int,
) -> None:
    """Write the states of the filtered rows whose log_z is inf. Shape: state [N, 4]."""
    group_max = stats.group_max
    assert group_max is not None
    lanes = triton.next_power_of_2(stats.max.shape[1]) * group_max.shape[2]
    batch, k_max = drafts.token_ids.shape
    _bisect_kernel[(batch * (k_max + 1),)](
        logits,
        logits.stride(0),
        vocab_size,
        stats.max,
        stats.total,
        group_max,
        stats.max.shape[1],
        cu_rows,
        drafts.num_drafts,
        k_max + 1,
        *sampling[:4],
        torch.empty_like(group_max, dtype=torch.int32),
        state,
        NB=triton.next_power_of_2(stats.max.shape[1]),
        BLOCK_GROUPS=group_max.shape[2],
        LANES=max(64, lanes),
        GROUP=GROUP,
        STEP=_KEY_STEPS[logits.dtype],
        num_warps=8,
    )
