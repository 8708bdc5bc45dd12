"""Attention of a ragged batch over a paged KV cache.

Row t of a sequence with S tokens attends to the positions p with t - window < p <= t:

    out_t = sum_p softmax_p(softcap(scale * q_t . k_p)) v_p,     softcap(x) = c * tanh(x / c)

If attention is not causal, all rows of a sequence see its tokens to the last, p < S.

A head may own a *sink*: one more logit in the softmax's denominator, with no value behind it.

Programs take their work from a list (`attention_items`). Of the programs that share a row's splits,
the last to finish merges them, in the order of the splits.

With `batch_invariant`, the bits of a row do not depend on the other rows: it is summed over the
same splits, in the same blocks of tokens, in order. The number of rows and warps that share a block
may vary, because all sums over its tokens are made by tensor cores. A program that computes several
splits adds them up just as merging does.
"""

import functools

import torch
from torch import Tensor

from .._dispatch import num_programs, shared_bytes
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .attention_blocks import block_of
from .attention_items import PROMPT_ROWS, WIDTH, AttentionItems, split_of, start_of
from .few_rows_attention import few_rows_attention, takes
from .fp8 import as_bytes, from_e4m3
from .prompt_attention import is_for, prompt_attention
from .softmax_sums import LOG2_E, add, attend, merge, no_total

# For one row: the large product that follows starts early if programs leave it enough registers.
_MANY_OUTPUTS = 4096
_SUMS = 16  # columns of a product with ones: the fewest that tensor cores can do


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    items: AttentionItems,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    causal: bool = True,
) -> Tensor:
    """Attention of all rows of a ragged batch: prefill chunks, decodes and verifications alike.

    Nothing that varies between batches is a compile-time constant, and the grid depends only on
    shapes. So a captured launch stays valid for other lengths.

    Shape:
        query: [T, num_heads, head_dim], any row and head stride
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim]
        items: of this batch, with num_heads // num_kv_heads heads to a KV head
        block_table: [num_slots, pages of the longest sequence possible] int32
        sinks: [num_heads] or None
        k_scale, v_scale: the divisors of keys and values in FP8 pages
        returns: [T, num_heads, value_dim]
    """
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    assert query.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert block_table.stride(-1) == 1
    on_warpgroups = causal and softcap is None and is_for(query, k_cache, v_cache, window, sinks)
    if on_warpgroups and items.is_prefill and items.block_m == PROMPT_ROWS:
        return prompt_attention(
            query, k_cache, v_cache, items, block_table, scale, window, sinks, k_scale, v_scale
        )
    if on_warpgroups and not items.is_prefill and takes(query, k_cache):
        return few_rows_attention(query, k_cache, v_cache, items, block_table, scale, window, sinks)
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    assert scale > 0
    in_fp8 = k_cache.dtype == torch.float8_e4m3fn
    # Of batch-invariant layers: few enough for the registers to hold both sums of a prefill, or as
    # kernels for Hopper GPUs take them, where these compute other rows of the layer.
    block = block_of(k_cache) if on_warpgroups else 64
    tiling = _tiling(query, items, k_cache, v_cache, block_table, block)
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    part = part_state = counters = None
    if items.num_splits > 1:
        shape = (num_rows, num_heads, items.num_splits)
        part = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        part_state = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
        size = triton.next_power_of_2(items.num_row_blocks * num_kv_heads)
        counters = _counters(query.device, size)
    head_pad = max(16, triton.next_power_of_2(head_dim))
    value_pad = max(16, triton.next_power_of_2(value_dim))
    most = len(items.items) * num_kv_heads
    _paged_attention_kernel[(min(most, num_programs(query.device, 8)),)](
        out, part, part_state, counters, query, k_cache, v_cache, sinks, items.items,
        items.num_items, block_table, scale * k_scale if in_fp8 else scale, v_scale, softcap or 0.0,
        window or 0, items.num_splits, block_table.stride(0), *query.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        VALUE_DIM=value_dim, HEAD_PAD=head_pad, VALUE_PAD=value_pad, PAGE_SIZE=page_size,
        BLOCK_M=items.block_m, SPLITS=items.num_splits > 1,
        ADDS_SPLITS=items.batch_invariant and items.is_prefill,
        # With few rows, summing on tensor cores avoids exchanges between warps; with many rows,
        # tensor cores are busy enough.
        SUMS=_SUMS if items.batch_invariant or not items.is_prefill else 0,
        HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, CAUSAL=causal,
        PHASES=2 if items.is_prefill and window is None else 1, IN_FP8=in_fp8, **tiling,
        **dependent_launch(query.device),
    )  # fmt: skip
    return out


