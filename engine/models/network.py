"""The interface of a model: rows of a batch in, logits and taps out, keys and values in pages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..state.batch import BatchRows
from ..state.phase import Shape
from .attention import PagedAttention, PassContext
from .weights import Linear


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


class Pass(NamedTuple):
    """The output of a forward pass; valid until the next one."""

    logits: Tensor  # [num_logits, V]
    taps: Tensor | None = None  # [T, num_taps, hidden] residual stream after the tapped layers
    rows: BatchRows | None = None  # of the taps, including padding
    shape: Shape | None = None  # (sequences, rows, logits), including padding


class Network(PagedLayers):
    """A causal LM whose layers read and write pages."""

    batch_invariant: bool = False  # whether the bits of a row do not depend on the batch
    attention_is_batch_invariant: bool = False  # whether its attention needs no proof of that
    tapped_layers: tuple[int, ...] = ()  # a pass hands out their residual streams; set by `tap`
    _logits: Tensor | None = None  # [max_rows, V]

    @property
    @abstractmethod
    def input_embedding(self) -> Tensor:
        """The embedding matrix. Shape: [V, hidden]."""

    @property
    @abstractmethod
    def output_head(self) -> Linear:
        """The layer that computes logits from normalised states, for heads that share it."""

    @property
    @abstractmethod
    def products_are_batch_invariant(self) -> bool:
        """Whether in every product the bits of a row do not depend on the batch."""

    @abstractmethod
    def __call__(self, context: PassContext) -> Pass: ...

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, hand out the residual stream after these layers, for every row, in the order
        of the layers.

        -1 means the embeddings; the number of layers means the states after the last norm. Raises
        ValueError naming the valid layers.
        """
        num_layers = len(self.attentions)
        if not all(-1 <= layer <= num_layers for layer in layers):
            raise ValueError(f"cannot tap layers {list(layers)}: there are 0 to {num_layers - 1}")
        self.tapped_layers = tuple(sorted(layers))

    def reserve_logits(self, max_rows: int) -> None:
        """Write up to `max_rows` rows of logits to one fixed tensor, for all shapes of passes.

        Graphs that read logits then need no copy, and the graphs of all shapes share the tensor.
        """
        if self._logits is None or len(self._logits) < max_rows:
            self._logits = torch.empty(
                max_rows, self.vocab_size, dtype=self.dtype, device=self.device
            )

    def place_of_logits(self, num_rows: int) -> Tensor | None:
        """The tensor to write this many rows of logits to; None: allocate a new one."""
        if self._logits is None or num_rows > len(self._logits):
            return None
        return self._logits[:num_rows]
