"""What the engine asks of a model: rows of a batch in, logits and taps out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..state.batch import BatchRows
from .attention import PagedAttention, PassContext
from .weights import Linear


class Pass(NamedTuple):
    """What a forward pass hands out; valid until the next one."""

    logits: Tensor  # [num_logits, V]
    taps: Tensor | None = None  # [T, num_taps, hidden] residual stream behind the tapped layers
    rows: BatchRows | None = None  # that have taps, padding included


class Network(ABC):
    """A causal LM whose layers read and write pages."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # width of the logits
    same_bits: bool = False  # whether a row comes out the same to the bit in any company
    tapped_layers: tuple[int, ...] = ()  # whose residual streams a pass hands out; set by `tap`
    _logits: Tensor | None = None  # [max_rows, V]

    @property
    @abstractmethod
    def attentions(self) -> Sequence[PagedAttention]:
        """In the order of the layers."""

    @property
    @abstractmethod
    def input_embedding(self) -> Tensor:
        """What token ids are looked up in. Shape: [V, hidden]."""

    @property
    @abstractmethod
    def output_head(self) -> Linear:
        """What gives the logits of normalised states, for heads that share it."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """What a pass of few rows reads of the weights: all but most of the embeddings."""

    @property
    @abstractmethod
    def products_keep_bits(self) -> bool:
        """Whether every product gives a row the same to the bit in any company."""

    @property
    def weight_formats(self) -> str:
        """What the weights are kept in, if that is not the model's dtype; "": it is."""
        return ""

    @abstractmethod
    def __call__(self, context: PassContext) -> Pass: ...

    def tap(self, layers: Sequence[int]) -> None:
        """From now on hand out the residual stream behind these layers, for every row, in the order
        of the layers; -1 are the embeddings.

        Raises ValueError naming the layers that there are.
        """
        num_layers = len(self.attentions)
        if not all(-1 <= layer < num_layers for layer in layers):
            raise ValueError(f"cannot tap layers {list(layers)}: there are 0 to {num_layers - 1}")
        self.tapped_layers = tuple(sorted(layers))

    def reserve_logits(self, max_rows: int) -> None:
        """Keep up to `max_rows` rows of logits in one place, whatever the shape of the pass.

        What was captured to read them there needs no copy, and the graphs of all shapes share it.
        """
        if self._logits is None or len(self._logits) < max_rows:
            self._logits = torch.empty(
                max_rows, self.vocab_size, dtype=self.dtype, device=self.device
            )

    def place_of_logits(self, num_rows: int) -> Tensor | None:
        """Where so many rows of logits go; None: to memory of their own."""
        if self._logits is None or num_rows > len(self._logits):
            return None
        return self._logits[:num_rows]
