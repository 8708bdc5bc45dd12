"""The attention that unmodified Hugging Face models call: ours, over the paged KV cache.

Registered once with transformers' AttentionInterface. No mask function is registered, so models are
handed no mask and every rule of visibility is ours. What varies from batch to batch is reached
through one context object, not through keyword arguments: some models drop those.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.batch import ForwardBatch
from outrider.kernels._dispatch import uses_triton
from outrider.kernels.attention_items import AttentionItems, list_items
from outrider.kernels.attention_reference import attention_mask as build_mask
from outrider.kernels.attention_reference import paged_attention_reference
from outrider.kernels.paged_attention import paged_attention
from outrider.kernels.rms_norm import Norm

# Not "flash", "sdpa", "flex", "paged|" or "/": transformers gives each of these a meaning.
ATTENTION_NAME = "outrider_paged"


class UnsupportedModelError(ValueError):
    """The model would not run correctly over the paged KV cache; says which and why."""


@dataclass(slots=True)
class LayerSpec:
    """What the dry run learnt of one attention layer."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    # as passed by the module at every call
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(slots=True)
class DryRun:
    """Stands in for a batch while a model is admitted: records who calls, and with what."""

    layers: list[LayerSpec] = field(default_factory=list)


class KVPages(NamedTuple):
    """Keys and values of an attention layer: [num_pages, page_size, num_kv_heads, dim] each."""

    keys: Tensor
    values: Tensor


class SequenceRows(NamedTuple):
    """Where a sequence stands in a batch."""

    rows: slice
    num_tokens: int  # that its last row attends to
    pages: Tensor | slice  # of these tokens; a slice, read in place, where they lie side by side


class PagedContext:
    """One batch, as the attention layers see it."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._masks: dict[tuple[int, int | None, int], Tensor | None] = {}
        self._items: dict[tuple[int, int], AttentionItems] = {}
        self._normed: tuple[Tensor | None, Norm | None, Tensor | None] = (None, None, None)

    def items(self, num_kv_heads: int, group: int) -> AttentionItems:
        """The kernel's work, listed once a forward and shared by the layers with such heads."""
        key = (num_kv_heads, group)
        if key not in self._items:
            batch = self.batch
            num_rows = len(batch.positions)
            self._items[key] = list_items(
                batch.cu_seqlens_q, batch.seq_lens, batch.slots, num_rows, num_kv_heads, group
            )
        return self._items[key]

    def leave_normed(self, hidden_states: Tensor, norm: Norm | None, normed: Tensor | None) -> None:
        """Leave to the next layer what its norm makes of these hidden states, if that is known."""
        self._normed = (hidden_states, norm, normed)

    def normed(self, hidden_states: Tensor, norm: Norm) -> Tensor | None:
        """What this norm makes of just these hidden states, if the layer before left it."""
        of, by, normed = self._normed
        return normed if of is hidden_states and by is norm else None

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
        """Mask of a sequence's rows, built once a forward and shared by the layers."""
        key = (seq.rows.start, window, group)
        if key not in self._masks:
            query_len = seq.rows.stop - seq.rows.start
            self._masks[key] = build_mask(
                query_len, seq.num_tokens, window, group, like.dtype, like.device
            )
        return self._masks[key]


def _pages(page_ids: Tensor) -> Tensor | slice:
    """A slice where these, in order, lie side by side. Shape: [pages]."""
    ids = page_ids.tolist()
    first, last = ids[0], ids[-1]
    return slice(first, last + 1) if ids == list(range(first, last + 1)) else page_ids


_context: PagedContext | DryRun | None = None


@contextmanager
def attention_context(context: PagedContext | DryRun) -> Iterator[None]:
    """Make `context` what the attention layers see; forwards do not nest."""
    global _context
    _context = context
    try:
        yield
    finally:
        _context = None


def current_context() -> PagedContext:
    """Of the forward pass under way."""
    assert isinstance(_context, PagedContext), "attention called outside of a forward pass"
    return _context


def current_batch() -> ForwardBatch:
    """The batch that the forward pass under way computes."""
    return current_context().batch


def bind_pages(module: nn.Module, pages: KVPages | None) -> None:
    """Hand an attention layer its pages, or take them back."""
    module.__dict__["kv_pages"] = pages  # no buffers: finding one takes a module microseconds


def pages_of(module: nn.Module) -> KVPages:
    pages = module.__dict__["kv_pages"]
    assert isinstance(pages, KVPages)
    return pages


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **unknown: object,
) -> tuple[Tensor, None]:
    """Write this layer's new KV to its pages, then attend over them.

    Shape:
        query: [1, num_heads, T, head_dim]; key, value: [1, num_kv_heads, T, head_dim or value_dim]
        returns: [1, T, num_heads, value_dim], None
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(_context, DryRun):
        spec = LayerSpec(
            module,
            query.shape[1],
            key.shape[1],
            key.shape[3],
            value.shape[3],
            scale,
            sliding_window,
            softcap,
            s_aux,
        )
        _record(_context, spec, attention_mask, unknown)
        return value.new_zeros(1, query.shape[2], query.shape[1], spec.value_dim), None
    batch = current_batch()
    for pages, given in zip(pages_of(module), (key, value), strict=True):
        rows = given[0].transpose(0, 1).to(pages.dtype)
        pages.flatten(0, 1).index_copy_(0, batch.slot_mapping, rows)
    rows = query[0].transpose(0, 1)
    return attend(module, rows, scale, sliding_window, softcap, s_aux)[None], None


def attend(
    module: nn.Module,
    rows: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the batch's rows over the module's pages, which hold their KV already.

    Shape: rows [T, num_heads, head_dim] -> [T, num_heads, value_dim]
    """
    context = current_context()
    keys, values = pages_of(module)
    group = rows.shape[1] // keys.shape[2]
    if uses_triton(rows):
        return paged_attention(
            rows,
            keys,
            values,
            context.items(keys.shape[2], group),
            context.batch.block_table,
            scale,
            window,
            softcap,
            sinks,
        )
    outs = [
        paged_attention_reference(
            rows[seq.rows],
            keys,
            values,
            seq.pages,
            seq.num_tokens,
            context.mask(seq, window, group, keys),
            scale,
            softcap,
            sinks,
        )
        for seq in context.sequences
    ]
    num_padding = len(rows) - sum(map(len, outs))
    if num_padding:
        outs.append(rows.new_zeros(num_padding, rows.shape[1], values.shape[3]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _record(
    dry_run: DryRun, spec: LayerSpec, attention_mask: Tensor | None, unknown: dict[str, object]
) -> None:
    # What a model passes and we would drop is what makes its output silently wrong.
    dropped = sorted(name for name, given in unknown.items() if given not in (None, False))
    if dropped:
        raise UnsupportedModelError(f"its attention passes {', '.join(dropped)}, unknown to us")
    if attention_mask is not None:
        raise UnsupportedModelError("it builds an attention mask of its own")
    dry_run.layers.append(spec)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
