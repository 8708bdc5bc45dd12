"""Attention of a ragged batch over a paged KV cache.

Row t of a sequence with S tokens attends to the positions p with t - window < p <= t:

    out_t = sum_p softmax_p(softcap(scale * q_t . k_p)) v_p,     softcap(x) = c * tanh(x / c)

A head may own a *sink*: one more logit in the softmax's denominator, with no value behind it.

Where sequences have few rows, one of many tokens is split over programs by a fixed number of
tokens, so that a row's result does not depend on its batch; the last of them to finish merges.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels._dispatch import num_programs

_LOG2_E = tl.constexpr(1.4426950408889634)
_MAX_SPLITS = 16
_MIN_SPLIT_TOKENS = 256


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all rows of a ragged batch: prefill chunks, decodes and verifications alike.

    Nothing that varies from batch to batch is a compile-time constant, and the grid follows from
    shapes alone, so that a captured launch stays right for other lengths.

    Shape:
        query: [T, num_heads, head_dim], any row and head stride
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim]
        cu_seqlens_q: [B + 1]; sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i + 1]
        seq_lens: [B], tokens a sequence attends to, its own rows included
        slots: [B], each sequence's row of the block table
        block_table: [num_slots, pages of the longest sequence possible] int32
        sinks: [num_heads] or None
        returns: [T, num_heads, value_dim]
    """
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    num_reqs = len(seq_lens)
    assert query.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert block_table.stride(-1) == 1
    group = num_heads // num_kv_heads
    # Few rows a sequence make decodes and verifications; many make prefill chunks.
    rows_per_req = triton.cdiv(num_rows, num_reqs)
    splits = rows_per_req <= 16
    block_m = 64 if not splits else triton.next_power_of_2(rows_per_req * group)
    block_m = max(16, min(64, block_m), triton.next_power_of_2(group))
    block_q = block_m // group
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    # Sequence i starts at row block cu_seqlens_q[i] // block_q + i: an upper bound that needs no
    # length on the host.
    num_row_blocks = num_rows // block_q + num_reqs
    max_tokens = triton.next_power_of_2(block_table.shape[1] * page_size)
    split_tokens = max(_MIN_SPLIT_TOKENS, max_tokens // _MAX_SPLITS)
    num_splits = triton.cdiv(max_tokens, split_tokens) if splits else 1
    part = part_state = counters = None
    if num_splits > 1:
        shape = (num_rows, num_heads, num_splits)
        part = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        part_state = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
        counters = _counters(query.device, triton.next_power_of_2(num_row_blocks * num_kv_heads))
    num_items = num_row_blocks * num_kv_heads * num_splits
    _paged_attention_kernel[(min(num_items, num_programs(query.device, 4)),)](
        out,
        part,
        part_state,
        counters,
        query,
        k_cache,
        v_cache,
        sinks,
        cu_seqlens_q,
        seq_lens,
        slots,
        block_table,
        num_reqs,
        scale * _LOG2_E.value if softcap is None else scale,
        softcap or 0.0,
        window or 0,
        block_table.stride(0),
        *query.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        REQS=max(32, triton.next_power_of_2(num_reqs)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(head_dim)),
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=64,
        SPLIT_TOKENS=split_tokens,
        NUM_SPLITS=num_splits,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        num_warps=4,
    )
    return out


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    """How many splits are done, by row block and KV head; left at zero by every launch."""
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_reqs"])
def _paged_attention_kernel(
    out_ptr,  # [T, num_heads, VALUE_DIM]
    part_ptr,  # [T, num_heads, NUM_SPLITS, VALUE_DIM] sums of a split, or None
    part_state_ptr,  # [T, num_heads, NUM_SPLITS, 2] their maximum and total
    counters_ptr,  # [row blocks * num_kv_heads]
    query_ptr,  # [T, num_heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM]
    sinks_ptr,  # [num_heads] or None
    cu_seqlens_q_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    slots_ptr,  # [num_reqs]
    block_table_ptr,  # [num_slots, pages]
    num_reqs,
    scale,  # in base-2 units, unless a softcap comes between
    softcap,
    window,
    block_table_stride,
    query_stride_t,
    query_stride_h,
    out_stride_t,
    out_stride_h,
    k_stride_page,
    k_stride_pos,
    k_stride_h,
    v_stride_page,
    v_stride_pos,
    v_stride_h,
    REQS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Each program takes every so many of the items: splits of BLOCK_Q rows of a sequence, with all
    query heads of one KV head.
    """
    # What is to be done follows from the lengths alone; every program works it out for itself.
    i = tl.arange(0, REQS)
    is_req = i < num_reqs
    first_rows = tl.load(cu_seqlens_q_ptr + i, mask=is_req, other=0).to(tl.int32)
    query_lens = tl.load(cu_seqlens_q_ptr + i + 1, mask=is_req, other=0).to(tl.int32) - first_rows
    all_lens = tl.load(seq_lens_ptr + i, mask=is_req, other=0).to(tl.int32)
    num_splits = tl.full([REQS], 1, tl.int32)
    if NUM_SPLITS > 1:
        num_splits = tl.maximum((all_lens + SPLIT_TOKENS - 1) // SPLIT_TOKENS, 1)
    num_items = (query_lens + BLOCK_Q - 1) // BLOCK_Q * num_splits
    item_ends = tl.cumsum(num_items, 0)
    for item in range(tl.program_id(0), tl.sum(num_items, 0) * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = item % NUM_KV_HEADS
        request = tl.sum((item_ends <= item // NUM_KV_HEADS).to(tl.int32), 0)
        items_before = tl.sum(tl.where(i < request, num_items, 0), 0)
        first_row = tl.load(cu_seqlens_q_ptr + request).to(tl.int32)
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
        splits = 1
        if NUM_SPLITS > 1:
            splits = tl.maximum((seq_len + SPLIT_TOKENS - 1) // SPLIT_TOKENS, 1)
        item_of_req = item // NUM_KV_HEADS - items_before
        _attend_item(
            item_of_req % splits, item_of_req // splits * BLOCK_Q, kv_head, request, first_row,
            tl.load(cu_seqlens_q_ptr + request + 1).to(tl.int32) - first_row, seq_len,
            tl.load(slots_ptr + request).to(tl.int32), out_ptr, part_ptr, part_state_ptr,
            counters_ptr, query_ptr, k_ptr, v_ptr, sinks_ptr, block_table_ptr, scale, softcap,
            window, block_table_stride, query_stride_t, query_stride_h, out_stride_t, out_stride_h,
            k_stride_page, k_stride_pos, k_stride_h, v_stride_page, v_stride_pos, v_stride_h,
            NUM_KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM, HEAD_PAD, VALUE_PAD, PAGE_SIZE, BLOCK_M,
            BLOCK_Q, BLOCK_N, SPLIT_TOKENS, NUM_SPLITS, HAS_SOFTCAP, HAS_WINDOW,
        )  # fmt: skip


@triton.jit
def _attend_item(
    split, first_q, kv_head, request, first_row, query_len, seq_len, slot, out_ptr, part_ptr,
    part_state_ptr, counters_ptr, query_ptr, k_ptr, v_ptr, sinks_ptr, block_table_ptr, scale,
    softcap, window, block_table_stride, query_stride_t, query_stride_h, out_stride_t, out_stride_h,
    k_stride_page, k_stride_pos, k_stride_h, v_stride_page, v_stride_pos, v_stride_h,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Rows first_q to first_q + BLOCK_Q of a sequence, over one split of its tokens."""
    context_len = seq_len - query_len
    end = context_len + tl.minimum(first_q + BLOCK_Q, query_len)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context_len + first_q - window + 1, 0)
    # Splits lie at fixed positions of the sequence; sequences without tokens have one, empty.
    first_split = begin // SPLIT_TOKENS
    last_split = tl.maximum(end - 1, 0) // SPLIT_TOKENS
    takes_part = True
    if NUM_SPLITS > 1:
        takes_part = (split >= first_split) & (split <= last_split)
        begin = tl.maximum(begin, split * SPLIT_TOKENS)
        end = tl.minimum(end, (split + 1) * SPLIT_TOKENS)
    if takes_part:
        pages_ptr = block_table_ptr + slot.to(tl.int64) * block_table_stride

        m = tl.arange(0, BLOCK_M)
        q = first_q + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = (m < BLOCK_Q * GROUP) & (q < query_len)
        row = (first_row + q).to(tl.int64)
        head_dims = tl.arange(0, HEAD_PAD)
        value_dims = tl.arange(0, VALUE_PAD)
        query = tl.load(
            query_ptr + row[:, None] * query_stride_t + head[:, None] * query_stride_h + head_dims,
            mask=is_row[:, None] & (head_dims < HEAD_DIM),
            other=0.0,
        )
        position = context_len + q
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:
            owns_sink = (split == first_split) | (NUM_SPLITS == 1)
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
            best = tl.where(owns_sink, sink, best)
            total = tl.where(owns_sink, 1.0, total)
        acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)

        for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < end
            page = tl.load(pages_ptr + n // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            in_page = n % PAGE_SIZE
            key = tl.load(
                k_ptr
                + page[None, :] * k_stride_page
                + in_page[None, :] * k_stride_pos
                + kv_head * k_stride_h
                + head_dims[:, None],
                mask=inside[None, :] & (head_dims < HEAD_DIM)[:, None],
                other=0.0,
            )
            logits = tl.dot(query, key, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # tanh by exp2 of a negative number only, which cannot overflow.
                e = tl.exp2(tl.abs(logits) * (-2.0 * _LOG2_E) / softcap)
                capped = softcap * (1.0 - e) / (1.0 + e)
                logits = tl.where(logits < 0, -capped, capped) * _LOG2_E
            visible = is_row[:, None] & (n[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible &= n[None, :] > position[:, None] - window
            logits = tl.where(visible, logits, float("-inf"))
            new_best = tl.maximum(best, tl.max(logits, 1))
            # A row that has seen nothing yet keeps -inf; subtracting it would make NaN.
            shift = tl.where(new_best > float("-inf"), new_best, 0.0)
            weights = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(best - shift)
            # Positions behind the sequence are loaded as 0: a zero weight times NaN would be NaN.
            value = tl.load(
                v_ptr
                + page[:, None] * v_stride_page
                + in_page[:, None] * v_stride_pos
                + kv_head * v_stride_h
                + value_dims[None, :],
                mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.dot(
                weights.to(value.dtype), value, input_precision="ieee"
            )
            best = new_best
        mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
        num_parts = last_split - first_split + 1
        num_before = num_parts - 1  # splits of these rows that were done before this one
        if NUM_SPLITS > 1:
            part = (row * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS
            if num_parts > 1:
                state_ptr = part_state_ptr + (part + split) * 2
                at = part_ptr + (part + split)[:, None] * VALUE_DIM + value_dims[None, :]
                tl.store(at, acc, mask=mask)
                tl.store(state_ptr, best, mask=is_row)
                tl.store(state_ptr + 1, total, mask=is_row)
                tl.debug_barrier()  # all of the program's stores come before its count
                # As many row blocks as there can be lie before this one; see the wrapper.
                row_block = first_row // BLOCK_Q + request + first_q // BLOCK_Q
                counter = counters_ptr + row_block * NUM_KV_HEADS + kv_head
                num_before = tl.atomic_add(counter, 1, sem="acq_rel")
                if num_before == num_parts - 1:
                    tl.store(counter, 0)
                    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
                    for i in range(first_split, last_split + 1):
                        state_ptr = part_state_ptr + (part + i) * 2
                        at = part_ptr + (part + i)[:, None] * VALUE_DIM + value_dims[None, :]
                        # Other multiprocessors wrote these: not from this one's cache.
                        part_best = tl.load(state_ptr, mask=is_row, other=0.0, cache_modifier=".cg")
                        part_total = tl.load(
                            state_ptr + 1, mask=is_row, other=0, cache_modifier=".cg"
                        )
                        part_acc = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                        new_best = tl.maximum(best, part_best)
                        shift = tl.where(new_best > float("-inf"), new_best, 0.0)
                        decay, part_decay = tl.exp2(best - shift), tl.exp2(part_best - shift)
                        total = total * decay + part_total * part_decay
                        acc = acc * decay[:, None] + part_acc * part_decay[:, None]
                        best = new_best
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + row[:, None] * out_stride_t + head[:, None] * out_stride_h + value_dims,
            out.to(out_ptr.dtype.element_ty),
            mask=mask & (num_before == num_parts - 1),
        )


def attention_mask(
    query_len: int, seq_len: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask of the last `query_len` rows of a sequence; None where all is visible.

    Returns: [query_len, seq_len], 0 or -inf. `window` counts the current token.
    """
    if query_len == 1 and (window is None or seq_len <= window):
        return None
    rows = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    columns = torch.arange(seq_len, device=device)[None, :]
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    return torch.zeros(query_len, seq_len, dtype=dtype, device=device).masked_fill_(
        hidden, float("-inf")
    )


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    seq_len: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's last rows over its pages.

    Shape:
        query: [query_len, num_heads, head_dim]
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim]
        pages: [at least the pages of seq_len], page ids in order
        mask: [query_len, seq_len] additive, or None
        sinks: [num_heads], or None
        returns: [query_len, num_heads, value_dim]
    """
    query_len, num_heads, head_dim = query.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    pages = pages[: -(-seq_len // page_size)]
    # [num_kv_heads, seq_len, dim]
    key = k_cache.index_select(0, pages).view(-1, num_kv_heads, head_dim)[:seq_len].transpose(0, 1)
    value = (
        v_cache.index_select(0, pages).view(-1, num_kv_heads, value_dim)[:seq_len].transpose(0, 1)
    )
    # The query heads that share a KV head become rows of it: [num_kv_heads, group * query_len, dim]
    group = num_heads // num_kv_heads
    packed = (
        query.view(query_len, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, group * query_len, head_dim)
    )
    if mask is not None:
        mask = mask.repeat(group, 1)
    if softcap is None and sinks is None:
        if packed.shape[1] == 1:
            # torch on a CPU takes twice as long over one bfloat16 row a head as all this does.
            packed, key, value = packed.float(), key.float(), value.float()
            mask = mask.float() if mask is not None else None
        out = F.scaled_dot_product_attention(
            packed[None], key[None], value[None], attn_mask=mask, scale=scale
        )[0].to(query.dtype)
    else:
        logits = torch.matmul(packed, key.transpose(1, 2)).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            logits += mask
        if sinks is not None:
            rows = sinks.float().view(num_kv_heads, group, 1).expand(-1, -1, query_len)
            logits = torch.cat((logits, rows.reshape(num_kv_heads, -1, 1)), dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :seq_len]
        out = torch.matmul(weights.to(value.dtype), value)
    return (
        out.view(num_kv_heads, group, query_len, value_dim)
        .permute(2, 0, 1, 3)
        .reshape(query_len, num_heads, value_dim)
    )
