"""The rule `match`: a row's own token depends on its logits and on the noise of its position only.

Each token has a unit exponential variate E, and the token with the highest log p - log E is chosen
(Gumbel-max), for rows of the target and of the draft alike. The variates are made in groups of 64:
first the least of a group and the token that has it; the others exceed it by further unit
exponential variates. So the least variate and the highest logit of a group bound the group's
scores, and only few groups need to be looked at.
"""

import torch

from ..triton_or_none import tl, triton
from .keys import key_of, value_of
from .philox import Purpose, exponential, exponential_reference, log, philox, philox_reference
from .sampling import GROUP, log_prob, log_prob_reference

_GROUP = tl.constexpr(GROUP)
_LANES = tl.constexpr(1024)  # groups whose bounds are computed at a time
_TILE = tl.constexpr(16)  # groups whose tokens are read at a time
_NO_BEST = tl.constexpr(-0x7F800001 << 32)  # the key of -inf


def match_reference(
    logits: torch.Tensor,
    state: torch.Tensor,
    inv_t: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Own token of each row. Shape: logits [R, V], state [R, 4], the rest [R] -> [R]."""
    ids = torch.arange(vocab_size, device=logits.device)
    noise = noise_reference(seed, position, vocab_size)
    score = log_prob_reference(logits[:, :vocab_size].float(), ids, state, inv_t) - noise.log()
    return score.argmax(-1)


def noise_reference(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unit exponential variates of rows. Shape: [R], [R] -> [R, vocab_size]."""
    ids = torch.arange(vocab_size, device=seed.device)
    pair = torch.arange(-(-vocab_size // (2 * GROUP)), device=seed.device)
    quad = torch.arange(-(-vocab_size // 4), device=seed.device)
    key = seed[:, None], position[:, None]
    w0, w1, w2, w3 = philox_reference(*key, 0 * pair, 0 * pair + Purpose.GROUP, pair)
    least, place = torch.stack((w0, w2), -1).flatten(1), torch.stack((w1, w3), -1).flatten(1)
    words = philox_reference(*key, 0 * quad, 0 * quad + Purpose.FINAL, quad)
    excess = exponential_reference(torch.stack(words, -1).flatten(1)[:, :vocab_size])
    of_token = ids // GROUP
    is_least = (place >> 26)[:, of_token] == ids % GROUP
    noise = (exponential_reference(least) / GROUP)[:, of_token]
    return noise + torch.where(is_least, 0.0, excess)


@triton.jit
def _best_of_groups(
    group, valid, row_ptr, vocab_size, row_max, log_z, threshold, cutoff, inv_t, seed, position,
):  # fmt: skip
    """The highest score of these groups' tokens, packed with its id so that lower ids win ties."""
    position = position.to(tl.int32)
    group = group[:, None]
    zero = group * 0
    quad = group * (_GROUP // 4) + tl.arange(0, _GROUP // 4)[None, :]
    ids = group * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = valid[:, None] & (ids < vocab_size)
    x = tl.load(row_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    w0, w1, w2, w3 = philox(seed, zero + position, zero, zero + 3, group // 2)
    least, place = tl.where(group % 2 == 0, w0, w2), tl.where(group % 2 == 0, w1, w3)
    w0, w1, w2, w3 = philox(seed, quad * 0 + position, quad * 0, quad * 0 + 2, quad)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    excess = tl.where((place >> 26).to(tl.int32) == ids % _GROUP, 0.0, exponential(word))
    noise = exponential(least) / _GROUP + excess
    score = log_prob(x, ids, row_max, log_z, threshold, cutoff, inv_t) - log(noise)
    packed = (key_of(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    return tl.max(tl.max(tl.where(inside, packed, _NO_BEST), 1), 0)


@triton.jit
def own_token(
    row_ptr, vocab_size, group_max_ptr, num_groups, row_max, log_z, threshold, cutoff, inv_t, seed,
    position,
):  # fmt: skip
    """A row's own token. Overwrites the groups' maxima with bounds of their scores."""
    lane = tl.arange(0, _LANES)
    half = tl.arange(0, _LANES // 2)
    zero = half * 0
    highest = -float("inf")
    highest_group = 0
    top_group = 0x7FFFFFFF  # the group with the highest logit
    for start in range(0, num_groups, _LANES):
        group = start + lane
        at = group_max_ptr + group
        group_max = tl.load(at, mask=group < num_groups, other=-float("inf"))
        words = philox(seed, zero + position.to(tl.int32), zero, zero + 3, start // 2 + half)
        least = tl.interleave(words[0], words[2])
        # 0.01 is more than the rounding error between this bound and a token's own score.
        bound = (group_max - row_max) * inv_t - log_z - log(exponential(least) / _GROUP) + 0.01
        possible = (group_max >= threshold) & (group_max > -float("inf"))
        bound = tl.where(possible, bound, -float("inf"))
        tl.store(at, bound, mask=group < num_groups)
        of_lanes = tl.max(bound, 0)
        here = tl.min(tl.where(bound == of_lanes, group, 0x7FFFFFFF), 0)
        highest_group = tl.where(of_lanes > highest, here, highest_group)
        here = tl.min(tl.where(group_max == row_max, group, 0x7FFFFFFF), 0)
        top_group = tl.minimum(here, top_group)
        highest = tl.maximum(of_lanes, highest)
    tl.debug_barrier()
    # Groups whose bound is below the best score of two likely groups are out. The list of those
    # that remain overwrites the bounds; it is never longer than what has been read of them.
    two = tl.arange(0, 2)
    likely = tl.where(two == 0, highest_group, top_group)
    best = _best_of_groups(
        likely, likely < num_groups, row_ptr, vocab_size, row_max, log_z, threshold, cutoff, inv_t,
        seed, position,
    )  # fmt: skip
    least_score = value_of((best >> 32).to(tl.int32))
    num_left = 0
    for start in range(0, num_groups, _LANES):
        group = start + lane
        at = group_max_ptr + group
        bound = tl.load(at, mask=group < num_groups, other=-float("inf"))
        left = (bound >= least_score) & (bound > -float("inf"))
        slot = num_left + tl.cumsum(left.to(tl.int32), 0) - 1
        num_left += tl.sum(left.to(tl.int32), 0)
        tl.debug_barrier()
        tl.store(group_max_ptr + slot, group.to(tl.float32), mask=left)
    tl.debug_barrier()
    for start in range(0, num_left, _TILE):
        slot = start + tl.arange(0, _TILE)
        group = tl.load(group_max_ptr + slot, mask=slot < num_left, other=0.0).to(tl.int32)
        of_tile = _best_of_groups(
            group, slot < num_left, row_ptr, vocab_size, row_max, log_z, threshold, cutoff,
            inv_t, seed, position,
        )  # fmt: skip
        best = tl.maximum(best, of_tile)
    return tl.minimum(0x7FFFFFFF - (best & 0xFFFFFFFF), vocab_size - 1)
