"""Attention layers with their keys and values in pages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch

from ..state.slots import Slots
from .attention import KVPages, PagedAttention


class PagedLayers(ABC):
    """What a page holds of one model, and where."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # width of the logits

    @property
    @abstractmethod
    def attentions(self) -> Sequence[PagedAttention]:
        """In the order of the layers."""

    @property
    def weight_formats(self) -> str:
        """What the weights are kept in, if that is not the dtype; "": it is."""
        return ""

    @property
    def bytes_per_token(self) -> int:
        """KV cache bytes that one token takes, over all layers."""
        return sum(
            layer.num_kv_heads
            * (layer.head_dim + layer.value_dim)
            * self._cache_dtype(layer).itemsize
            for layer in self.attentions
        )

    def bind_cache(self, num_pages: int, page_size: int) -> None:
        """Allocate the cache and hand each attention layer its part of it."""
        for layer in self.attentions:
            # Not zeroed: what is read past a sequence's length, on a CPU, is cleared before.
            empty = partial(torch.empty, dtype=self._cache_dtype(layer), device=self.device)
            shape = (num_pages, page_size, layer.num_kv_heads)
            layer.pages = KVPages(empty(*shape, layer.head_dim), empty(*shape, layer.value_dim))

    def bind_slots(self, slots: Slots) -> None:
        """Take the rows of batches from these slots."""
        return

    def free_cache(self) -> None:
        """Free the cache, if there is one."""
        for layer in self.attentions:
            layer.pages = None

    def _cache_dtype(self, layer: PagedAttention) -> torch.dtype:
        # Measured: over one bfloat16 row a KV head torch takes a CPU five times as long.
        is_slow = self.device.type == "cpu" and layer.num_heads == layer.num_kv_heads
        return torch.float32 if is_slow else self.dtype
