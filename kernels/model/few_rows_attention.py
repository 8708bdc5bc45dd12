"""Attention of few rows on a Hopper GPU: decodes and verifications.

A program has one warpgroup, which computes up to 64 rows, and a warp that copies keys and values
into shared memory some blocks ahead, over the borders of items. So memory never waits for sums.
Each item is one split of its rows' tokens. Rows that see a single one are finished with it; of the
others `merge_parts` adds the splits up.

A row is summed as `prompt_attention` does it, over the same blocks and splits in the same order,
so its bits are the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper
from .attention_blocks import (
    block_of,
    copy_block,
    item_of,
    load_queries,
    outputs_of,
    sums_of_tokens,
    tiles_of,
    tokens_of,
)
from .attention_items import FEW_ROWS, WIDTH, AttentionItems, split_of, start_of
from .attention_parts import merge_parts
from .softmax_sums import LOG2_E, add
from .warpgroups import barriers_of

mbarrier = hopper.mbarrier

_ROWS = gl.constexpr(FEW_ROWS)  # the fewest that a warpgroup can do


class _Tiling(NamedTuple):
    per_sm: int  # programs of a multiprocessor
    stages: int  # blocks on their way to a program
    registers: int  # of a thread; the copying warp leaves most of its own to the others


# By head size.
_TILINGS = {64: _Tiling(2, 4, 128), 128: _Tiling(1, 3, 208), 256: _Tiling(1, 3, 168)}


def takes(query: Tensor, k_cache: Tensor) -> bool:
    """Whether few rows of a layer that `prompt_attention` is for are computed here."""
    group = query.shape[1] // k_cache.shape[2]
    return query.shape[2] in _TILINGS and k_cache.dtype == query.dtype and group <= FEW_ROWS


def few_rows_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    items: AttentionItems,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`, of rows that are listed as few, of layers that it `takes`.

    Shape:
        query: [T, num_heads, dim]
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, dim]
        returns: [T, num_heads, dim]
    """
    assert items.block_m <= FEW_ROWS
    num_rows, num_heads, dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    block, tiling = block_of(k_cache), _TILINGS[dim]
    caches = [
        TensorDescriptor.from_tensor(
            cache.view(-1, num_kv_heads * dim),
            [min(page_size, block), 64],
            gl.NVMMASharedLayout(128, 16),
        )
        for cache in (k_cache, v_cache)
    ]
    shape, device = (num_rows, num_heads, items.num_splits), query.device
    parts = torch.empty(*shape, dim, dtype=torch.float32, device=device)
    states = torch.empty(*shape, 2, dtype=torch.float32, device=device)
    seen = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    out = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=device)
    grid = min(num_programs(device, tiling.per_sm), len(items.items) * num_kv_heads)
    _few_rows_attention_kernel[(grid,)](
        out, parts, states, seen, query, *caches, block_table, items.items, items.num_items,
        query if sinks is None else sinks, scale, window or 0, items.num_splits,
        block_table.stride(0), *query.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, DIM=dim, BLOCK=block,
        PAGE=page_size, STAGES=tiling.stages, HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None, num_warps=4, maxnreg=tiling.registers,
        **dependent_launch(device),
    )  # fmt: skip
    if items.num_splits > 1:
        merge_parts(out, parts, states, seen, sinks)
    return out


@gluon.jit
def _item_of(turn, num_items):
    """The item of a program's turn, if not negative: the longest splits are listed last."""
    return num_items - 1 - item_of(turn)


