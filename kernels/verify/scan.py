"""K1: reads the logits once, for each block's maximum and sum of exponentials."""

from typing import NamedTuple

import torch

from .._dispatch import INTERPRET, num_programs
from ..dependent_launch import dependent_launch, start_next_kernel
from ..triton_or_none import tl, triton
from .philox import FIXED_ONE, exp, exp2, fixed, of_fixed
from .sampling import BLOCK, GROUP, Sampling, block_width, is_filtered, num_blocks

_INTERPRET = tl.constexpr(INTERPRET)
_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
_LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS_PER_SM = 32
_NUM_CACHED = 1 << 16


class BlockStats(NamedTuple):
    max: torch.Tensor  # [N, num_blocks] float32; NaN if the block holds a NaN
    total: (
        torch.Tensor
    )  # [N, num_blocks] float32 sum of exp((l - max) / t); for rows that draw, or are of drafts
    group_max: torch.Tensor | None  # [N, num_blocks, 16] float32, if needed (kernel only)


def rows_in_cache(vocab_size: int) -> int:
    """Rows that the references take at a time, so that intermediate tensors stay in the cache."""
    return max(1, _NUM_CACHED // vocab_size)


def blocks_reference(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Raw logits as float32 blocks, the last padded with -inf.

    Shape: [N, V] -> [N, num_blocks, block_width].
    """
    x = logits[:, :vocab_size].to(torch.float32, copy=True)
    shape = (len(x), num_blocks(vocab_size), block_width(vocab_size))
    pad = shape[1] * shape[2] - x.shape[1]
    if pad:
        x = torch.nn.functional.pad(x, (0, pad), value=-torch.inf)
    return x.reshape(shape)


def scan_reference(logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> BlockStats:
    """Stats of each row under its own parameters. Shape: logits [N, V], sampling [N]."""
    is_sampled, inv_t = sampling.temperature > 0, sampling.inverse_temperature()
    num_rows = rows_in_cache(vocab_size)
    parts = [
        _scan_rows(*rows, vocab_size)
        for rows in zip(
            logits.split(num_rows), is_sampled.split(num_rows), inv_t.split(num_rows), strict=True
        )
    ]
    block_max, total = (torch.cat(stats) for stats in zip(*parts, strict=True))
    return BlockStats(block_max, total, None)


def _scan_rows(
    logits: torch.Tensor, is_sampled: torch.Tensor, inv_t: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = blocks_reference(logits, vocab_size)
    block_max = x.amax(-1)
    total = torch.zeros_like(block_max)
    if bool(is_sampled.any()):
        # Clamped, because -inf - (-inf) in a block without finite logits would be NaN.
        safe_max = block_max[..., None].clamp_min(torch.finfo(torch.float32).min)
        weight = x.sub_(safe_max).mul_(inv_t[:, None, None]).exp_()
        weight = weight.mul_(FIXED_ONE).long().sum(-1).float() / FIXED_ONE
        total = torch.where(is_sampled[:, None], weight, total)
    return block_max, total


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, axis: tl.constexpr):
    """Maximum along an axis; NaN if there is one."""
    if _INTERPRET:  # where tl.reduce with a function of ours is slow
        is_nan = tl.max((x != x).to(tl.int32), axis) > 0
        y = tl.where(is_nan, float("nan"), tl.max(tl.where(x == x, x, -float("inf")), axis))
    else:
        y = tl.reduce(x, axis, _max_or_nan)
    return y


@triton.jit
def _request_of(row, request, cu_rows_ptr, num_requests):
    """The request that a row belongs to, searching from `request` on; num_requests if none."""
    if cu_rows_ptr is None:
        request = row
    else:
        lane = tl.arange(0, 64)
        num_ended = 64
        while num_ended == 64:
            at = request + lane
            end = tl.load(cu_rows_ptr + 1 + at, mask=at < num_requests, other=0x7FFFFFFF)
            num_ended = tl.sum((end <= row).to(tl.int32), 0)
            request += num_ended
    return request


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def _scan_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    num_rows,
    num_blocks,
    cu_rows_ptr,  # [B + 1], or None: a row a request
    num_requests,
    slot_ptr,  # [B], each request's index in `sampling`
    sampling,  # None: temperature 1 and group maxima for every row
    offset_ptr,  # [B], of drafts, whose greedy rows are summed at temperature 1; or None
    kept_ptr,  # [num_slots, num_kept, width]: row i is kept at (slot[i], offset[i]); or None
    num_kept,
    stats,
    counters_ptr,  # [B + 2], set to 0; or None
    DEPENDENT: tl.constexpr,
):
    start_next_kernel(DEPENDENT)
    # Programs of one warp (no barriers), as many as are resident at once, walk over all blocks and
    # load one ahead. No load of logits waits for another load.
    step = tl.num_programs(0)
    if counters_ptr is not None:
        for i in range(tl.program_id(0), num_requests + 2, step):
            tl.store(counters_ptr + i, 0)
    step_rows, step_blocks = step // num_blocks, step % num_blocks
    row, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    lane = tl.arange(0, _BLOCK)
    ids = block * _BLOCK + lane
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    ahead = tl.load(row_ptr + ids, mask=ids < tl.where(row < num_rows, width, 0), other=0.0)
    request = _request_of(row, tl.zeros((), tl.int32), cu_rows_ptr, num_requests)
    while request < num_requests:
        x = ahead.to(tl.float32)
        at = row.to(tl.int64) * num_blocks + block
        first = block * _BLOCK

        block += step_blocks
        row += step_rows + (block >= num_blocks).to(tl.int32)
        block = tl.where(block >= num_blocks, block - num_blocks, block)
        ids = block * _BLOCK + lane
        row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
        ahead = tl.load(row_ptr + ids, mask=ids < tl.where(row < num_rows, width, 0), other=0.0)

        scale = _LOG2_E
        wants_groups = True
        if sampling is not None:
            slot = tl.load(slot_ptr + request)
            if kept_ptr is not None:
                kept_row = slot.to(tl.int64) * num_kept + tl.load(offset_ptr + request)
                at_kept = kept_ptr + kept_row * width + first + lane
                tl.store(at_kept, x.to(kept_ptr.dtype.element_ty), mask=first + lane < width)
            temperature = tl.load(sampling.temperature + slot)
            of_greedy = 0.0 if offset_ptr is None else _LOG2_E
            scale = tl.where(temperature > 0, _LOG2_E / temperature, of_greedy)
            wants_groups = is_filtered(slot, sampling, vocab_size)
            wants_groups = wants_groups | (tl.load(sampling.rule + slot) == 2)
        if first + _BLOCK > vocab_size:
            x = tl.where(first + lane < vocab_size, x, -float("inf"))
        # Maxima of vectors of 8 stay within a thread.
        vector_max = maximum(tl.reshape(x, (_BLOCK // 8, 8)), 1)
        block_max = maximum(vector_max, 0)
        tl.store(stats.max + at, block_max)
        if scale > 0:
            origin = tl.where(block_max > -float("inf"), block_max, 0.0)
            # Subtracted first: a multiply-add of origin * scale would make NaN of finfo.min.
            tl.store(stats.total + at, tl.sum(exp2((x - origin) * scale), 0))
            if wants_groups:
                groups: tl.constexpr = _BLOCK // _GROUP
                group_max = tl.max(tl.reshape(vector_max, (groups, _GROUP // 8)), 1)
                tl.store(stats.group_max + at * groups + tl.arange(0, groups), group_max)
        request = _request_of(row, request, cu_rows_ptr, num_requests)


@triton.jit
def load_stats(row, stats, num_blocks, NB: tl.constexpr):
    """Maximum and sum of exp((l - max) / t) of each of a row's blocks."""
    lane = tl.arange(0, NB)
    at = row * num_blocks + lane
    total = tl.load(stats.total + at, mask=lane < num_blocks, other=0.0)
    return tl.load(stats.max + at, mask=lane < num_blocks, other=-float("inf")), total


@triton.jit
def merge_max(block_max):
    """Maximum of a row, and whether the row is bad."""
    num_bad = tl.sum(((block_max != block_max) | (block_max == float("inf"))).to(tl.int32), 0)
    row_max = tl.max(block_max, 0)
    bad = (num_bad > 0) | (row_max == -float("inf"))
    return tl.where(bad, 0.0, row_max), bad


@triton.jit
def merge_totals(block_max, total, row_max, inv_t):
    """Sum of exp((l - max) / t) of a row that draws."""
    # Integers, because the order of summation depends on the number of warps.
    weight = fixed(total * exp((block_max - row_max) * inv_t))
    return of_fixed(tl.sum(tl.where(total > 0, weight, 0), 0))


def scan(
    logits: torch.Tensor,
    vocab_size: int,
    cu_rows: torch.Tensor | None = None,
    slot: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    counters: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> BlockStats:
    """Stats of every request's rows; without `sampling`, stats of the raw logits.

    Sets `counters` to 0 for the kernels that follow. Copies each row to its slot and offset in
    `kept`, as far as blocks of the vocabulary reach.
    Shape: logits [N, V], cu_rows [B + 1] (None: one row a request), slot [B], sampling [num_slots],
    counters [B + 2], offset [B], kept [num_slots, K, V].
    """
    assert kept is None or (kept.is_contiguous() and kept.shape[2] == logits.shape[1])
    shape = (len(logits), num_blocks(vocab_size))
    new = logits.new_empty
    stats = BlockStats(
        new(shape, dtype=torch.float32),
        new(shape, dtype=torch.float32),
        new((*shape, BLOCK // GROUP), dtype=torch.float32),
    )
    programs = min(shape[0] * shape[1], num_programs(logits.device, _PROGRAMS_PER_SM))
    _scan_kernel[(programs,)](
        logits, logits.stride(0), logits.shape[1], vocab_size, *shape, cu_rows,
        len(logits) if cu_rows is None else len(cu_rows) - 1, slot, sampling, offset, kept,
        0 if kept is None else kept.shape[1], stats, counters,
        DEPENDENT=dependent_launch(logits.device)["DEPENDENT"], num_warps=1, maxnreg=64,
    )  # fmt: skip
    return stats
