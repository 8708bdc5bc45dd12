"""Chooses which drafts of a batch are verified: the likeliest of all sequences together.

    c[i][j] = min(SURE, chance_of[range of log_odds[i][j]] * ratio[i])    0 where the odds are NaN
    s[i][j] = c[i][0] * … * c[i][j]                                       all up to j are accepted

A draft is verified if fewer than `most` others come before it: larger s first, then smaller j, then
smaller i. So a sequence's verified drafts are its first ones, and there are `most` in all, or as
many as were made. Whether draft (i, j) is one of them depends on what was known before it was
drawn, and on other sequences: never on its own token, or on those after it. (`most`, `chance_of`
and `ratio` must not depend on this step's drafts either: then every rule stays exact.)
"""

from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton

# Log odds are counted by ranges of WIDTH, from LEAST on; what lies outside, as in the nearest one.
LEAST, WIDTH, NUM_RANGES = -4.0, 0.5, 32
SURE = 0.98  # no draft is taken to be likelier: so a later one of a sequence never comes first

_LEAST, _WIDTH, _NUM_RANGES = tl.constexpr(LEAST), tl.constexpr(WIDTH), tl.constexpr(NUM_RANGES)
_SURE = tl.constexpr(SURE)


class Ranked(NamedTuple):
    counts: torch.Tensor  # [N] int32, how many drafts of each sequence are verified
    ranges: torch.Tensor  # [N, K] int32, the range of each draft's log odds; -1 where it has none


def rank(sequences: torch.Tensor, num_seqs: int, most: int, log_odds: torch.Tensor) -> Ranked:
    """Choose `most` drafts of the first `num_seqs` sequences, or all if fewer were made.

    `sequences` has for each its slot, its number of drafts, and the bits of `ratio`; the fourth row
    begins with the bits of `chance_of`.
    Shape: sequences [4, W] int32, W a power of two and at least NUM_RANGES; log_odds
        [num_slots, K] float32.
    """
    if not uses_triton(log_odds):
        return rank_reference(sequences, num_seqs, most, log_odds)
    width, columns = sequences.shape[1], log_odds.shape[1]
    ranked = Ranked(sequences.new_empty(num_seqs), sequences.new_empty(num_seqs, columns))
    _rank_kernel[(num_seqs,)](
        ranked, sequences, num_seqs, most, log_odds, log_odds.stride(0), columns,
        SEQS=width, COLUMNS=triton.next_power_of_2(columns),
        num_warps=4 if width * triton.next_power_of_2(columns) <= 2048 else 8,
    )  # fmt: skip
    return ranked


def rank_reference(
    sequences: torch.Tensor, num_seqs: int, most: int, log_odds: torch.Tensor
) -> Ranked:
    slots, num_drafts = sequences[:2, :num_seqs].long()
    floats = sequences.view(torch.float32)
    ratio, chance_of = floats[2, :num_seqs], floats[3, :NUM_RANGES]
    odds = log_odds[slots]
    ranges = ((odds - LEAST) / WIDTH).nan_to_num(0).clamp(0, NUM_RANGES - 1).int()
    chance = (chance_of[ranges] * ratio[:, None]).clamp_max(SURE)
    survival = torch.where(odds.isnan(), 0.0, chance).cumprod(1)
    column = torch.arange(odds.shape[1], device=odds.device)
    is_made = column < num_drafts[:, None]
    ranges = torch.where(is_made & ~odds.isnan(), ranges, -1)
    # Stable, so that equal ones stay in the order of columns, and of sequences.
    falling = torch.where(is_made, survival, -1.0).T.flatten().argsort(descending=True, stable=True)
    chosen = falling[: min(most, int(num_drafts.sum()))] % max(1, num_seqs)
    return Ranked(chosen.bincount(minlength=num_seqs).int(), ranges)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit(do_not_specialize=["num_seqs", "most"])
def _rank_kernel(
    ranked,
    sequences_ptr,  # [4, SEQS]
    num_seqs,
    most,
    log_odds_ptr,  # [num_slots, odds_stride]
    odds_stride,
    num_columns,
    SEQS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program: one sequence, beside all others."""
    own = tl.program_id(0)
    seq = tl.arange(0, SEQS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_seq = seq < num_seqs
    slot = tl.load(sequences_ptr + seq, mask=is_seq, other=0)
    num_drafts = tl.load(sequences_ptr + SEQS + seq, mask=is_seq, other=0)
    bits = tl.load(sequences_ptr + 2 * SEQS + seq, mask=is_seq, other=0)
    ratio = bits.to(tl.float32, bitcast=True)
    at = log_odds_ptr + slot[:, None] * odds_stride + column
    is_made = column < num_drafts[:, None]
    odds = tl.load(at, mask=is_made, other=0.0)
    place = tl.minimum(tl.maximum((odds - _LEAST) / _WIDTH, 0.0), _NUM_RANGES - 1.0)
    place = tl.where(odds == odds, place, 0.0).to(tl.int32)
    bits = tl.load(sequences_ptr + 3 * SEQS + place)
    chance = tl.minimum(bits.to(tl.float32, bitcast=True) * ratio[:, None], _SURE)
    chance = tl.where(odds == odds, chance, 0.0)
    survival = tl.associative_scan(chance, 1, _multiply)
    survival = tl.where(is_made, survival, -1.0)

    is_own = seq[:, None] == own
    here = tl.where(is_own & is_made & (odds == odds), place, -1)
    here = tl.max(tl.where(is_own, here, -1), 0)
    lane = tl.arange(0, COLUMNS)
    ranges_ptr = ranked.ranges + own * num_columns + lane
    tl.store(ranges_ptr, here, mask=lane < num_columns)

    count = tl.zeros((), tl.int32)
    for j in range(0, tl.load(sequences_ptr + SEQS + own)):
        mine = tl.max(tl.max(tl.where(is_own & (column == j), survival, -1.0), 1), 0)
        is_first = (column < j) | ((column == j) & (seq[:, None] < own))
        is_before = (survival > mine) | ((survival == mine) & is_first)
        num_before = tl.sum(tl.sum(is_before.to(tl.int32), 1), 0)
        count += (num_before < most).to(tl.int32)
    tl.store(ranked.counts + own, count)
