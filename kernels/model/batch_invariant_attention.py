"""Checks at load, by computing, that the bits of a row of attention do not depend on the batch.

The kernel is designed to sum in one order; a GPU or compiler that does otherwise is refused. On a
CPU the library may sum several rows of a block differently from one row. Then each row is passed
alone, which is the same call whatever the batch.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_items import BATCH_INVARIANT_UNIT, list_items
from .attention_reference import KEY_BLOCK, paged_attention_reference, row_blocks
from .paged_attention import paged_attention

_PAGE = 16  # tokens; no sum depends on it
_CPU_TOKENS = 600  # more than the library sums at once
_FEW_ROWS = (1, 5, 16)  # of a sequence that decodes or verifies: blocks of different sizes
_MANY_ROWS = 17  # of a short prompt


class Heads(NamedTuple):
    """The attention heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool


@torch.inference_mode()
@functools.cache
def sums_alike(
    heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device, max_len: int
) -> bool:
    """Whether the kernel gives the rows of a prompt the same bits as the rows of decodes,
    verifications and shorter prompts in a batch.

    `max_len` is the length of the longest possible sequence in tokens.
    """
    return all(torch.equal(*pair) for pair in same_rows(heads, dtype, cache_dtype, device, max_len))


def same_rows(
    heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device, max_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of tensors that `sums_alike` compares."""
    num_tokens = min(2 * BATCH_INVARIANT_UNIT + 60, max_len)
    query, keys, values, sinks = random_layer(heads, num_tokens, _PAGE, dtype, cache_dtype, device)
    width = -(-max_len // _PAGE)
    table = torch.zeros(1, width, dtype=torch.int32, device=device)
    table[:, : len(keys)] = torch.arange(len(keys), device=device)

    def attended(ends: list[int], num_rows: int) -> Tensor:
        """The last rows of one sequence for each end; all share their pages."""
        items = list_items(
            torch.arange(len(ends) + 1, device=device) * num_rows,
            torch.tensor(ends, device=device),
            torch.arange(len(ends), device=device),
            len(ends) * num_rows,
            heads.num_kv_heads,
            heads.num_heads // heads.num_kv_heads,
            width * _PAGE,
            batch_invariant=True,
        )
        rows = torch.cat([query[end - num_rows : end] for end in ends])
        tables = table.expand(len(ends), -1).contiguous()
        scale = heads.head_dim**-0.5
        return paged_attention(
            rows, keys, values, items, tables, scale, heads.window, heads.softcap, sinks
        )

    whole = attended([num_tokens], num_tokens)
    unit = BATCH_INVARIANT_UNIT
    for num_rows in (*_FEW_ROWS, _MANY_ROWS):
        ends = [17, unit - 1, unit, unit + 1, num_tokens - 9, num_tokens]
        ends = [end for end in ends if num_rows <= end <= num_tokens]
        expected = torch.cat([whole[end - num_rows : end] for end in ends])
        yield attended(ends, num_rows), expected
        yield attended(ends[-1:], num_rows), expected[-num_rows:]


@torch.inference_mode()
@functools.cache
def rows_at_once(heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    """How many rows of a block a CPU may get together: all of them, or one at a time."""
    device = torch.device("cpu")
    query, keys, values, sinks = random_layer(heads, _CPU_TOKENS, _PAGE, dtype, cache_dtype, device)
    group, scale = heads.num_heads // heads.num_kv_heads, heads.head_dim**-0.5

    def attended(first: int, end: int) -> Tensor:
        blocks = row_blocks(end - first, end, heads.window, group, cache_dtype, device)
        pages = slice(0, -(-end // _PAGE))
        return paged_attention_reference(
            query[first:end], keys, values, pages, blocks, scale, heads.softcap, sinks
        )

    whole = attended(0, _CPU_TOKENS)
    for size in _FEW_ROWS[:-1]:
        for first in range(0, _CPU_TOKENS, size):
            rows = slice(first, min(first + size, _CPU_TOKENS))
            if not torch.equal(attended(rows.start, rows.stop), whole[rows]):
                return 1
    return KEY_BLOCK


def random_layer(
    heads: Heads,
    num_tokens: int,
    page_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, pages of keys and of values, sinks."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_pages = -(-num_tokens // page_size)
    cache = (cache_dtype, num_pages, page_size, heads.num_kv_heads)
    return (
        randn(dtype, num_tokens, heads.num_heads, heads.head_dim),
        randn(*cache, heads.head_dim),
        randn(*cache, heads.value_dim),
        randn(dtype, heads.num_heads) if heads.has_sinks else None,
    )
