"""Finds a row's threshold among its few best tokens, the common case, without a sort.

First a bound is found by halving, such that the maxima of about 64 groups (of 64 tokens each) reach
it. Every logit above the bound lies in these groups. If those logits are few and their mass is
enough, they are the candidates. A candidate's rank, and the mass before it, are sums over the
others; then each filter is one comparison.
"""

from ..triton_or_none import tl, triton
from .keys import key_of, relative_of, value_of, weight_of
from .philox import exp, fixed
from .sampling import GROUP

_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_TILE_GROUPS = tl.constexpr(32)  # groups read at a time
MAX_GROUPS = tl.constexpr(256)
MAX_CANDIDATES = tl.constexpr(256)
_PAIRS = tl.constexpr(2048)  # pairs of candidates compared at a time
_NO_CANDIDATE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
CANDIDATE_SCRATCH = 256 + 256  # int64 numbers a row: groups, then candidates by id


@triton.jit
def load_candidates(candidates_ptr, num_candidates):
    """Ids, ascending, and logits; -inf after the last candidate."""
    lane = tl.arange(0, MAX_CANDIDATES)
    packed = tl.load(candidates_ptr + lane, mask=lane < num_candidates, other=_NO_CANDIDATE)
    key = (packed >> 32).to(tl.int32)
    x = tl.where(key > -0x7F800001, value_of(key), -float("inf"))
    return 0x7FFFFFFF - (packed & 0xFFFFFFFF).to(tl.int32), x


@triton.jit
def _bound(group_max, row_max, wanted):
    """A logit that the maxima of at least `wanted` groups reach, and of at most half as many more.

    If the maxima are too equal, more reach it; if too few are finite, all do.
    """
    below, above = -float("inf"), row_max
    bound = row_max - 4.0
    rounds = 0
    searching = wanted > 0
    while searching:
        count = tl.sum((group_max >= bound).to(tl.int32), 0)
        below = tl.where(count >= wanted, bound, below)
        above = tl.where(count >= wanted, above, bound)
        rounds += 1
        searching = (rounds < 16) & ((count < wanted) | (count > wanted + wanted // 2))
        wider = row_max + 2 * (bound - row_max)
        bound = tl.where(below > -float("inf"), (below + above) / 2, wider)
    return tl.maximum(below, _LOWEST)


@triton.jit
def _rank(
    candidates_ptr, num_candidates, row_max, inv_t, top_k, top_p, min_p, by_k, full,
    LANES: tl.constexpr,
):  # fmt: skip
    """Key of the lowest kept logit; last kept tie; kept mass."""
    lane = tl.arange(0, LANES)
    TILE: tl.constexpr = _PAIRS // LANES
    tile = tl.arange(0, TILE)
    is_real = lane < num_candidates
    own = tl.load(candidates_ptr + lane, mask=is_real, other=_NO_CANDIDATE)
    ahead = tl.load(candidates_ptr + tile, mask=tile < num_candidates, other=_NO_CANDIDATE)
    relative = relative_of((own >> 32).to(tl.int32), row_max, inv_t)
    weight = fixed(relative)
    rank = tl.zeros((LANES,), tl.int32)
    before = tl.zeros((LANES,), tl.int64)
    for start in range(0, num_candidates, TILE):
        other = ahead
        at = start + TILE + tile
        ahead = tl.load(candidates_ptr + at, mask=at < num_candidates, other=_NO_CANDIDATE)
        other_weight = weight_of((other >> 32).to(tl.int32), row_max, inv_t)
        # Each thread sums its own column.
        is_before = other[:, None] > own[None, :]
        rank += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, other_weight[:, None], 0), 0)
    most = tl.where(by_k, top_k, 0x7FFFFFFF)
    mass = tl.where(by_k, tl.sum(tl.where(rank < most, weight, 0), 0), full)
    limit = tl.where(top_p < 1.0, top_p, float("inf")).to(tl.float64) * mass.to(tl.float64)
    dropped = (rank >= most) | (before.to(tl.float64) >= limit) | (relative < min_p)
    keep = ((dropped == 0) | (rank == 0)) & is_real
    last = tl.min(tl.where(keep, own, 0x7FFFFFFFFFFFFFFF), 0)
    last_tie = 0x7FFFFFFF - (last & 0xFFFFFFFF).to(tl.int32)
    return (last >> 32).to(tl.int32), last_tie, tl.sum(tl.where(keep, weight, 0), 0)


