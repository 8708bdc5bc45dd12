"""K1: one read of the logits gives each block's maximum, its argmax and its sum of exponentials."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels._dispatch import num_programs
from outrider.kernels.philox import FIXED_ONE, exp, exp2
from outrider.kernels.sampling import BLOCK, GROUP, Sampling, block_width, is_filtered, num_blocks

_PROGRAMS_PER_SM = 20


class BlockStats(NamedTuple):
    max: torch.Tensor  # [N, num_blocks] float32; NaN or inf: the block holds a NaN or an inf
    argmax: torch.Tensor  # [N, num_blocks] int32 lowest id of the maximum; set on greedy rows
    total: torch.Tensor  # [N, num_blocks] float32 sum of exp((l - max) / t); set on sampled rows
    group_max: torch.Tensor | None  # [N, num_blocks, 64] float32, of filtered rows (kernel only)


def blocks_reference(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Raw logits as float32 blocks, the last padded with -inf.

    Shape: [N, V] -> [N, num_blocks, block_width].
    """
    x = logits[:, :vocab_size].float()
    shape = (len(x), num_blocks(vocab_size), block_width(vocab_size))
    pad = shape[1] * shape[2] - x.shape[1]
    if pad:
        x = torch.nn.functional.pad(x, (0, pad), value=-torch.inf)
    return x.reshape(shape)


def scan_reference(logits: torch.Tensor, sampling: Sampling, vocab_size: int) -> BlockStats:
    """Stats of each row under its own parameters. Shape: logits [N, V], sampling [N]."""
    x = blocks_reference(logits, vocab_size)
    block_max, index = x.max(-1)
    total = torch.zeros_like(block_max)
    sampled = (sampling.temperature > 0).nonzero().squeeze(-1)
    if len(sampled):
        if len(sampled) < len(x):
            x, inv_t = x[sampled], sampling.inverse_temperature()[sampled]
        else:
            inv_t = sampling.inverse_temperature()
        # An empty block's own maximum, -inf, would make NaN of it.
        safe_max = block_max[sampled].clamp_min(torch.finfo(torch.float32).min)
        weight = torch.exp((x - safe_max[..., None]).mul_(inv_t[:, None, None]))
        total[sampled] = weight.mul_(FIXED_ONE).long().sum(-1).float() / FIXED_ONE
    first = torch.arange(0, index.shape[1] * BLOCK, BLOCK, device=index.device)
    return BlockStats(block_max, (index + first).int(), total, None)


