"""Attention over pages in plain torch: what a CPU runs, and what the kernel is held to."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_mask(
    query_len: int,
    seq_len: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Additive mask of the last `query_len` rows of a sequence; None where all is visible.

    Returns: [group * query_len, seq_len], 0 or -inf, the same for each of the `group` query heads
    of a KV head. `window` counts the current token.
    """
    if query_len == 1 and (window is None or seq_len <= window):
        return None
    rows = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    columns = torch.arange(seq_len, device=device)[None, :]
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    mask = torch.zeros(query_len, seq_len, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).repeat(group, 1)


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor | slice,
    seq_len: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's last rows over its pages.

    Shape:
        query: [query_len, num_heads, head_dim]
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim], of the
            query's dtype or a wider one
        pages: [pages of seq_len], their ids in order; or a slice, where they lie side by side
        mask: [num_heads / num_kv_heads * query_len, seq_len] additive, or None
        sinks: [num_heads], or None
        returns: [query_len, num_heads, value_dim]
    """
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = v_cache.shape[2:]
    key, value = _tokens_in(k_cache, pages, seq_len), _tokens_in(v_cache, pages, seq_len)
    # The query heads that share a KV head become rows of it: [num_kv_heads, group * query_len, dim]
    group = num_heads // num_kv_heads
    packed = (
        query.view(query_len, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, group * query_len, head_dim)
        .to(key.dtype)
    )
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
        .to(query.dtype)
    )


def _tokens_in(cache: Tensor, pages: Tensor | slice, num_tokens: int) -> Tensor:
    """Shape: [num_pages, page_size, num_kv_heads, dim] -> [num_kv_heads, num_tokens, dim]."""
    kept = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return kept.flatten(0, 1)[:num_tokens].transpose(0, 1)
