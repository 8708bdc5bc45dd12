"""What attention by warpgroups is tested with: lists of items, pages, and exact sums."""

from typing import NamedTuple

import torch
from gluon_interpreter import _split_of
from random_tensors import normals
from torch import Tensor
from verification import DEVICE

from outrider.kernels.model.attention_items import PROMPT_ROWS, WIDTH, AttentionItems
from outrider.kernels.model.fp8 import as_bytes, to_e4m3

Batch = list[tuple[int, int]]  # of each sequence the rows, and the context before them
LIST_WIDTH = int(WIDTH.value)


class Layer(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def list_prompts(batch: Batch, group: int, unit: int) -> AttentionItems:
    """As `list_items` does; sequence i has the last slot but i."""
    return _listed(batch, PROMPT_ROWS, group, unit, None)


def list_few_rows(batch: Batch, group: int, unit: int, num_splits: int) -> AttentionItems:
    """As `list_items` does; sequence i has the last slot but i."""
    return _listed(batch, 32, group, unit, num_splits)


def _listed(
    batch: Batch, block_m: int, group: int, unit: int, num_splits: int | None
) -> AttentionItems:
    block_q = block_m // group
    items, first_row = [], 0
    for i, (rows, context) in enumerate(batch):
        own_splits = min(num_splits or 1, _split_of(max(rows + context - 1, 0), unit) + 1)
        for first in reversed(range(0, rows, block_q)):
            num, slot = min(rows - first, block_q), len(batch) - 1 - i
            for split in range(own_splits):
                item = first_row + first, num, context + first, slot, split, unit, 0
                items.append((*item, context, context + rows))
        first_row += rows
    room = [(-1,) * LIST_WIDTH] * 3  # that no program may take up
    listed = torch.tensor([*items, *room], dtype=torch.int32, device=DEVICE)
    num_items = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    of_batch = num_splits or 1, num_splits is None, True
    return AttentionItems(listed, num_items, 0, block_m, block_q, *of_batch)


class Pages(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    own: list[tuple[Tensor, Tensor]]  # of each sequence keys and values, [tokens, KV heads, dim]


def random_pages(
    batch: Batch,
    layer: Layer,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    scales: tuple[float, float] | None,
    seed: int,
) -> Pages:
    """A cache that holds NaN wherever no row sees a token: in others' pages, and in page 0, where
    padding writes. It is in FP8 if there are scales for it.
    """
    randn = normals(seed + sum(layer), torch.float32)
    width = max(-(-(rows + context) // page_size) for rows, context in batch) + 1
    num_pages = len(batch) * width + 1
    shape = num_pages, page_size, layer.num_kv_heads, layer.head_dim
    caches = [randn(*shape), randn(*shape)]
    if scales:
        caches = [to_e4m3(cache / scale) for cache, scale in zip(caches, scales, strict=True)]
    else:
        caches = [cache.to(dtype) for cache in caches]
    table = torch.zeros(len(batch), width, dtype=torch.int32, device=DEVICE)
    pages = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    pages = pages.to(DEVICE)
    is_used = torch.zeros(num_pages * page_size, dtype=torch.bool, device=DEVICE)
    own_tokens = []
    for i, (rows, context) in enumerate(batch):
        slot, end = len(batch) - 1 - i, rows + context
        own = pages[i * width : (i + 1) * width]
        first = max(0, context - window + 1) if window else 0
        num_used = -(-end // page_size)
        table[slot, first // page_size : num_used] = own[first // page_size : num_used].int()
        position = torch.arange(first if rows and end else end, end, device=DEVICE)
        is_used[own[position // page_size] * page_size + position % page_size] = True
        own_tokens.append(
            tuple(
                cache[own].flatten(0, 1)[:end].float() * scale
                for cache, scale in zip(caches, scales or (1.0, 1.0), strict=True)
            )
        )
    for cache in caches:
        tokens = as_bytes(cache).view(-1, layer.num_kv_heads, layer.head_dim)
        tokens[~is_used] = 0x7F if scales else torch.nan
    return Pages(*caches, table, own_tokens)


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a sequence's last rows in float32. Shape: as query."""
    num_rows, group = len(query), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("thd,nhd->htn", query, key) * scale
    position = torch.arange(len(key), device=DEVICE)
    behind = position[len(key) - num_rows :, None] - position
    is_seen = (behind >= 0) & (behind < (window or len(key)))
    logits.masked_fill_(~is_seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, num_rows, 1)), 2)
    return torch.einsum("htn,nhd->thd", logits.softmax(2)[..., : len(key)], value)
