"""The attention that unmodified Hugging Face models call: ours, over the paged KV cache.

Registered once with transformers' AttentionInterface. No mask function is registered, so models are
handed no mask and every rule of visibility is ours. What varies from batch to batch is reached
through one context object, not through keyword arguments: some models drop those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.batch import ForwardBatch
from outrider.kernels._dispatch import uses_triton
from outrider.kernels.paged_attention import attention_mask as build_mask
from outrider.kernels.paged_attention import paged_attention, paged_attention_reference

# Not "flash", "sdpa", "flex", "paged|" or "/": transformers gives each of these a meaning.
ATTENTION_NAME = "outrider_paged"


class UnsupportedModelError(ValueError):
    """The model would not run correctly over the paged KV cache; says which and why."""


@dataclass(slots=True)
class LayerSpec:
    """What the dry run learnt of one attention layer."""

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(slots=True)
class DryRun:
    """Stands in for a batch while a model is admitted: records who calls, and with what."""

    layers: list[LayerSpec] = field(default_factory=list)


class PagedContext:
    """One batch, as the attention layers see it."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def mask(self, i: int, window: int | None, like: Tensor) -> Tensor | None:
        """Mask of sequence i, built once a forward and shared by the layers."""
        key = (i, window)
        if key not in self._masks:
            self._masks[key] = build_mask(
                int(self.batch.query_lens_np[i]),
                int(self.batch.seq_lens_np[i]),
                window,
                like.dtype,
                like.device,
            )
        return self._masks[key]


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
    context = _context
    if isinstance(context, DryRun):
        return _record(context, module, query, key, value, attention_mask, unknown), None
    assert context is not None, "attention called outside of a forward pass"
    batch = context.batch
    k_cache, v_cache = module.k_cache, module.v_cache
    assert isinstance(k_cache, Tensor)
    assert isinstance(v_cache, Tensor)
    k_cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, key[0].transpose(0, 1))
    v_cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, value[0].transpose(0, 1))

    rows = query[0].transpose(0, 1)  # [T, num_heads, head_dim]
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    if uses_triton(rows):
        out = paged_attention(
            rows,
            k_cache,
            v_cache,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_table,
            scale,
            sliding_window,
            softcap,
            s_aux,
        )
    else:
        out = torch.cat(
            [
                paged_attention_reference(
                    sequence_rows,
                    k_cache,
                    v_cache,
                    batch.block_table[i],
                    int(batch.seq_lens_np[i]),
                    context.mask(i, sliding_window, query),
                    scale,
                    softcap,
                    s_aux,
                )
                for i, sequence_rows in enumerate(rows.split(batch.query_lens_np.tolist()))
            ]
        )
    return out[None], None


def _record(
    dry_run: DryRun,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    unknown: dict[str, object],
) -> Tensor:
    # What a model passes and we would drop is what makes its output silently wrong.
    dropped = sorted(name for name, given in unknown.items() if given not in (None, False))
    if dropped:
        raise UnsupportedModelError(f"its attention passes {', '.join(dropped)}, unknown to us")
    if attention_mask is not None:
        raise UnsupportedModelError("it builds an attention mask of its own")
    dry_run.layers.append(LayerSpec(module, key.shape[1], key.shape[3], value.shape[3]))
    num_heads, num_rows = query.shape[1:3]
    return value.new_zeros(1, num_rows, num_heads, value.shape[3])


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
