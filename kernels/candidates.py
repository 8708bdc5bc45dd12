"""A row's threshold from its few best tokens, ranked against each other: the common case.

Of 64 disjoint sets of groups, the 40 best set maxima bound the 40 best logits from below; the
groups that reach the bound (60 or so, one of 64 tokens each) hold every logit above it. If those
logits are few and their mass suffices, every one's rank and the mass before it are a sum over the
others, and the filters are a comparison each. No round trips, no sort, ties in id order.
"""

import triton
import triton.language as tl

from outrider.kernels.keys import key_of, relative_of, weight_of

_MAX_GROUPS = tl.constexpr(128)
_MAX_CANDIDATES = tl.constexpr(256)
CANDIDATE_SCRATCH = 128 + 2 * 256  # int32 a row: groups, then keys and ids of candidates


@triton.jit
def threshold_from_candidates(
    row_ptr, width, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, by_p, group_max_ptr,
    scratch_ptr, num_blocks, NB: tl.constexpr, BLOCK_GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Whether it could be found; key of the lowest kept logit; last kept tie; kept mass."""
    # A bound that about 60 groups reach.
    lane = tl.arange(0, NB)[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
    in_row = lane < num_blocks * BLOCK_GROUPS
    group_max = tl.load(group_max_ptr + lane, mask=in_row, other=-float("inf"))
    group_key = tl.where(in_row, key_of(group_max), -0x80000000)
    best = tl.max(group_key, 0)  # [BLOCK_GROUPS]
    column = tl.arange(0, BLOCK_GROUPS)
    tl.store(scratch_ptr + column, best)
    tl.debug_barrier()
    best_row = tl.load(scratch_ptr + column)[:, None]
    best_column = tl.load(scratch_ptr + column)[None, :]
    earlier = (best_row == best_column) & (column[:, None] < column[None, :])
    better = tl.sum(((best_row > best_column) | earlier).to(tl.int32), 0)
    wanted = tl.where(by_k, tl.minimum(tl.maximum(top_k, 40), BLOCK_GROUPS), 40)
    best_column = tl.load(scratch_ptr + column)
    bound = tl.sum(tl.where(better == wanted - 1, best_column, 0), 0)
    tl.debug_barrier()

    chosen = (in_row & (group_key >= bound)).to(tl.int32)
    in_block = tl.sum(chosen, 1)
    num_groups = tl.sum(in_block, 0)
    slot = (tl.cumsum(in_block, 0) - in_block)[:, None] + tl.cumsum(chosen, 1) - 1
    tl.store(scratch_ptr + slot, lane, mask=(chosen > 0) & (slot < _MAX_GROUPS))
    tl.debug_barrier()

    slot = tl.arange(0, _MAX_GROUPS)
    group = tl.load(scratch_ptr + slot, mask=slot < num_groups, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = (slot < num_groups)[:, None] & (ids < vocab_size)
    x = tl.load(row_ptr + ids, mask=valid, other=0.0).to(tl.float32)
    key = tl.where(valid, key_of(x), -0x80000000)
    candidate = (valid & (key >= bound)).to(tl.int32)
    in_group = tl.sum(candidate, 1)
    num_candidates = tl.sum(in_group, 0)
    position = (tl.cumsum(in_group, 0) - in_group)[:, None] + tl.cumsum(candidate, 1) - 1
    keep = (candidate > 0) & (position < _MAX_CANDIDATES)
    keys_ptr = scratch_ptr + _MAX_GROUPS
    ids_ptr = keys_ptr + _MAX_CANDIDATES
    tl.store(keys_ptr + position, key, mask=keep)
    tl.store(ids_ptr + position, ids, mask=keep)
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
    found = found & (num_groups <= _MAX_GROUPS) & (num_candidates <= _MAX_CANDIDATES)

    rank = tl.zeros((_MAX_CANDIDATES,), tl.int32)
    before = tl.zeros((_MAX_CANDIDATES,), tl.int64)
    for start in range(0, tl.where(found, num_candidates, 0), 16):
        other = start + tl.arange(0, 16)
        other_key = tl.load(keys_ptr + other, mask=other < num_candidates, other=-0x80000000)
        other_weight = weight_of(other_key, row_max, inv_t)
        tied = (other_key[None, :] == key[:, None]) & (other[None, :] < own[:, None])
        ahead = (other_key[None, :] > key[:, None]) | tied
        rank += tl.sum(ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(ahead, other_weight[None, :], 0), 1)
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
