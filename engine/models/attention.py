"""Attention of one layer over its pages, and what the layers of one forward pass share."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.batch import ForwardBatch
from outrider.kernels._dispatch import uses_triton
from outrider.kernels.attention_items import AttentionItems, list_items
from outrider.kernels.attention_reference import attention_mask as build_mask
from outrider.kernels.attention_reference import paged_attention_reference
from outrider.kernels.paged_attention import paged_attention
from outrider.kernels.rope import rotary_table


class KVPages(NamedTuple):
    """Keys and values of an attention layer: [num_pages, page_size, num_kv_heads, dim] each."""

    keys: Tensor
    values: Tensor


class Rope(NamedTuple):
    """Rotary embedding of positions: angles are position * inv_freq."""

    inv_freq: Tensor  # [head_dim / 2] float32
    scaling: float  # of cos and sin


class SequenceRows(NamedTuple):
    """Where a sequence stands in a batch."""

    rows: slice
    num_tokens: int  # that its last row attends to
    pages: Tensor | slice  # of these tokens; a slice, read in place, if they lie side by side


class PassContext:
    """One batch on its way through a model: what several layers need, made once."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._masks: dict[tuple[int, int | None, int], Tensor | None] = {}
        self._items: dict[tuple[int, int], AttentionItems] = {}
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def rotary(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every row. Shape: [T, head_dim] each."""
        key = id(rope.inv_freq)
        if key not in self._rotary:
            self._rotary[key] = rotary_table(self.batch.positions, *rope, dtype)
        return self._rotary[key]

    def items(self, num_kv_heads: int, group: int) -> AttentionItems:
        """The attention kernel's work for layers with such heads."""
        key = (num_kv_heads, group)
        if key not in self._items:
            batch = self.batch
            num_rows = len(batch.positions)
            self._items[key] = list_items(
                batch.cu_seqlens_q, batch.seq_lens, batch.slots, num_rows, num_kv_heads, group
            )
        return self._items[key]

    @functools.cached_property
    def sequences(self) -> list[SequenceRows]:
        """The batch's sequences that have rows, for attention without a kernel."""
        batch = self.batch
        bounds, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        return [
            SequenceRows(
                slice(bounds[i], bounds[i + 1]),
                seq_lens[i],
                _pages(batch.block_table[slot, : -(-seq_lens[i] // batch.page_size)]),
            )
            for i, slot in enumerate(batch.slots.tolist())
            if bounds[i] < bounds[i + 1]
        ]

    def mask(
        self, seq: SequenceRows, window: int | None, group: int, like: Tensor
    ) -> Tensor | None:
        """Mask of a sequence's rows."""
        key = (seq.rows.start, window, group)
        if key not in self._masks:
            query_len = seq.rows.stop - seq.rows.start
            self._masks[key] = build_mask(
                query_len, seq.num_tokens, window, group, like.dtype, like.device
            )
        return self._masks[key]


def _pages(page_ids: Tensor) -> Tensor | slice:
    """A slice if these, in order, lie side by side. Shape: [pages]."""
    ids = page_ids.tolist()
    first, last = ids[0], ids[-1]
    return slice(first, last + 1) if ids == list(range(first, last + 1)) else page_ids


@dataclass(slots=True)
class PagedAttention:
    """Attention of one layer over the pages that it is bound to."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # tokens that a row sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]
    pages: KVPages | None = None

    @property
    def bound_pages(self) -> KVPages:
        assert self.pages is not None, "attention before its pages were bound"
        return self.pages

    def __call__(self, query: Tensor, context: PassContext) -> Tensor:
        """Attend over pages that hold the KV of these rows already.

        Shape: query [T, num_heads, head_dim] -> [T, num_heads, value_dim]
        """
        keys, values = self.bound_pages
        group = self.num_heads // self.num_kv_heads
        if uses_triton(query):
            return paged_attention(
                query,
                keys,
                values,
                context.items(self.num_kv_heads, group),
                context.batch.block_table,
                self.scale,
                self.window,
                self.softcap,
                self.sinks,
            )
        outs = [
            paged_attention_reference(
                query[seq.rows],
                keys,
                values,
                seq.pages,
                seq.num_tokens,
                context.mask(seq, self.window, group, keys),
                self.scale,
                self.softcap,
                self.sinks,
            )
            for seq in context.sequences
        ]
        num_padding = len(query) - sum(map(len, outs))
        if num_padding:
            outs.append(query.new_zeros(num_padding, self.num_heads, self.value_dim))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
