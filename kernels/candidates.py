"""A row's threshold from its few best tokens, ranked against each other: the common case.

Of 128 disjoint sets of groups, the 64 best set maxima bound the 64 best logits from below; the
groups of 64 tokens that reach the bound (about 90) hold every logit above it. If those logits are
few and their mass suffices, every one's rank and the mass before it are a sum over the others, and
the filters are a comparison each. No round trips, no sort.
"""

import triton
import triton.language as tl

from outrider.kernels.keys import key_of, relative_of, weight_of

_SETS = tl.constexpr(128)
_TILE_GROUPS = tl.constexpr(64)  # groups that are read at a time
_MAX_GROUPS = tl.constexpr(256)
_MAX_CANDIDATES = tl.constexpr(256)
_NO_CANDIDATE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
CANDIDATE_SCRATCH = 256 + 256  # int64 a row: groups, candidates
MIN_LANES = 128


@triton.jit
def threshold_from_candidates(
    row_ptr, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, by_p, group_max, scratch_ptr,
    num_groups, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whether it could be found; key of the lowest kept logit; last kept tie; kept mass."""
    candidates_ptr = scratch_ptr + _MAX_GROUPS
    lane = tl.arange(0, LANES)
    group_key = tl.where(lane < num_groups, key_of(group_max), -0x80000000)
    # A bound that the best groups reach: the set maximum of the rank wanted.
    best = tl.max(tl.reshape(group_key, (LANES // _SETS, _SETS)), 0)
    column = tl.arange(0, _SETS)
    earlier = (best[:, None] == best[None, :]) & (column[:, None] < column[None, :])
    better = tl.sum(((best[:, None] > best[None, :]) | earlier).to(tl.int32), 0)
    wanted = tl.where(by_k, tl.minimum(tl.maximum(top_k, 32), _SETS), 64)
    bound = tl.sum(tl.where(better == wanted - 1, best, 0), 0)

    chosen = (lane < num_groups) & (group_key >= bound)
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    tl.store(scratch_ptr + slot, lane.to(tl.int64), mask=chosen & (slot < _MAX_GROUPS))
    tl.debug_barrier()
    num_candidates = 0
    for start in range(0, tl.minimum(num_chosen, _MAX_GROUPS), _TILE_GROUPS):
        at = start + tl.arange(0, _TILE_GROUPS)
        group = tl.load(scratch_ptr + at, mask=at < num_chosen, other=0).to(tl.int32)
        tile_ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        valid = (at < num_chosen)[:, None] & (tile_ids < vocab_size)
        tile_key = key_of(tl.load(row_ptr + tile_ids, mask=valid, other=0.0).to(tl.float32))
        candidate = valid & (tile_key >= bound)
        in_group = tl.sum(candidate.to(tl.int32), 1)
        position = num_candidates + tl.cumsum(in_group, 0) - in_group
        position = position[:, None] + tl.cumsum(candidate.to(tl.int32), 1) - 1
        num_candidates += tl.sum(in_group, 0)
        packed = (tile_key.to(tl.int64) << 32) | (0x7FFFFFFF - tile_ids).to(tl.int64)
        candidate = candidate & (position < _MAX_CANDIDATES)
        tl.store(candidates_ptr + position, packed, mask=candidate)
    tl.debug_barrier()

    lane = tl.arange(0, _MAX_CANDIDATES)
    is_real = lane < num_candidates
    own = tl.load(candidates_ptr + lane, mask=is_real, other=_NO_CANDIDATE)
    key = (own >> 32).to(tl.int32)
    ids = 0x7FFFFFFF - (own & 0xFFFFFFFF).to(tl.int32)
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
        at = start + tl.arange(0, 16)
        other = tl.load(candidates_ptr + at, mask=at < num_candidates, other=_NO_CANDIDATE)
        other_weight = weight_of((other >> 32).to(tl.int32), row_max, inv_t)
        # The sums run down a thread's own column.
        ahead = other[:, None] > own[None, :]
        rank += tl.sum(ahead.to(tl.int32), 0)
        before += tl.sum(tl.where(ahead, other_weight[:, None], 0), 0)
    most = tl.where(by_k, top_k, 0x7FFFFFFF)
    mass = tl.where(by_k, tl.sum(tl.where(rank < most, weight, 0), 0), full)
    limit = tl.where(top_p < 1.0, top_p, float("inf")).to(tl.float64) * mass.to(tl.float64)
    dropped = (rank >= most) | (before.to(tl.float64) >= limit) | (relative < min_p)
    keep = ((dropped == 0) | (rank == 0)) & is_real
    threshold = tl.min(tl.where(keep, key, 0x7FFFFFFF), 0)
    at_threshold = (key == threshold) & is_real
    last_tie = tl.max(tl.where(keep & at_threshold, ids, 0), 0)
    is_cut = tl.sum((at_threshold & (keep == 0)).to(tl.int32), 0) > 0
    cutoff = tl.where(is_cut, last_tie, vocab_size)
    return found, threshold, cutoff, tl.sum(tl.where(keep, weight, 0), 0)