@triton.jit
def threshold_from_candidates(
    row_ptr, vocab_size, row_max, z, inv_t, top_k, top_p, min_p, by_k, group_max_ptr,
    num_groups, groups_ptr, candidates_ptr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Whether it was found; then lowest kept key, last kept tie, kept mass and num_candidates."""
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, MAX_CANDIDATES)
    full = fixed(z)
    wanted = tl.where(by_k, tl.minimum(tl.maximum(top_k, 32), 160), 64)
    num_candidates = wanted * 0
    bound = row_max
    found = num_candidates > 0
    attempts = 0
    searching = num_candidates == 0
    while searching:
        group_max = tl.load(group_max_ptr + group, mask=group < num_groups, other=-float("inf"))
        bound = _bound(group_max, row_max, wanted)
        chosen = group_max >= bound
        num_chosen = tl.sum(chosen.to(tl.int32), 0)
        slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(groups_ptr + slot, group, mask=chosen & (slot < MAX_GROUPS))
        tl.debug_barrier()
        num_candidates = wanted * 0
        for start in range(0, tl.minimum(num_chosen, MAX_GROUPS), _TILE_GROUPS):
            at = start + tl.arange(0, _TILE_GROUPS)
            tile_group = tl.load(groups_ptr + at, mask=at < num_chosen, other=0)
            ids = tile_group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            valid = (at < num_chosen)[:, None] & (ids < vocab_size)
            x = tl.load(row_ptr + ids, mask=valid, other=0.0).to(tl.float32)
            candidate = valid & (x >= bound)
            in_group = tl.sum(candidate.to(tl.int32), 1)
            position = num_candidates + tl.cumsum(in_group, 0) - in_group
            position = position[:, None] + tl.cumsum(candidate.to(tl.int32), 1) - 1
            num_candidates += tl.sum(in_group, 0)
            packed = (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
            candidate = candidate & (position < MAX_CANDIDATES)
            tl.store(candidates_ptr + position, packed, mask=candidate)
        tl.debug_barrier()
        own = tl.load(candidates_ptr + lane, mask=lane < num_candidates, other=_NO_CANDIDATE)
        mass = tl.sum(weight_of((own >> 32).to(tl.int32), row_max, inv_t), 0).to(tl.float64)
        enough = (by_k == 0) & (top_p < 1.0) & (mass >= top_p.to(tl.float64) * full.to(tl.float64))
        enough = enough | (by_k & (num_candidates >= top_k)) | (bound == _LOWEST)
        enough = enough | ((min_p > 0.0) & (exp((bound - row_max) * inv_t) < min_p))
        few = (num_chosen <= MAX_GROUPS) & (num_candidates <= MAX_CANDIDATES)
        found = enough & few
        # Try once more: with more groups if the mass was short, with fewer if they were too many.
        attempts += 1
        searching = (found == 0) & (attempts < 2)
        wanted = tl.where(few, 160, 16)
    threshold, cutoff, kept = key_of(bound), vocab_size, full
    if found:
        if num_candidates <= 128:
            threshold, cutoff, kept = _rank(
                candidates_ptr, num_candidates, row_max, inv_t, top_k, top_p, min_p, by_k, full,
                128,
            )  # fmt: skip
        else:
            threshold, cutoff, kept = _rank(
                candidates_ptr, num_candidates, row_max, inv_t, top_k, top_p, min_p, by_k, full,
                MAX_CANDIDATES,
            )  # fmt: skip
    return found, threshold, cutoff, kept, num_candidates
