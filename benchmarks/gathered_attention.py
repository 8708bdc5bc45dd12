"""A candidate for attention of prompts, whose blocks the tensor memory accelerator copies.

It copies from pages of a block, or from pages that are gathered first, and sums as
`kernels.model.paged_attention` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.model.attention_items import AttentionItems, split_of, start_of
from outrider.kernels.model.softmax_sums import add, attend, no_total

WIDTH = tl.constexpr(9)  # of an item


@triton.jit
def _kernel(
    out_ptr,  # [T, num_heads, DIM]
    query_ptr,  # [T, num_heads, DIM]
    keys,  # descriptor of [num_tokens, num_kv_heads * DIM], gathered or in pages
    values,
    block_table_ptr,  # [pages], or None if they are gathered
    items_ptr,  # [most items possible, WIDTH]
    num_items_ptr,  # [1]
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    num_items = tl.load(num_items_ptr) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
        first_row, num_rows = tl.load(item_ptr), tl.load(item_ptr + 1)
        first_position, unit = tl.load(item_ptr + 2), tl.load(item_ptr + 5)
        end = first_position + num_rows
        position = first_position + m // GROUP
        row = (first_row + m // GROUP).to(tl.int64) * NUM_KV_HEADS * GROUP
        at = (row + kv_head * GROUP + m % GROUP)[:, None] * DIM + dims
        is_row = (m < num_rows * GROUP)[:, None]
        query = tl.load(query_ptr + at, mask=is_row, other=0.0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = no_total(BLOCK_M, SUMS)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        past_best, past_total, past_acc = best, tl.zeros([BLOCK_M], tl.float32), acc
        next_split = start_of(1, unit)
        seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            first, last = 0, seen_by_all
            if MASKED:
                first, last = seen_by_all, end
            for start in tl.range(first, last, BLOCK_N, warp_specialize=SPECIALIZE and not MASKED):
                if start >= next_split:
                    past_best, past_total, past_acc = add(
                        past_best, past_total, past_acc, best, tl.max(total, 1), acc
                    )
                    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = no_total(BLOCK_M, SUMS)
                    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
                    next_split = start_of(split_of(start, unit) + 1, unit)
                place = start
                if block_table_ptr is not None:  # of pages of a block
                    place = tl.load(block_table_ptr + start // BLOCK_N) * BLOCK_N
                key = keys.load([place, kv_head * DIM])
                value = values.load([place, kv_head * DIM])
                n = start + tl.arange(0, BLOCK_N)
                best, total, acc = attend(
                    query, key.T, value, n, position, position, best, total, acc, scale, 0.0, 0,
                    MASKED, False, False, SUMS,
                )  # fmt: skip
        best, total, acc = add(past_best, past_total, past_acc, best, tl.max(total, 1), acc)
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_row)


def gathered_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    items: AttentionItems,
    block_table: Tensor,
    scale: float,
    *,
    block_n: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
    specialize: bool = False,
    programs: int = 1056,
) -> Tensor:
    """Causal attention of one sequence's last rows, as `paged_attention`; bfloat16 pages alone."""
    num_heads, dim = query.shape[1:]
    page_size, num_kv_heads = k_cache.shape[1:3]
    caches = [k_cache, v_cache]
    if page_size != block_n:
        pages = block_table[0].long()
        caches = [cache.index_select(0, pages) for cache in caches]
    descriptors = [
        TensorDescriptor.from_tensor(cache.view(-1, num_kv_heads * dim), [block_n, dim])
        for cache in caches
    ]
    out = torch.empty_like(query)
    _kernel[(min(programs, len(items.items) * num_kv_heads),)](
        out, query.contiguous(), *descriptors, block_table if page_size == block_n else None,
        items.items, items.num_items, scale,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, DIM=dim,
        BLOCK_M=items.block_m, BLOCK_N=block_n, SUMS=16, SPECIALIZE=specialize,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