@triton.jit
def _tile(item, num_items, num_tiles, num_columns, cu_rows_ptr, num_drafts_ptr):
    """Request, row and tile of a work item, and whether there is such a row."""
    exists = item < num_items
    column = tl.where(exists, item // num_tiles, 0)
    request = column // num_columns
    offset = column % num_columns
    row = tl.load(cu_rows_ptr + request) + offset
    exists = exists & (offset <= tl.load(num_drafts_ptr + request))
    return request, row.to(tl.int64), item % num_tiles, exists


@triton.jit
def _scan_block(
    x, row_ptr, vocab_size, block, at, temperature, filtered, max_ptr, argmax_ptr, total_ptr,
    group_max_ptr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the stats of one block, whose place in them is `at`."""
    x = x.to(tl.float32)
    first = block * BLOCK
    if first + BLOCK > vocab_size:
        x = tl.where(first + tl.arange(0, BLOCK) < vocab_size, x, -float("inf"))
    # Maxima of vectors of 8 stay within a thread; everything else works on those.
    vector_max = tl.max(tl.reshape(x, (BLOCK // 8, 8)), 1)
    block_max = tl.max(vector_max, 0)
    if temperature > 0:
        safe_max = tl.where(block_max > -float("inf"), block_max, 0.0)
        total = tl.sum(exp2((x - safe_max) * (1.4426950408889634 / temperature)), 0)
        tl.store(total_ptr + at, total)
        # NaN where the block holds a NaN or an inf.
        tl.store(max_ptr + at, tl.where(total == total, block_max, float("nan")))
        if filtered:
            groups: tl.constexpr = BLOCK // GROUP
            group_max = tl.max(tl.reshape(vector_max, (groups, GROUP // 8)), 1)
            tl.store(group_max_ptr + at * groups + tl.arange(0, groups), group_max)
    else:
        vector = tl.arange(0, BLOCK // 8)
        vector = tl.min(tl.where(vector_max == block_max, vector, BLOCK // 8 - 1), 0)
        near = first + vector * 8 + tl.arange(0, 8)
        inside = near < vocab_size
        y = tl.load(row_ptr + near, mask=inside, other=0.0).to(tl.float32)
        hit = inside & (y == block_max)
        tl.store(argmax_ptr + at, tl.min(tl.where(hit, near, 0x7FFFFFFF), 0))
        # A sum is +inf or NaN exactly when the block holds a NaN or a +inf.
        is_bad = not (tl.sum(x, 0) < float("inf"))
        tl.store(max_ptr + at, tl.where(is_bad, float("nan"), block_max))


@triton.jit(do_not_specialize=["num_items", "num_columns"])
def _scan_kernel(
    logits_ptr,  # [N, V]
    logits_stride,
    width,
    vocab_size,
    num_items,  # B * (K + 1) * num_tiles
    num_tiles,  # pairs of blocks
    num_blocks,
    cu_rows_ptr,  # [B + 1]
    num_drafts_ptr,  # [B]
    num_columns,  # K + 1
    temperature_ptr,  # [B], as the next three
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    max_ptr,  # [N, num_blocks], as the next two
    argmax_ptr,
    total_ptr,
    group_max_ptr,  # [N, num_blocks, BLOCK // GROUP]
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    RAW: tl.constexpr,  # temperature 1 and group maxima for every row
):
    # A fixed number of programs of one warp (no barriers) walk over all tiles, loading one ahead:
    # two blocks, so that enough bytes are in flight.
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(0)
    request, row, tile, exists = _tile(
        start, num_items, num_tiles, num_columns, cu_rows_ptr, num_drafts_ptr
    )
    limit = tl.where(exists, width, 0)
    ids = tile * (2 * BLOCK) + lane
    at = logits_ptr + row * logits_stride + ids
    ahead = tl.load(at, mask=ids < limit, other=0.0)
    ahead_2 = tl.load(at + BLOCK, mask=ids + BLOCK < limit, other=0.0)
    for item in range(start, num_items, tl.num_programs(0)):
        x, x_2 = ahead, ahead_2
        this_request, this_row, this_tile, this_exists = request, row, tile, exists
        request, row, tile, exists = _tile(
            item + tl.num_programs(0), num_items, num_tiles, num_columns, cu_rows_ptr,
            num_drafts_ptr,
        )  # fmt: skip
        limit = tl.where(exists, width, 0)
        ids = tile * (2 * BLOCK) + lane
        at = logits_ptr + row * logits_stride + ids
        ahead = tl.load(at, mask=ids < limit, other=0.0)
        ahead_2 = tl.load(at + BLOCK, mask=ids + BLOCK < limit, other=0.0)
        if this_exists:
            temperature = 1.0
            filtered = True
            if not RAW:
                temperature = tl.load(temperature_ptr + this_request)
                filtered = is_filtered(
                    this_request, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
                )
            row_ptr = logits_ptr + this_row * logits_stride
            block = this_tile * 2
            at_block = this_row * num_blocks + block
            _scan_block(
                x, row_ptr, vocab_size, block, at_block, temperature, filtered, max_ptr,
                argmax_ptr, total_ptr, group_max_ptr, BLOCK, GROUP,
            )  # fmt: skip
            if block + 1 < num_blocks:
                _scan_block(
                    x_2, row_ptr, vocab_size, block + 1, at_block + 1, temperature, filtered,
                    max_ptr, argmax_ptr, total_ptr, group_max_ptr, BLOCK, GROUP,
                )  # fmt: skip


@triton.jit
def _load_max(row, valid, max_ptr, num_blocks, NB: tl.constexpr):
    """Block maxima of rows, where they are, their row maxima, and which rows are bad."""
    lane = tl.arange(0, NB)[None, :]
    at = row.to(tl.int64)[:, None] * num_blocks + lane
    mask = valid[:, None] & (lane < num_blocks)
    block_max = tl.load(max_ptr + at, mask=mask, other=-float("inf"))
    num_bad = tl.sum((block_max != block_max).to(tl.int32), 1)
    row_max = tl.max(block_max, 1)
    bad = (num_bad > 0) | (row_max == -float("inf"))
    return block_max, at, mask, tl.where(bad, 0.0, row_max), bad


@triton.jit
def merge_argmax(row, valid, max_ptr, argmax_ptr, num_blocks, NB: tl.constexpr):
    """Maximum and its lowest id of greedy rows, and which of them are bad."""
    block_max, at, mask, row_max, bad = _load_max(row, valid, max_ptr, num_blocks, NB)
    index = tl.load(argmax_ptr + at, mask=mask, other=0x7FFFFFFF)
    argmax = tl.min(tl.where(block_max == row_max[:, None], index, 0x7FFFFFFF), 1)
    return row_max, tl.where(bad, 0, argmax), bad


@triton.jit
def merge_totals(row, valid, max_ptr, total_ptr, num_blocks, inv_t, NB: tl.constexpr):
    """Maximum and sum of exp((l - max) / t) of sampled rows, and which of them are bad."""
    block_max, at, mask, row_max, bad = _load_max(row, valid, max_ptr, num_blocks, NB)
    total = tl.load(total_ptr + at, mask=mask, other=0.0)
    weight = total * exp((block_max - row_max[:, None]) * inv_t)
    return row_max, tl.sum(tl.where(total > 0, weight, 0.0), 1), bad


def scan(
    logits: torch.Tensor,
    cu_rows: torch.Tensor,
    num_drafts: torch.Tensor,
    num_columns: int,
    sampling: Sampling | None,
    vocab_size: int,
) -> BlockStats:
    """Stats of every row of every request; without sampling, those of the raw logits.

    Shape: logits [N, V], cu_rows [B + 1], sampling [B].
    """
    shape = (len(logits), num_blocks(vocab_size))
    new = logits.new_empty
    stats = BlockStats(
        new(shape, dtype=torch.float32),
        new(shape, dtype=torch.int32),
        new(shape, dtype=torch.float32),
        new((*shape, BLOCK // GROUP), dtype=torch.float32),
    )
    num_tiles = triton.cdiv(shape[1], 2)
    num_items = num_tiles * len(num_drafts) * num_columns
    _scan_kernel[(min(num_items, num_programs(logits.device, _PROGRAMS_PER_SM)),)](
        logits,
        logits.stride(0),
        logits.shape[1],
        vocab_size,
        num_items,
        num_tiles,
        shape[1],
        cu_rows,
        num_drafts,
        num_columns,
        *((None,) * 4 if sampling is None else sampling[:4]),
        *stats,
        BLOCK=BLOCK,
        GROUP=GROUP,
        RAW=sampling is None,
        num_warps=1,
        maxnreg=96,  # 20 programs of a warp fit a multiprocessor at once
    )
    return stats
