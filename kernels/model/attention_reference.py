"""Attention over pages in plain torch: runs on CPUs, and is the reference for the kernel.

SDPA's order of summation depends on the number of keys and, below four rows, on the number of rows.
So that the bits of a row do not depend on the batch, SDPA always gets the keys up to the end of the
row's own block of positions, a mask, and a multiple of four rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 16  # positions
_ROW_MULTIPLE = 4  # measured: on one machine two or three bfloat16 rows were summed differently


class RowBlock(NamedTuple):
    """Rows of a sequence that get the same keys."""

    rows: slice  # of the query
    num_keys: int
    mask: Tensor | None  # [>= group * rows, num_keys] additive; None: everything is visible


def row_blocks(
    query_len: int,
    seq_len: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    rows_at_once: int = KEY_BLOCK,
) -> list[RowBlock]:
    """The last `query_len` rows of a sequence, in blocks of at most `rows_at_once` rows, none of
    which crosses a multiple of KEY_BLOCK positions.

    `group` query heads share a KV head; `window` counts the current token.
    """
    first = seq_len - query_len
    blocks = []
    for begin in range(first - first % KEY_BLOCK, seq_len, KEY_BLOCK):
        num_keys = begin + KEY_BLOCK
        end = min(seq_len, num_keys)
        for start in range(max(first, begin), end, rows_at_once):
            stop = min(end, start + rows_at_once)
            mask = _mask(start, stop, num_keys, window, group, dtype, device)
            blocks.append(RowBlock(slice(start - first, stop - first), num_keys, mask))
    return blocks


def whole_block(
    query_len: int,
    seq_len: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = True,
) -> list[RowBlock]:
    """The rows of `row_blocks` in one block, with only the existing keys: a little faster, but the
    bits of a row may depend on the batch. If it is not causal, each row sees all keys.
    """
    mask = None
    if (causal and query_len > 1) or (window is not None and seq_len > window):
        mask = _mask(
            seq_len - query_len, seq_len, seq_len, window, group, dtype, device, causal=causal
        )
    return [RowBlock(slice(0, query_len), seq_len, mask)]


def _mask(
    start: int,
    stop: int,
    num_keys: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = True,
) -> Tensor:
    """0 or -inf for rows at these positions, the same for each of the `group` query heads."""
    num_rows = stop - start
    padded = -(-group * num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    mask = torch.zeros(padded, num_keys, dtype=dtype, device=device)
    of_heads = mask[: group * num_rows].view(group, num_rows, num_keys)
    rows = torch.arange(start, stop, device=device)[:, None]
    if causal:
        hidden = torch.arange(start, num_keys, device=device) > rows
        of_heads[..., start:].masked_fill_(hidden, float("-inf"))
    if window is not None and stop > window:
        hidden = torch.arange(num_keys, device=device) <= rows - window
        of_heads.masked_fill_(hidden, float("-inf"))
    return mask


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor | slice,
    blocks: list[RowBlock],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's last rows over its pages.

    Values after the sequence in its last page are multiplied by 0, so they must be finite.

    Shape:
        query: [query_len, num_heads, head_dim]
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or value_dim], of the
            query's dtype or a wider one
        pages: [pages of the sequence], their ids in order; or a slice, if they are consecutive
        blocks: from `row_blocks` or `whole_block`
        sinks: [num_heads], or None
        returns: [query_len, num_heads, value_dim]
    """
    num_keys = blocks[-1].num_keys
    key, value = _tokens_in(k_cache, pages, num_keys), _tokens_in(v_cache, pages, num_keys)
    outs = [
        _attend(
            query[block.rows],
            key[:, : block.num_keys],
            value[:, : block.num_keys],
            block.mask,
            scale,
            softcap,
            sinks,
        )
        for block in blocks
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Shape: query [T, num_heads, head_dim], key and value [num_kv_heads, num_keys, dim]."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, value_dim = value.shape
    # The query heads that share a KV head become rows of it: [num_kv_heads, group * query_len, dim]
    group = num_heads // num_kv_heads
    num_rows = group * query_len
    packed = (
        query.view(query_len, num_kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, num_rows, head_dim)
        .to(key.dtype)
    )
    if mask is not None and len(mask) > num_rows:
        packed = F.pad(packed, (0, 0, 0, len(mask) - num_rows))
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
            rows = rows.reshape(num_kv_heads, num_rows, 1)
            rows = F.pad(rows, (0, 0, 0, logits.shape[1] - num_rows))
            logits = torch.cat((logits, rows), dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :num_keys]
        out = torch.matmul(weights.to(value.dtype), value)
    return (
        out[:, :num_rows]
        .view(num_kv_heads, group, query_len, value_dim)
        .permute(2, 0, 1, 3)
        .reshape(query_len, num_heads, value_dim)
        .to(query.dtype)
    )


def _tokens_in(cache: Tensor, pages: Tensor | slice, num_tokens: int) -> Tensor:
    """Shape: [num_pages, page_size, num_kv_heads, dim] -> [num_kv_heads, num_tokens, dim].

    Padded with zeros if the pages hold fewer tokens.
    """
    kept = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    tokens = kept.flatten(0, 1)[:num_tokens]
    if len(tokens) < num_tokens:  # the page size is no multiple of KEY_BLOCK
        tokens = F.pad(tokens, (0, 0, 0, 0, 0, num_tokens - len(tokens)))
    return tokens.transpose(0, 1)
