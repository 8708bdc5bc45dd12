"""A row's threshold from its few best tokens, ranked against each other: the common case.

Of 64 disjoint sets of groups, the 40 best set maxima bound the 40 best logits from below; the
groups of 64 tokens that reach the bound (60 to 100) hold every logit above it. If those
logits are few and their mass suffices, every one's rank and the mass before it are a sum over the
others, and the filters are a comparison each. No round trips, no sort, ties in id order.
"""

import triton
import triton.language as tl

from outrider.kernels.keys import key_of, relative_of, weight_of

_TILE_GROUPS = tl.constexpr(32)  # groups that are read at a time
_MAX_GROUPS = tl.constexpr(256)
_MAX_CANDIDATES = tl.constexpr(256)
CANDIDATE_SCRATCH = 64 + 256 + 2 * 256  # int32 a row: set maxima, groups, keys, ids


@triton.jit
def threshold_from_candidates(
    row_ptr, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, by_p, group_max_ptr,
    scratch_ptr, num_groups, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whether it could be found; key of the lowest kept logit; last kept tie; kept mass."""
    groups_ptr = scratch_ptr + 64
    keys_ptr = groups_ptr + _MAX_GROUPS
    ids_ptr = keys_ptr + _MAX_CANDIDATES
    # A bound that about 60 groups reach.
    lane = tl.arange(0, LANES)
    in_row = lane < num_groups
    group_max = tl.load(group_max_ptr + lane, mask=in_row, other=-float("inf"))
    group_key = tl.where(in_row, key_of(group_max), -0x80000000)
    best = tl.max(tl.reshape(group_key, (LANES // 64, 64)), 0)
    column = tl.arange(0, 64)
    tl.store(scratch_ptr + column, best)
    tl.debug_barrier()
    other = tl.load(scratch_ptr + column)
    earlier = (other[:, None] == best[None, :]) & (column[:, None] < column[None, :])
    better = tl.sum(((other[:, None] > best[None, :]) | earlier).to(tl.int32), 0)
    wanted = tl.where(by_k, tl.minimum(tl.maximum(top_k, 40), 64), 40)
    bound = tl.sum(tl.where(better == wanted - 1, best, 0), 0)

    chosen = in_row & (group_key >= bound)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    tl.store(groups_ptr + slot, lane, mask=chosen & (slot < _MAX_GROUPS))
    tl.debug_barrier()
    num_candidates = 0
    lane = tl.arange(0, _TILE_GROUPS * GROUP)
    for start in range(0, tl.minimum(num_chosen, _MAX_GROUPS), _TILE_GROUPS):
        at = start + lane // GROUP
        group = tl.load(groups_ptr + at, mask=at < num_chosen, other=0)
        tile_ids = group * GROUP + lane % GROUP
        valid = (at < num_chosen) & (tile_ids < vocab_size)
        tile_key = key_of(tl.load(row_ptr + tile_ids, mask=valid, other=0.0).to(tl.float32))
        candidate = valid & (tile_key >= bound)
        position = num_candidates + tl.cumsum(candidate.to(tl.int32), 0) - 1
        num_candidates += tl.sum(candidate.to(tl.int32), 0)
        candidate = candidate & (position < _MAX_CANDIDATES)
        tl.store(keys_ptr + position, tile_key, mask=candidate)
        tl.store(ids_ptr + position, tile_ids, mask=candidate)
    tl.debug_barrier()

    own = tl.arange(0, _MAX_CANDIDATES)
    key = tl.load(keys_ptr + own, mask=own < num_candidates, other=-0x80000000)
    ids = tl.load(ids_ptr + own, mask=own < num_candidates, other=0)
    relative = relative_of(key, row_max, inv_t)
    weight = weight_of(key, row_max, inv_t)
    full = (z * 1099511627776.0).to(tl.int64)
    enough = tl.sum(weight, 0).to(tl.float64) >= top_p.to(tl.float64) * full.to(tl.float64)
    found = (by_k & (num_candidates >= top_k)) | (by_p & (by_k == 0) & enough)
    found = found | ((min_p > 0.0) & (relative_of(bound, row_max, inv_t) < min_p))
    found = found & (num_chosen <= _MAX_GROUPS) & (num_candidates <= _MAX_CANDIDATES)

    rank = tl.zeros((_MAX_CANDIDATES,), tl.int32)
    before = tl.zeros((_MAX_CANDIDATES,), tl.int64)
    for start in range(0, tl.where(found, num_candidates, 0), 16):
        each = start + tl.arange(0, 16)
        other_key = tl.load(keys_ptr + each, mask=each < num_candidates, other=-0x80000000)
        other_weight = weight_of(other_key, row_max, inv_t)
        # The sums run down a thread's own column.
        tied = (other_key[:, None] == key[None, :]) & (each[:, None] < own[None, :])
        ahead = (other_key[:, None] > key[None, :]) | tied
        rank += tl.sum(ahead.to(tl.int32), 0)
        before += tl.sum(tl.where(ahead, other_weight[:, None], 0), 0)
    most = tl.where(by_k, top_k, 0x7FFFFFFF)
    mass = tl.where(by_k, tl.sum(tl.where(rank < most, weight, 0), 0), full)
    limit = tl.where(top_p < 1.0, top_p, float("inf")).to(tl.float64) * mass.to(tl.float64)
    dropped = (rank >= most) | (before.to(tl.float64) >= limit) | (relative < min_p)
    keep = ((dropped == 0) | (rank == 0)) & (own < num_candidates)
    threshold = tl.min(tl.where(keep, key, 0x7FFFFFFF), 0)
    at_threshold = (key == threshold) & (own < num_candidates)
    last_tie = tl.max(tl.where(keep & at_threshold, ids, 0), 0)
    is_cut = tl.sum((at_threshold & (keep == 0)).to(tl.int32), 0) > 0
    cutoff = tl.where(is_cut, last_tie, vocab_size)
    return found, threshold, cutoff, tl.sum(tl.where(keep, weight, 0), 0)
