"""Finds a row's threshold by bisection over bit patterns: for any filter, without a sort.

For flat rows, which candidates.py cannot handle. Every step reads the whole row. Masses are
fixed-point sums, so the result does not depend on the order of summation.
"""

import torch

from .._dispatch import num_programs
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .decide import OPEN, accept_test, load_draft
from .keys import key_of, value_of
from .philox import exp, fixed, log_of_fixed
from .row_outcome import RowOutcomes, conclude_row, settle_row
from .sampling import BLOCK, GROUP
from .scan import BlockStats, load_stats, merge_max, merge_totals
from .step import COLUMNS, Step, in_slot, rows_of

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
_KEY_STEPS = {torch.float32: 1, torch.float16: 1 << 13, torch.bfloat16: 1 << 16}
_PROGRAMS_PER_SM = 1  # so that all rows being read fit into the L2 cache
_WARPS = 16
_MAX_REGISTERS = 128
_TILE = 8192  # tokens


@triton.jit
def _load(row_ptr, start, width, vocab_size, TILE: tl.constexpr):
    """Ids and logits of a tile; beyond the vocabulary NaN, for which every comparison is false."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(row_ptr + ids, mask=ids < width, other=0.0).to(tl.float32)
    return ids, tl.where(ids < vocab_size, x, float("nan"))


@triton.jit
def _mass(weight, TILE: tl.constexpr):
    """Fixed-point sums of a tile's vectors of 8; a vector lies within one thread."""
    return fixed(tl.sum(tl.reshape(weight, (TILE // 8, 8)), 1))


@triton.jit
def _reached(
    target, by_mass, low, part, row_max, inv_t, row_ptr, width, vocab_size, TILE: tl.constexpr
):
    """For how many of the keys low + part, + 2 part, + 3 part the mass from there up reaches the
    target.
    """
    first = value_of((low + part).to(tl.int32))
    second = value_of((low + 2 * part).to(tl.int32))
    third = value_of((low + 3 * part).to(tl.int32))
    above_first = tl.zeros((TILE // 8,), tl.int64)
    above_second = above_first
    above_third = above_first
    _ids, ahead = _load(row_ptr, 0, width, vocab_size, TILE)
    for start in range(TILE, vocab_size + TILE, TILE):
        x = ahead
        _ids, ahead = _load(row_ptr, start, width, vocab_size, TILE)
        weight = tl.where(by_mass, exp((x - row_max) * inv_t), 1.0)
        above_first += _mass(tl.where(x >= first, weight, 0.0), TILE)
        above_second += _mass(tl.where(x >= second, weight, 0.0), TILE)
        above_third += _mass(tl.where(x >= third, weight, 0.0), TILE)
    reached = (tl.sum(above_first, 0).to(tl.float64) >= target).to(tl.int32)
    reached += (tl.sum(above_second, 0).to(tl.float64) >= target).to(tl.int32)
    return reached + (tl.sum(above_third, 0).to(tl.float64) >= target).to(tl.int32)


@triton.jit
def _search(
    target, by_mass, lowest, row_max, inv_t, row_ptr, width, vocab_size,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The highest logit for which it and all above reach the target; and what is above it.

    The target and the second result are masses, or counts, in multiples of 2**-40.
    """
    low = key_of(lowest).to(tl.int64)
    high = key_of(row_max).to(tl.int64) + 1
    while high - low > STEP:
        part = tl.maximum((high - low) >> 2, STEP)
        reached = _reached(
            target, by_mass, low, part, row_max, inv_t, row_ptr, width, vocab_size, TILE
        )
        high = tl.where(reached < 3, tl.minimum(high, low + (reached + 1) * part), high)
        low += reached * part
    limit = value_of(high.to(tl.int32))
    below = tl.full((TILE // 8,), -float("inf"), tl.float32)
    above = tl.zeros((TILE // 8,), tl.int64)
    _ids, ahead = _load(row_ptr, 0, width, vocab_size, TILE)
    for start in range(TILE, vocab_size + TILE, TILE):
        x = ahead
        _ids, ahead = _load(row_ptr, start, width, vocab_size, TILE)
        weight = tl.where(by_mass, exp((x - row_max) * inv_t), 1.0)
        above += _mass(tl.where(x >= limit, weight, 0.0), TILE)
        best = tl.where(x < limit, x, -float("inf"))
        below = tl.maximum(below, tl.max(tl.reshape(best, (TILE // 8, 8)), 1))
    return tl.maximum(lowest, tl.max(below, 0)), tl.sum(above, 0)


@triton.jit
def _threshold_by_bisection(
    row_ptr, width, vocab_size, row_max, z, inv_t, top_k, top_p, min_p,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The lowest kept logit, the id of its last kept tie, and the kept mass."""
    threshold = tl.full((), -float("inf"), tl.float32)
    num_ties = tl.full((), 0x7FFFFFFF, tl.int32)
    mass = fixed(z)
    if (top_k > 0) & (top_k < vocab_size):
        threshold, count = _search(
            top_k.to(tl.float64) * 1099511627776.0, False, threshold, row_max, inv_t, row_ptr,
            width, vocab_size, TILE, STEP,
        )  # fmt: skip
        num_ties = top_k - (count >> 40).to(tl.int32)
        mass, _tie = _kept(threshold, num_ties, row_max, inv_t, row_ptr, width, vocab_size, TILE)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * mass.to(tl.float64)
        boundary, above = _search(
            target, True, threshold, row_max, inv_t, row_ptr, width, vocab_size, TILE, STEP
        )
        # Ties i = 0, 1, .. are kept while above + i * each < target; the first one always is.
        each = fixed(exp((boundary - row_max) * inv_t))
        ties = ((target - above.to(tl.float64)) / tl.maximum(each, 1).to(tl.float64)).to(tl.int64)
        ties += ((above + ties * each).to(tl.float64) < target).to(tl.int64)
        ties = tl.minimum(tl.maximum(ties, 1), 0x7FFFFFFF)
        ties = tl.where(each > 0, ties, 0x7FFFFFFF).to(tl.int32)
        num_ties = tl.where(boundary == threshold, tl.minimum(ties, num_ties), ties)
        threshold = boundary
    if min_p > 0.0:
        lowest = tl.full((TILE // 8,), float("inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            _ids, x = _load(row_ptr, start, width, vocab_size, TILE)
            likely = tl.where(exp((x - row_max) * inv_t) >= min_p, x, float("inf"))
            lowest = tl.minimum(lowest, tl.min(tl.reshape(likely, (TILE // 8, 8)), 1))
        likeliest = tl.minimum(row_max, tl.min(lowest, 0))
        num_ties = tl.where(likeliest > threshold, 0x7FFFFFFF, num_ties)
        threshold = tl.maximum(likeliest, threshold)
    mass, cutoff = _kept(threshold, num_ties, row_max, inv_t, row_ptr, width, vocab_size, TILE)
    return threshold, cutoff, mass


@triton.jit
def _kept(threshold, num_ties, row_max, inv_t, row_ptr, width, vocab_size, TILE: tl.constexpr):
    """Mass above a threshold and of its first `num_ties` ties; and the id of the last of these."""
    above = tl.zeros((TILE // 8,), tl.int64)
    tied = 0
    cutoff = vocab_size
    ids, ahead = _load(row_ptr, 0, width, vocab_size, TILE)
    for start in range(TILE, vocab_size + TILE, TILE):
        x = ahead
        own_ids = ids
        ids, ahead = _load(row_ptr, start, width, vocab_size, TILE)
        weight = tl.where(x > threshold, exp((x - row_max) * inv_t), 0.0)
        above += _mass(weight, TILE)
        is_tie = (x == threshold).to(tl.int32)
        in_tile = tl.sum(is_tie, 0)
        if (tied < num_ties) & (tied + in_tile >= num_ties):
            is_last = (is_tie > 0) & (tied + tl.cumsum(is_tie, 0) == num_ties)
            cutoff = tl.min(tl.where(is_last, own_ids, 0x7FFFFFFF), 0)
        tied += in_tile
    tied = tl.minimum(tied, num_ties)
    return tl.sum(above, 0) + tied * fixed(exp((threshold - row_max) * inv_t)), cutoff


@triton.jit(do_not_specialize=["num_columns"])
def _bisect_kernel(
    step,
    num_columns,  # K + 1
    num_blocks,
    draft,
    sampling,
    stats,
    rows,
    out_ptr,  # [B, K + 2]
    NB: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,  # no two distinct logits have keys closer than this
    DEPENDENT: tl.constexpr,
):
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    width, vocab_size = step.width, step.vocab_size
    for i in range(tl.program_id(0), tl.load(rows.counters + 1), tl.num_programs(0)):
        listed = tl.load(rows.to_bisect + i)
        request, offset = listed // COLUMNS, listed % COLUMNS
        k, row0 = rows_of(request, step)
        slot, anchor, position, tokens_ptr = in_slot(request, step)
        row = (row0 + offset).to(tl.int64)
        row_ptr = step.logits + row * step.logits_stride
        inv_t = 1.0 / tl.load(sampling.temperature + slot)
        draft_id = tl.load(tokens_ptr + offset, mask=offset < k, other=-1)
        drafted = load_draft(
            draft_id, request, slot, offset, k, row_ptr, vocab_size, num_columns, draft,
            tl.load(sampling.seed + slot), anchor, step.words,
        )  # fmt: skip
        block_max, total = load_stats(row, stats, num_blocks, NB)
        row_max, _bad = merge_max(block_max)
        z = merge_totals(block_max, total, row_max, inv_t)
        threshold, last_tie, kept = _threshold_by_bisection(
            row_ptr, width, vocab_size, row_max, z, inv_t, tl.load(sampling.top_k + slot),
            tl.load(sampling.top_p + slot), tl.load(sampling.min_p + slot), TILE, STEP,
        )  # fmt: skip
        state = row_max, log_of_fixed(kept), threshold, last_tie.to(tl.float32)
        groups = num_blocks * (_BLOCK // _GROUP)
        own = settle_row(
            accept_test(drafted, state, inv_t), tl.full((), OPEN, tl.int64), request, offset, row,
            row_ptr, state, inv_t, stats.group_max + row * groups, groups, vocab_size,
            num_columns, slot, position, tokens_ptr, step, sampling, rows,
        )  # fmt: skip
        conclude_row(
            own, tl.load(sampling.rule + slot) == 1, request, offset, k, num_columns, slot,
            anchor, tokens_ptr, step, rows, out_ptr,
        )  # fmt: skip


def bisect_rows(step: Step, stats: BlockStats, rows: RowOutcomes, out: torch.Tensor) -> None:
    """Finish the rows in the list `to_bisect`."""
    device, blocks = step.logits.device, stats.max.shape[1]
    _bisect_kernel[(min(len(rows.to_bisect), num_programs(device, _PROGRAMS_PER_SM)),)](
        *step.arguments(blocks), stats, rows, out,
        NB=triton.next_power_of_2(blocks), TILE=_TILE, STEP=_KEY_STEPS[step.logits.dtype],
        **dependent_launch(device), num_warps=_WARPS, maxnreg=_MAX_REGISTERS,
    )  # fmt: skip
