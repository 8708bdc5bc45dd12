"""Attention of prompts on a Hopper GPU: `paged_attention` where its programs hold many rows.

A program has two warpgroups, each of which computes 64 rows, and a few warps that copy keys and
values into shared memory some blocks ahead. A warpgroup's tensor cores multiply the next block's
keys and this block's values while the warpgroup computes weights (FlashAttention-3,
arXiv:2407.08608).

A row is summed as `paged_attention` does it, over the same blocks and splits in the same order, so
its bits are the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper
from .attention_blocks import (
    AHEAD,
    BLOCK,
    SUMS,
    add_values,
    add_weights,
    item_of,
    load_blocks,
    outputs_of,
    tokens_of,
    weights_of,
    without_strangers,
)
from .attention_items import FEW_ROWS, PROMPT_ROWS, WIDTH, AttentionItems, split_of, start_of
from .fp8 import as_bytes
from .softmax_sums import LOG2_E, add
from .warpgroups import barriers_of, has_warpgroups

mbarrier = hopper.mbarrier

_ROWS = gl.constexpr(PROMPT_ROWS // 2)  # of a warpgroup


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    num_heads: int
    page: tuple[int, ...]  # its tokens, KV heads and their size
    has_window: bool
    has_sinks: bool

    @staticmethod
    def of(query: Tensor, k_cache: Tensor, window: int | None, sinks: Tensor | None) -> "Variant":
        of_layer = query.dtype, k_cache.dtype, query.shape[1], tuple(k_cache.shape[1:])
        return Variant(*of_layer, window is not None, sinks is not None)


# Variants that do not work on this machine; `attention_trial` finds them out.
failed: set[Variant] = set()


def is_for(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, sinks: Tensor | None
) -> bool:
    """Whether it computes prompts of such layers, and `few_rows_attention` few rows of some."""
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    return (
        has_warpgroups(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype in (query.dtype, torch.float8_e4m3fn)
        and k_cache.shape == v_cache.shape
        and (
            head_dim in (64, 128)
            or (head_dim == 256 and k_cache.dtype == query.dtype and group <= FEW_ROWS)
        )
        and page_size in (8, 16, 32, 64, 128, 256)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and not (failed and Variant.of(query, k_cache, window, sinks) in failed)
    )


def prompt_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    items: AttentionItems,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """As `paged_attention`, of rows listed as a prompt of layers that it `is_for`.

    Shape:
        query: [T, num_heads, dim]
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, dim]
        returns: [T, num_heads, dim]
    """
    num_rows, num_heads, dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    in_fp8 = k_cache.dtype == torch.float8_e4m3fn
    # A copy's rows are of 128 bytes at most, as tensor cores want them in shared memory.
    size = k_cache.element_size()
    span = min(128 // size, dim)
    caches = [
        TensorDescriptor.from_tensor(
            as_bytes(cache).view(-1, num_kv_heads * dim),
            [min(page_size, BLOCK.value), span],
            gl.NVMMASharedLayout(span * size, 8 * size),
        )
        for cache in (k_cache, v_cache)
    ]
    out = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=query.device)
    grid = min(num_programs(query.device, 1), len(items.items) * num_kv_heads)
    _prompt_attention_kernel[(grid,)](
        out,
        query,
        *caches,
        block_table,
        items.items,
        items.num_items,
        query if sinks is None else sinks,
        scale * k_scale if in_fp8 else scale,
        v_scale if in_fp8 else 1.0,
        window or 0,
        block_table.stride(0),
        *query.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        PAGE=page_size,
        STAGES=2 if dim == 256 else 3 if in_fp8 else 4,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        IN_FP8=in_fp8,
        num_warps=4,
    )
    return out


@gluon.jit
def _attend(
    WHICH: gl.constexpr, rows, work, queries, tiles, has, free,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """The first or second 64 rows of all items. One warpgroup."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, SUMS])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    k_tiles, v_tiles = tiles
    has_keys, has_values = has
    keys_free, values_free = free
    items_ptr, num_items, window = work
    out_ptr, query_ptr, sinks_ptr, query_stride_t, query_stride_h, scale, v_scale = rows
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    factor = scale * LOG2_E
    query_tile = queries.index(WHICH)
    no_logits = gl.zeros([_ROWS, BLOCK], gl.float32, LOGITS)
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            first_head = item % NUM_KV_HEADS * GROUP
            first_row, num_rows = gl.load(item_ptr), gl.load(item_ptr + 1)
            first_position, unit = gl.load(item_ptr + 2), gl.load(item_ptr + 5)
            begin, end, first = tokens_of(item_ptr, window, HAS_WINDOW)

            m = WHICH * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOADED))
            row = (first_row + m // GROUP).to(gl.int64) * query_stride_t
            at = row + (first_head + m % GROUP).to(gl.int64) * query_stride_h
            d = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))[None, :]
            is_row = m < num_rows * GROUP
            query_tile.store(gl.load(query_ptr + at[:, None] + d, mask=is_row[:, None], other=0.0))
            hopper.fence_async_shared()

            m = WHICH * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOGITS))
            position = first_position + m // GROUP
            best = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
            total = gl.zeros([_ROWS, SUMS], gl.float32, TOTAL)
            acc = gl.zeros([_ROWS, DIM], gl.float32, ACC)
            # Sums of the splits before the present one.
            past_best = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
            past_total = gl.zeros([_ROWS], gl.float32, ROW)
            past_acc = gl.zeros([_ROWS, DIM], gl.float32, ACC)
            next_split = start_of(split_of(begin, unit) + 1, unit)

            stage, phase = block % STAGES, block // STAGES & 1
            mbarrier.wait(has_keys.index(stage), phase)
            keys = k_tiles.index(stage).permute((1, 0))
            logits = hopper.warpgroup_mma(query_tile, keys, no_logits, use_acc=False)
            mbarrier.arrive(keys_free.index(stage), count=1)
            weights, best, decay = weights_of(
                logits, first, position, first_position, end - 1, best, factor, window,
                LOGITS, HAS_WINDOW,
            )  # fmt: skip
            rounded = weights.to(dtype)
            for start in range(first + BLOCK, end, BLOCK):
                # Logits of this block, while the one before is added to the sums.
                last_stage, last_phase = stage, phase
                block += 1
                stage, phase = block % STAGES, block // STAGES & 1
                total = add_weights(rounded, total, TOTAL)
                mbarrier.wait(has_keys.index(stage), phase)
                keys = k_tiles.index(stage).permute((1, 0))
                logits = hopper.warpgroup_mma(
                    query_tile, keys, no_logits, use_acc=False, is_async=True
                )
                mbarrier.wait(has_values.index(last_stage), last_phase)
                if HAS_WINDOW:
                    without_strangers(v_tiles.index(last_stage), start - BLOCK, begin, end, LOADED)
                acc, left = add_values(rounded, v_tiles.index(last_stage), acc, ACC)
                logits = hopper.warpgroup_mma_wait(1, deps=[logits])
                mbarrier.arrive(keys_free.index(stage), count=1)
                is_new = start >= next_split
                weights, new_best, decay = weights_of(
                    logits, start, position, first_position, end - 1,
                    gl.where(is_new, float("-inf"), best), factor, window, LOGITS, HAS_WINDOW,
                )  # fmt: skip
                rounded = weights.to(dtype)
                # A branch, whose outcome is known: else the assembler would move the making of the
                # weights behind the wait for the sums.
                mbarrier.wait(has_values.index(last_stage), last_phase)
                acc, left, rounded = hopper.warpgroup_mma_wait(0, deps=[acc, left, rounded])
                mbarrier.arrive(values_free.index(last_stage), count=1)
                if is_new:
                    past_best, past_total, past_acc = add(
                        past_best, past_total, past_acc, gl.convert_layout(best, ROW),
                        gl.convert_layout(gl.max(total, 1), ROW), acc,
                    )  # fmt: skip
                    next_split = start_of(split_of(start, unit) + 1, unit)
                best = new_best  # where a split is new, `decay` is 0
                acc *= gl.convert_layout(decay, ROW)[:, None]
                total *= gl.convert_layout(decay, gl.SliceLayout(1, TOTAL))[:, None]
            mbarrier.wait(has_values.index(stage), phase)
            last = (end - 1) // BLOCK * BLOCK
            without_strangers(v_tiles.index(stage), last, begin, end, LOADED)
            total = add_weights(rounded, total, TOTAL)
            acc, left = add_values(rounded, v_tiles.index(stage), acc, ACC)
            acc, left = hopper.warpgroup_mma_wait(0, deps=[acc, left])
            mbarrier.arrive(values_free.index(stage), count=1)
            block += 1

            past_best, past_total, acc = add(
                past_best, past_total, past_acc, gl.convert_layout(best, ROW),
                gl.convert_layout(gl.max(total, 1), ROW), acc,
            )  # fmt: skip
            m = WHICH * _ROWS + gl.arange(0, _ROWS, ROW)
            head = first_head + m % GROUP
            is_row = m < num_rows * GROUP
            out = outputs_of(
                past_best, past_total, acc, sinks_ptr, head, is_row, v_scale, ACC, HAS_SINKS
            )
            at = ((first_row + m // GROUP).to(gl.int64) * (NUM_KV_HEADS * GROUP) + head) * DIM
            d = gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
            gl.store(out_ptr + at[:, None] + d, out.to(dtype), mask=is_row[:, None])


@gluon.jit(do_not_specialize=["window", "block_table_stride"])
def _prompt_attention_kernel(
    out_ptr,  # [T, num_heads, DIM]
    query_ptr,  # [T, num_heads, DIM]
    k_cache,  # [num_pages * PAGE, num_kv_heads * DIM]: a descriptor
    v_cache,
    block_table_ptr,  # [num_slots, pages]
    items_ptr,  # [most items possible, WIDTH]
    num_items_ptr,  # [1]
    sinks_ptr,  # [num_heads], if HAS_SINKS
    scale,
    v_scale,
    window,
    block_table_stride,
    query_stride_t,
    query_stride_h,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IN_FP8: gl.constexpr,
):
    """Each program strides over the items, all its warps in step."""
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PART: gl.constexpr = min(PAGE, BLOCK)
    num_items = gl.load(num_items_ptr) * NUM_KV_HEADS
    queries = gl.allocate_shared_memory(dtype, [2, _ROWS, DIM], TILE)
    # A tile is made up of parts, as they are copied.
    NUM: gl.constexpr = STAGES * (DIM // 64) * (BLOCK // PART)
    k_parts = gl.allocate_shared_memory(dtype, [NUM, PART, 64], TILE)
    v_parts = gl.allocate_shared_memory(dtype, [NUM, PART, 64], TILE)
    parts = (k_parts, v_parts)
    tiles = (
        k_parts._reinterpret(dtype, [STAGES, BLOCK, DIM], TILE),
        v_parts._reinterpret(dtype, [STAGES, BLOCK, DIM], TILE),
    )
    has = (barriers_of(STAGES, 1), barriers_of(STAGES, 1))
    free = (barriers_of(STAGES, 2), barriers_of(STAGES, 2))  # of both warpgroups
    copied, codes = has, tiles
    if IN_FP8:
        CODES: gl.constexpr = gl.NVMMASharedLayout(min(DIM, 128), 8)
        COUNT: gl.constexpr = AHEAD * (BLOCK // PART)
        k_codes = gl.allocate_shared_memory(gl.uint8, [COUNT, PART, DIM], CODES)
        v_codes = gl.allocate_shared_memory(gl.uint8, [COUNT, PART, DIM], CODES)
        parts = (k_codes, v_codes)
        codes = (
            k_codes._reinterpret(gl.uint8, [AHEAD, BLOCK, DIM], CODES),
            v_codes._reinterpret(gl.uint8, [AHEAD, BLOCK, DIM], CODES),
        )
        copied = (barriers_of(AHEAD, 1), barriers_of(AHEAD, 1))
    hopper.fence_async_shared()
    work = (items_ptr, num_items, window)
    rows = (out_ptr, query_ptr, sinks_ptr, query_stride_t, query_stride_h, scale, v_scale)
    gl.warp_specialize(
        [
            (_attend, (
                0, rows, work, queries, tiles, has, free,
                NUM_KV_HEADS, GROUP, DIM, STAGES, HAS_WINDOW, HAS_SINKS)),
            (_attend, (
                1, rows, work, queries, tiles, has, free,
                NUM_KV_HEADS, GROUP, DIM, STAGES, HAS_WINDOW, HAS_SINKS)),
            (load_blocks, (
                (k_cache, v_cache), block_table_ptr, block_table_stride, work, parts, copied,
                codes, tiles, has, free, NUM_KV_HEADS, DIM, PAGE, STAGES, HAS_WINDOW, IN_FP8)),
        ],
        [4, 4 if IN_FP8 else 1],
        [208 if IN_FP8 else 240, 96 if IN_FP8 else 24],
    )  # fmt: skip
