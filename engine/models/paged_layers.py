"""Attention layers that keep their keys and values in pages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from .attention import PagedAttention


class PagedLayers(ABC):
    """The attention layers of one model, each with its part of every page."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # width of the logits
    cache_dtype: torch.dtype | None = None  # of keys and values; None: the model's

    @property
    @abstractmethod
    def attentions(self) -> Sequence[PagedAttention]:
        """In the order of the layers."""

    @property
    def weight_formats(self) -> str:
        """The formats of quantised weights; "" if all weights are in the dtype."""
        return ""

    def dtype_of_pages(self, layer: PagedAttention) -> torch.dtype:
        """The dtype of a layer's keys and values."""
        if self.cache_dtype is not None:
            return self.cache_dtype
        # Measured: with one query head a KV head, bfloat16 takes five times as long on a CPU.
        is_slow = self.device.type == "cpu" and layer.num_heads == layer.num_kv_heads
        return torch.float32 if is_slow else self.dtype

    @property
    def bytes_per_token(self) -> int:
        """KV cache bytes of one token, over all layers."""
        return sum(
            layer.num_kv_heads
            * (layer.head_dim + layer.value_dim)
            * self.dtype_of_pages(layer).itemsize
            for layer in self.attentions
        )

    def bind_cache(self, num_pages: int, page_size: int) -> None:
        """Allocate the cache and give each attention layer its part."""
        for layer in self.attentions:
            layer.bind_pages(num_pages, page_size, self.dtype_of_pages(layer), self.device)

    def free_cache(self) -> None:
        """Free the cache, if there is one."""
        for layer in self.attentions:
            layer.pages = None
