"""Attention of a ragged batch over a paged KV cache.

Row t of a sequence with S tokens attends to the positions p with t - window < p <= t:

    out_t = sum_p softmax_p(softcap(scale * q_t . k_p)) v_p,     softcap(x) = c * tanh(x / c)

A head may own a *sink*: one more logit in the softmax's denominator, with no value behind it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
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
        cu_seqlens_q: [B + 1] int32; sequence i owns the rows cu_seqlens_q[i]:cu_seqlens_q[i + 1]
        seq_lens: [B] int32, tokens a sequence attends to, its own rows included
        block_table: [B, pages] int32
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
    block_m = 16 if num_rows <= 16 * num_reqs else 64
    block_m = max(block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    out = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype, device=query.device)
    # Sequence i starts at row block cu_seqlens_q[i] // block_q + i: an upper bound that needs no
    # length on the host.
    grid = (num_rows // block_q + num_reqs, num_kv_heads)
    _paged_attention_kernel[grid](
        out,
        query,
        k_cache,
        v_cache,
        sinks,
        cu_seqlens_q,
        seq_lens,
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
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(head_dim)),
        VALUE_PAD=max(16, triton.next_power_of_2(value_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=64,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _paged_attention_kernel(
    out_ptr,  # [T, num_heads, VALUE_DIM]
    query_ptr,  # [T, num_heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, VALUE_DIM]
    sinks_ptr,  # [num_heads] or None
    cu_seqlens_q_ptr,  # [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    block_table_ptr,  # [num_reqs, pages]
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program: BLOCK_Q rows of a sequence with all query heads of one KV head."""
    row_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    low, high = 0, num_reqs  # the last sequence whose first row block is not behind ours
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle <= row_block:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first_row = tl.load(cu_seqlens_q_ptr + request)
    query_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_row
    first_q = (row_block - first_row // BLOCK_Q - request) * BLOCK_Q
    if first_q >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

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
    if sinks_ptr is not None:
        best = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)

    end = context_len + tl.minimum(first_q + BLOCK_Q, query_len)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context_len + first_q - window + 1, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(
            block_table_ptr + request * block_table_stride + n // PAGE_SIZE, mask=inside, other=0
        ).to(tl.int64)
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
        acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = new_best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + row[:, None] * out_stride_t + head[:, None] * out_stride_h + value_dims,
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM),
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
        out = F.scaled_dot_product_attention(
            packed[None], key[None], value[None], attn_mask=mask, scale=scale
        )[0]
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
