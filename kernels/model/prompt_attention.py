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
    block_of,
    item_of,
    load_blocks,
    load_queries,
    outputs_of,
    sums_of_tokens,
    tiles_of,
    tokens_of,
)
from .attention_items import FEW_ROWS, PROMPT_ROWS, WIDTH, AttentionItems
from .fp8 import as_bytes
from .softmax_sums import LOG2_E, add
from .warpgroups import barriers_of, has_warpgroups

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
    block = block_of(k_cache)
    caches = [
        TensorDescriptor.from_tensor(
            as_bytes(cache).view(-1, num_kv_heads * dim),
            [min(page_size, block), span],
            gl.NVMMASharedLayout(span * size, 8 * size),
        )
        for cache in (k_cache, v_cache)
    ]
    out = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=query.device)
    grid = min(num_programs(query.device, 1), len(items.items) * num_kv_heads)
    _prompt_attention_kernel[(grid,)](
        out, query, *caches, block_table, items.items, items.num_items,
        query if sinks is None else sinks, scale * k_scale if in_fp8 else scale,
        v_scale if in_fp8 else 1.0, window or 0, block_table.stride(0), *query.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, DIM=dim, BLOCK=block,
        PAGE=page_size, STAGES=2 if block == 128 or dim == 256 else 3 if in_fp8 else 4,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, IN_FP8=in_fp8, num_warps=4,
    )  # fmt: skip
    return out


@gluon.jit
def _attend(
    WHICH: gl.constexpr, rows, work, queries, tiles, has, free, past_sums,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """The first or second 64 rows of all items. One warpgroup."""
    BLOCK: gl.constexpr = tiles[0].shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    items_ptr, num_items, window = work
    out_ptr, query_ptr, sinks_ptr, query_strides, scale, v_scale = rows
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    query_tile = queries.index(WHICH)
    block = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
            first_head = item % NUM_KV_HEADS * GROUP
            first_row, num_rows = gl.load(item_ptr), gl.load(item_ptr + 1)
            first_position, unit = gl.load(item_ptr + 2), gl.load(item_ptr + 5)
            tokens = tokens_of(item_ptr, window, BLOCK, HAS_WINDOW)
            _, end, _ = tokens
            m = WHICH * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOADED))
            load_queries(
                query_tile, query_ptr, query_strides, first_row, num_rows, first_head, m, GROUP,
                DIM, LOADED, False,
            )  # fmt: skip
            m = WHICH * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOGITS))
            position = first_position + m // GROUP
            past_best, past_total, past_acc, best, total, acc, block = sums_of_tokens(
                block, query_tile, tiles, has, free, past_sums, tokens, position,
                (first_position, end - 1), unit, scale * LOG2_E, window, dtype, DIM, STAGES,
                HAS_WINDOW, True, LOADED,
            )  # fmt: skip
            best, total, acc = add(past_best, past_total, past_acc, best, total, acc)
            m = WHICH * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, ACC))
            head = first_head + m % GROUP
            is_row = m < num_rows * GROUP
            out = outputs_of(best, total, acc, sinks_ptr, head, is_row, v_scale, ACC, HAS_SINKS)
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
    BLOCK: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    IN_FP8: gl.constexpr,
):
    """Each program strides over the items, all its warps in step."""
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    num_items = gl.load(num_items_ptr) * NUM_KV_HEADS
    queries = gl.allocate_shared_memory(dtype, [2, _ROWS, DIM], TILE)
    parts, tiles = tiles_of(dtype, BLOCK, DIM, PAGE, STAGES)
    past_sums = (None, None)
    if BLOCK == 128:  # whose logits take the registers
        SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [2, _ROWS, DIM], SWIZZLED)
        past_sums = (sums.index(0), sums.index(1))
    has = (barriers_of(STAGES, 1), barriers_of(STAGES, 1))
    free = (barriers_of(STAGES, 2), barriers_of(STAGES, 2))  # of both warpgroups
    copied, codes = has, tiles
    if IN_FP8:
        CODES: gl.constexpr = gl.NVMMASharedLayout(min(DIM, 128), 8)
        PART: gl.constexpr = min(PAGE, BLOCK)
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
    query_strides = (query_stride_t, query_stride_h)
    rows = (out_ptr, query_ptr, sinks_ptr, query_strides, scale, v_scale)
    gl.warp_specialize(
        [
            (_attend, (
                0, rows, work, queries, tiles, has, free, past_sums[0],
                NUM_KV_HEADS, GROUP, DIM, STAGES, HAS_WINDOW, HAS_SINKS)),
            (_attend, (
                1, rows, work, queries, tiles, has, free, past_sums[1],
                NUM_KV_HEADS, GROUP, DIM, STAGES, HAS_WINDOW, HAS_SINKS)),
            (load_blocks, (
                (k_cache, v_cache), block_table_ptr, block_table_stride, work, parts, copied,
                codes, tiles, has, free, NUM_KV_HEADS, DIM, PAGE, STAGES, HAS_WINDOW, IN_FP8)),
        ],
        [4, 4 if IN_FP8 else 1],
        [208 if IN_FP8 else 240, 96 if IN_FP8 else 24],
    )  # fmt: skip
