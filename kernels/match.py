"""The rule `match`: every row's own token, target's or draft's, under the noise of its position.

Each token has a unit exponential variate E, and the row's own token has the highest log p - log E
(Gumbel-max). The variates come by groups of 64: first the least of a group and which token has it,
then the others, which exceed it by unit exponential variates again. So the least and the group's
highest logit bound the scores of a group, and few groups are ever looked at.
"""

import torch
import triton
import triton.language as tl

from outrider.kernels.keys import key_of, value_of
from outrider.kernels.philox import (
    Purpose,
    exponential,
    exponential_reference,
    log,
    philox,
    philox_reference,
)
from outrider.kernels.sampling import GROUP, log_prob, log_prob_reference

NO_BEST = tl.constexpr(-0x7F800001 << 32)  # the key of -inf


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
    group = torch.arange(-(-vocab_size // GROUP), device=seed.device)
    quad = torch.arange(-(-vocab_size // 4), device=seed.device)
    key = seed[:, None], position[:, None]
    least, place, *_ = philox_reference(*key, 0 * group, 0 * group + Purpose.GROUP, group)
    words = philox_reference(*key, 0 * quad, 0 * quad + Purpose.FINAL, quad)
    excess = exponential_reference(torch.stack(words, -1).flatten(1)[:, :vocab_size])
    of_token = ids // GROUP
    is_least = (place >> 26)[:, of_token] == ids % GROUP
    noise = (exponential_reference(least) / GROUP)[:, of_token]
    return noise + torch.where(is_least, 0.0, excess)


@triton.jit
def unpack_best(packed):
    return 0x7FFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def match_block(
    best_ptr, block, row_ptr, vocab_size, group_max_ptr, row_max, log_z, threshold, cutoff, inv_t,
    seed, position, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Raise a row's packed best (score ascending, id descending) to that of one of its blocks.

    The bests of other blocks spare work here; which of them are there changes nothing else.
    """
    position = position.to(tl.int32)
    group = block * GROUPS + tl.arange(0, GROUPS)
    no_group = group * 0
    group_max = tl.load(group_max_ptr + group)
    least = philox(seed, no_group + position, no_group, no_group + 3, group)[0]
    # More than rounding can make of the difference to a token's own score.
    bound = (group_max - row_max) * inv_t - log_z - log(exponential(least) / GROUP) + 0.01
    possible = (group_max >= threshold) & (group_max > -float("inf"))
    bound = tl.where(possible, bound, -float("inf"))
    highest = tl.max(bound, 0)
    given = tl.load(best_ptr, volatile=True)
    best = given
    lane = tl.arange(0, GROUP)
    no_lane = lane * 0
    while (highest > -float("inf")) & (highest >= value_of((best >> 32).to(tl.int32))):
        here = tl.min(tl.where(bound == highest, group, 0x7FFFFFFF), 0)
        bound = tl.where(group == here, -float("inf"), bound)
        highest = tl.max(bound, 0)
        ids = here * GROUP + lane
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        of_group = philox(seed, no_lane + position, no_lane, no_lane + 3, no_lane + here)
        w0, w1, w2, w3 = philox(seed, no_lane + position, no_lane, no_lane + 2, ids // 4)
        part = lane % 4
        word = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
        excess = tl.where((of_group[1] >> 26).to(tl.int32) == lane, 0.0, exponential(word))
        noise = exponential(of_group[0]) / GROUP + excess
        score = log_prob(x, ids, row_max, log_z, threshold, cutoff, inv_t) - log(noise)
        packed = (key_of(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        best = tl.maximum(best, tl.max(packed, 0))
    if best > given:
        tl.atomic_max(best_ptr, best, sem="relaxed")
