"""A row's threshold by bisection over bit patterns: any filter, any distribution, no sort.

First over the maxima of groups of 64 tokens, which bound the threshold from below, then over the
groups that reach the bound. Masses are fixed-point sums, so the outcome depends on no order.
"""

import triton
import triton.language as tl

from outrider.kernels.keys import key_of, relative_of, weight_of


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
def threshold_by_bisection(
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