def _tiling(
    query: Tensor,
    items: AttentionItems,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    batch_invariant_block: int,
) -> dict[str, int]:
    """Tokens a block, warps, and blocks loaded ahead; measured on an H200 with heads of 128."""
    num_rows, num_heads = query.shape[:2]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    bytes_per_token = (head_dim + v_cache.shape[3]) * k_cache.element_size()
    if bytes_per_token > 512:  # the measured sizes would not fit into a multiprocessor
        return {"BLOCK_N": 32, "num_warps": 8 if items.block_m > 64 else 4, "num_stages": 1}
    if items.batch_invariant:
        return {
            "BLOCK_N": batch_invariant_block,
            "num_warps": 8 if items.block_m > 64 else 4,
            "num_stages": 3 if batch_invariant_block == 64 else 2,
        }
    if items.is_prefill:
        return {"BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    num_blocks, num_sms = items.num_row_blocks * num_kv_heads, num_programs(k_cache.device, 1)
    is_short = block_table.shape[1] * page_size <= 8192
    # The fewer programs have work, the more tokens each loads at once.
    if num_blocks <= num_sms // 4:
        if is_short and num_rows == 1 and num_heads * head_dim >= _MANY_OUTPUTS:
            return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 1, "EARLY": True}
        fits = (256 + items.block_m) * bytes_per_token <= shared_bytes(k_cache.device)
        block_n = 256 if fits else 128
        return {"BLOCK_N": block_n, "num_warps": 8, "num_stages": 1, "EARLY": True}
    if is_short and num_blocks <= num_sms:
        return {"BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    if items.block_m > 32 or num_blocks < 4 * num_sms:
        return {"BLOCK_N": 64, "num_warps": 8 if items.block_m == 16 else 4, "num_stages": 3}
    return {"BLOCK_N": 32, "num_warps": 2, "num_stages": 3}


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    """For each row block and KV head, how many splits are done; every launch leaves zeros."""
    return torch.zeros(size, dtype=torch.int32, device=device)


# Neither number changes the code, and each varies between starts and within one.
@triton.jit(do_not_specialize=["num_splits", "block_table_stride"])
def _paged_attention_kernel(
    out_ptr,  # [T, num_heads, VALUE_DIM]
    part_ptr,  # [T, num_heads, num_splits, VALUE_DIM] sums of a split, or None
    part_state_ptr,  # [T, num_heads, num_splits, 2] their maximum and total
    counters_ptr,  # [row blocks * num_kv_heads]
    query_ptr,  # [T, num_heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM]
    sinks_ptr,  # [num_heads] or None
    items_ptr,  # [most items possible, WIDTH]
    num_items_ptr,  # [1]
    block_table_ptr,  # [num_slots, pages]
    scale,
    v_scale,
    softcap,
    window,
    num_splits,  # the most splits of a row
    block_table_stride,
    query_stride_t,
    query_stride_h,
    k_stride_page,
    k_stride_pos,
    k_stride_h,
    v_stride_page,
    v_stride_pos,
    v_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # whether an item covers one split only
    ADDS_SPLITS: tl.constexpr,  # whether an item covers all splits, which are added in order
    SUMS: tl.constexpr,  # equal columns of totals, by tensor cores; 0: totals without tensor cores
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PHASES: tl.constexpr,
    IN_FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Each program strides over the items; an item has all query heads of one KV head."""
    start_next_kernel(DEPENDENT)
    m = tl.arange(0, BLOCK_M)
    head_dims = tl.arange(0, HEAD_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    num_items = tl.load(num_items_ptr) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        item_ptr = items_ptr + item // NUM_KV_HEADS * WIDTH
        first_row = tl.load(item_ptr)
        num_rows = tl.load(item_ptr + 1)
        first_position = tl.load(item_ptr + 2)
        slot = tl.load(item_ptr + 3)
        split = tl.load(item_ptr + 4)
        unit = tl.load(item_ptr + 5)
        row_block = tl.load(item_ptr + 6)
        context_len = tl.load(item_ptr + 7)

        end = first_position + num_rows
        if not CAUSAL:
            end = tl.load(item_ptr + 8)
        last_seen = end - 1
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first_position - window + 1, 0)
        # Splits lie at fixed positions of the sequence; skip those that these rows do not see.
        first_split = split_of(begin, unit)
        last_split = split_of(tl.maximum(end - 1, 0), unit)
        if SPLITS:
            begin = tl.maximum(begin, start_of(split, unit))
            end = tl.minimum(end, start_of(split + 1, unit))
        else:
            split = first_split
        if (split >= first_split) & (split <= last_split):
            head = kv_head * GROUP + m % GROUP
            row = (first_row + m // GROUP).to(tl.int64)
            position = first_position + m // GROUP
            seen_to = position
            if not CAUSAL:
                seen_to = tl.zeros([BLOCK_M], tl.int32) + last_seen
            is_row = m < num_rows * GROUP
            query_at = (
                query_ptr + (row * query_stride_t + head.to(tl.int64) * query_stride_h)[:, None]
            )
            query_mask = is_row[:, None] & (head_dims < HEAD_DIM)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = no_total(BLOCK_M, SUMS)
            acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
            # Sums of the splits before the present one.
            past_best, past_total, past_acc = best, tl.zeros([BLOCK_M], tl.float32), acc
            next_split = start_of(first_split + 1, unit)
            pages_ptr = block_table_ptr + slot.to(tl.int64) * block_table_stride
            keys_ptr = k_ptr + kv_head * k_stride_h + head_dims[:, None]
            values_ptr = v_ptr + kv_head * v_stride_h + value_dims[None, :]
            start = begin // BLOCK_N * BLOCK_N
            n = start + tl.arange(0, BLOCK_N)
            page = tl.load(pages_ptr + n // PAGE_SIZE, mask=n < end, other=0)
            if not EARLY:
                wait_for_inputs(DEPENDENT)
                query = tl.load(query_at + head_dims, mask=query_mask, other=0.0)

            # First the blocks that every row sees completely, if there are many.
            seen_by_all = start
            if PHASES == 2:
                seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
            for phase in tl.static_range(PHASES):
                first, last = start, seen_by_all
                if phase == PHASES - 1:
                    first, last = seen_by_all, end
                for start in range(first, last, BLOCK_N):
                    if ADDS_SPLITS:  # noqa: SIM102 the first is a constant
                        if start >= next_split:
                            past_best, past_total, past_acc = add(
                                past_best, past_total, past_acc, best, tl.max(total, 1), acc
                            )
                            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                            total = no_total(BLOCK_M, SUMS)
                            acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
                            next_split = start_of(split_of(start, unit) + 1, unit)
                    n = start + tl.arange(0, BLOCK_N)
                    k_row = page.to(tl.int64) * k_stride_page + n % PAGE_SIZE * k_stride_pos
                    v_row = page.to(tl.int64) * v_stride_page + n % PAGE_SIZE * v_stride_pos
                    k_at, v_at = keys_ptr + k_row[None, :], values_ptr + v_row[:, None]
                    # Load the pages of the next block now, so that its keys need not wait.
                    next_n = n + BLOCK_N
                    page = tl.load(pages_ptr + next_n // PAGE_SIZE, mask=next_n < end, other=0)
                    # Positions after the sequence load as 0, since 0 times NaN would be NaN.
                    k_mask = (head_dims < HEAD_DIM)[:, None]
                    v_mask = (value_dims < VALUE_DIM)[None, :]
                    if phase == PHASES - 1:
                        k_mask &= (n < end)[None, :]
                        v_mask &= (n < end)[:, None]
                    if HAS_WINDOW:  # pages before it may be somebody else's by now
                        v_mask &= (n >= begin)[:, None]
                    if EARLY:
                        # Load what earlier passes stored while the kernel before still runs.
                        old = n < context_len
                        key = tl.load(k_at, mask=k_mask & old[None, :], other=0)
                        value = tl.load(v_at, mask=v_mask & old[:, None], other=0)
                        wait_for_inputs(DEPENDENT)
                        query = tl.load(query_at + head_dims, mask=query_mask, other=0.0)
                        key = tl.load(k_at, mask=k_mask & ~old[None, :], other=key)
                        value = tl.load(v_at, mask=v_mask & ~old[:, None], other=value)
                    else:
                        key = tl.load(k_at, mask=k_mask, other=0)
                        value = tl.load(v_at, mask=v_mask, other=0)
                    if IN_FP8:
                        key = from_e4m3(key, query.dtype)
                        value = from_e4m3(value, query.dtype)
                    best, total, acc = attend(
                        query, key, value, n, position, seen_to, best, total, acc, scale, softcap,
                        window, phase == PHASES - 1, HAS_SOFTCAP, HAS_WINDOW, SUMS,
                    )  # fmt: skip

            if EARLY:
                wait_for_inputs(DEPENDENT)  # for sequences without tokens
            mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
            out_row = row * NUM_KV_HEADS * GROUP + head
            if SUMS:
                total = tl.max(total, 1)
            if ADDS_SPLITS:
                best, total, acc = add(past_best, past_total, past_acc, best, total, acc)
            is_last = True  # whether this is the last split of these rows to finish
            if SPLITS:
                num_parts = last_split - first_split + 1
                if num_parts > 1:
                    part = out_row * num_splits + split
                    tl.store(part_ptr + part[:, None] * VALUE_DIM + value_dims, acc, mask=mask)
                    tl.store(part_state_ptr + part * 2, best, mask=is_row)
                    tl.store(part_state_ptr + part * 2 + 1, total, mask=is_row)
                    tl.debug_barrier()  # all stores of the program must come before its count
                    counter = counters_ptr + row_block * NUM_KV_HEADS + kv_head
                    num_before = tl.atomic_add(counter, 1, sem="acq_rel")
                    is_last = num_before == num_parts - 1
                    if is_last:
                        tl.store(counter, 0)
                        best, total, acc = merge(
                            part_ptr, part_state_ptr, out_row * num_splits, first_split,
                            last_split, value_dims, is_row, mask, VALUE_DIM,
                        )  # fmt: skip
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                no_value = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
                one = tl.full([BLOCK_M], 1.0, tl.float32)
                best, total, acc = add(best, total, acc, sink, one, no_value)
            if IN_FP8:
                acc *= v_scale
            tl.store(
                out_ptr + out_row[:, None] * VALUE_DIM + value_dims,
                (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
                mask=mask & is_last,
            )
    wait_for_inputs(DEPENDENT)  # for programs without an item