@gluon.jit
def _tokens_of_split(item_ptr, window, BLOCK: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """An item's first token, the end of its tokens, and the first and last split of its rows."""
    split, unit = gl.load(item_ptr + 4), gl.load(item_ptr + 5)
    begin, end, _ = tokens_of(item_ptr, window, BLOCK, HAS_WINDOW)
    first_split = split_of(begin, unit)
    last_split = split_of(gl.maximum(end - 1, 0), unit)
    begin = gl.maximum(begin, start_of(split, unit))
    end = gl.minimum(end, start_of(split + 1, unit))
    return begin, end, first_split, last_split


@gluon.jit
def _load_blocks(
    caches, block_table_ptr, block_table_stride, work, parts, has, free,
    NUM_KV_HEADS: gl.constexpr, BLOCK: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have the keys and values of all items copied. One warp."""
    items_ptr, num_items, window = work
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item_of(turn, num_items)
        if item >= 0:
            column = item % NUM_KV_HEADS * DIM
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            pages_ptr = block_table_ptr + gl.load(item_ptr + 3).to(gl.int64) * block_table_stride
            split, context_len = gl.load(item_ptr + 4), gl.load(item_ptr + 7)
            begin, end, first_split, last_split = _tokens_of_split(
                item_ptr, window, BLOCK, HAS_WINDOW
            )
            if (split >= first_split) & (split <= last_split):
                first = begin // BLOCK * BLOCK
                num_blocks = gl.maximum((end - first + BLOCK - 1) // BLOCK, 1)
                for i in range(num_blocks):
                    start = first + i * BLOCK
                    # What earlier passes stored is copied while the kernel before still runs.
                    if start + BLOCK > context_len:
                        wait_for_inputs(DEPENDENT)
                    stage, phase = (block + i) % STAGES, (block + i) // STAGES & 1
                    mbarrier.wait(free.index(stage), phase ^ 1)
                    for which in gl.static_range(2):
                        copy_block(
                            caches[which], parts[which], has[which].index(stage), stage,
                            pages_ptr, start, end, column, BLOCK, DIM, PAGE,
                        )  # fmt: skip
                block += num_blocks


@gluon.jit
def _attend(
    rows, sums, work, query_tile, tiles, has, free,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The rows of all items. One warpgroup."""
    BLOCK: gl.constexpr = tiles[0].shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    items_ptr, num_items, window = work
    query_ptr, query_strides, sinks_ptr, scale = rows
    out_ptr, parts_ptr, states_ptr, seen_ptr, num_splits = sums
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item_of(turn, num_items)
        if item >= 0:
            kv_head = item % NUM_KV_HEADS
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            first_head = kv_head * GROUP
            first_row, num_rows = gl.load(item_ptr), gl.load(item_ptr + 1)
            first_position, split = gl.load(item_ptr + 2), gl.load(item_ptr + 4)
            begin, end, first_split, last_split = _tokens_of_split(
                item_ptr, window, BLOCK, HAS_WINDOW
            )
            last_position = first_position + num_rows - 1
            if (split >= first_split) & (split <= last_split):
                m = gl.arange(0, _ROWS, gl.SliceLayout(1, LOADED))
                load_queries(  # only now it waits: items were listed before the pass
                    query_tile, query_ptr, query_strides, first_row, num_rows, first_head, m,
                    GROUP, DIM, LOADED, DEPENDENT,
                )  # fmt: skip
                m = gl.arange(0, _ROWS, gl.SliceLayout(1, LOGITS))
                position = first_position + m // GROUP
                tokens = (begin, end, begin // BLOCK * BLOCK)
                no_best, no_total, no_acc, best, total, acc, block = sums_of_tokens(
                    block, query_tile, tiles, has, (free, free), None, tokens, position,
                    (first_position, last_position), 0, scale * LOG2_E, window, dtype, DIM, STAGES,
                    HAS_WINDOW, False, LOADED,
                )  # fmt: skip
                m = gl.arange(0, _ROWS, ROW)
                row, head = first_row + m // GROUP, first_head + m % GROUP
                out_row = row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head
                is_row = m < num_rows * GROUP
                d = gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
                if first_split == last_split:
                    # As merging would.
                    best, total, acc = add(no_best, no_total, no_acc, best, total, acc)
                    out = outputs_of(best, total, acc, sinks_ptr, head, is_row, 1.0, ACC, HAS_SINKS)
                    to_ptr = out_ptr + (out_row * DIM)[:, None] + d
                    gl.store(to_ptr, out.to(dtype), mask=is_row[:, None])
                else:
                    part = out_row * num_splits + split
                    gl.store(parts_ptr + (part * DIM)[:, None] + d, acc, mask=is_row[:, None])
                    gl.store(states_ptr + part * 2, best, mask=is_row)
                    gl.store(states_ptr + part * 2 + 1, total, mask=is_row)
                if split == last_split:
                    of_row = seen_ptr + row * 2
                    gl.store(of_row, gl.full([_ROWS], first_split, gl.int32, ROW), mask=is_row)
                    gl.store(of_row + 1, gl.full([_ROWS], last_split, gl.int32, ROW), mask=is_row)
    wait_for_inputs(DEPENDENT)  # also if there was nothing to do


@gluon.jit(do_not_specialize=["window", "num_splits", "block_table_stride"])
def _few_rows_attention_kernel(
    out_ptr,  # [T, num_heads, DIM]
    parts_ptr,  # [T, num_heads, num_splits, DIM]
    states_ptr,  # [T, num_heads, num_splits, 2]
    seen_ptr,  # [T, 2]
    query_ptr,  # [T, num_heads, DIM]
    k_cache,  # [num_pages * PAGE, num_kv_heads * DIM]: a descriptor
    v_cache,
    block_table_ptr,  # [num_slots, pages]
    items_ptr,  # [most items possible, WIDTH]
    num_items_ptr,  # [1]
    sinks_ptr,  # [num_heads], if HAS_SINKS
    scale,
    window,
    num_splits,  # the most splits of a row
    block_table_stride,
    query_stride_t,
    query_stride_h,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Each program strides over the items."""
    start_next_kernel(DEPENDENT)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    num_items = gl.load(num_items_ptr) * NUM_KV_HEADS
    query_tile = gl.allocate_shared_memory(dtype, [_ROWS, DIM], TILE)
    parts, tiles = tiles_of(dtype, BLOCK, DIM, PAGE, STAGES)
    has = (barriers_of(STAGES, 1), barriers_of(STAGES, 1))
    free = barriers_of(STAGES, 1)  # of keys and values both
    hopper.fence_async_shared()
    work = (items_ptr, num_items, window)
    rows = (query_ptr, (query_stride_t, query_stride_h), sinks_ptr, scale)
    sums = (out_ptr, parts_ptr, states_ptr, seen_ptr, num_splits)
    gl.warp_specialize(
        [
            (_attend, (
                rows, sums, work, query_tile, tiles, has, free,
                NUM_KV_HEADS, GROUP, DIM, STAGES, HAS_WINDOW, HAS_SINKS, DEPENDENT)),
            (_load_blocks, (
                (k_cache, v_cache), block_table_ptr, block_table_stride, work, parts, has, free,
                NUM_KV_HEADS, BLOCK, DIM, PAGE, STAGES, HAS_WINDOW, DEPENDENT)),
        ],
        [1],
        [24],
    )  # fmt: skip
