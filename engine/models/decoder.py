"""Our own decoder: embedding, blocks, norm, output layer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from .attention import ForwardBatch
from .blocks import Block, Stack
from .network import Network, Pass
from .token_map import TokenMap
from .weights import Dense, Linear


class Decoder(Stack, Network):
    """A causal LM made of blocks that our kernels, or their references, compute."""

    embedding_factor = 1.0
    logits_divisor = 1.0
    _taps: Tensor | None = None  # [max_rows, num_taps, hidden]

    def __init__(
        self, embedding: Tensor, blocks: Sequence[Block], norm: Norm, output_layer: Linear
    ) -> None:
        """Shape: embedding [V, hidden]; output_layer of [V, hidden]."""
        super().__init__(embedding, blocks, norm, output_layer)
        self.vocab_size = output_layer.weight.shape[0]

    @property
    def input_embedding(self) -> Tensor:
        return self.embedding

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def products_are_batch_invariant(self) -> bool:
        return all(weight.batch_invariant for weight in self.weights)

    def draft_only(self, token_ids: Tensor) -> None:
        """Keep only these tokens' rows of the output layer; all other logits become -inf.

        Shape: token_ids [V'] int64, each once, as the output layer numbers them.
        """
        weight, bias = self.output_layer.weight, self.output_layer.bias
        assert isinstance(weight, Dense)
        bias = None if bias is None else bias[token_ids]
        self.output_layer = Linear(Dense(weight.matrix[token_ids]), bias)
        whole = self.token_map
        self.token_map = (
            TokenMap(token_ids, self.vocab_size) if whole is None else whole.only(token_ids)
        )

    def embedded(self, input_ids: Tensor) -> Tensor:
        """The residual stream in front of the first block. Shape: [T] -> [T, hidden]."""
        x = F.embedding(input_ids, self.embedding)
        return x if self.embedding_factor == 1 else x.mul_(self.embedding_factor)

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Shape: rows [T, hidden], behind the last norm -> [T, V']"""
        logits = self.output_layer(rows, out=out)
        return logits if self.logits_divisor == 1 else logits.div_(self.logits_divisor)

    def __call__(self, batch: ForwardBatch) -> Pass:
        x = self.embedded(self.own_ids(batch.input_ids))
        taps = self._place_of_taps(x) if self.tapped_layers else None
        x, rows = self.through_layers(x, batch, taps)
        normed = rms_norm(x, self.norm, rows)
        logits = self.logits(normed, self.place_of_logits(len(normed)))
        return Pass(self.widened(logits), taps)

    def through_layers(
        self, x: Tensor, batch: ForwardBatch, taps: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream behind the last block, and which of its rows get logits (None: all).

        Of a pass with prompts it has no other rows, unless heads read them.
        Shape: x [T, hidden], taps [T, num_taps, hidden] -> [T, hidden] or [num_logits, hidden]
        """
        normed, rows = None, batch.logits_rows
        self._tap(-1, x, taps)
        *blocks, last = self.blocks
        *next_norms, _ = self.next_norms()
        for i, (block, next_norm) in enumerate(zip(blocks, next_norms, strict=True)):
            normed = block(x, normed, next_norm, batch)
            self._tap(i, x, taps)
        reads_all = max(self.tapped_layers, default=-1) >= len(blocks)
        if batch.holds_prompt and len(rows) < len(x) and not reads_all:
            return last.of_rows(batch.of_logits(), x, normed, batch), None
        last(x, normed, None, batch)
        self._tap(len(blocks), x, taps)
        if taps is not None and self.num_layers in self.tapped_layers:
            rms_norm(x, self.norm, out=taps[:, self.tapped_layers.index(self.num_layers)])
        return x, rows

    def reserve_taps(self, max_rows: int) -> None:
        if self.tapped_layers and (self._taps is None or len(self._taps) < max_rows):
            shape = max_rows, len(self.tapped_layers), self.embedding.shape[1]
            self._taps = torch.empty(shape, dtype=self.dtype, device=self.device)

    def _place_of_taps(self, x: Tensor) -> Tensor:
        """Shape: x [T, hidden] -> [T, num_taps, hidden]"""
        if self._taps is None or len(x) > len(self._taps):
            return x.new_empty(len(x), len(self.tapped_layers), x.shape[1])
        return self._taps[: len(x)]

    def _tap(self, layer: int, x: Tensor, taps: Tensor | None) -> None:
        """Copy the residual stream after a tapped layer: the next block changes x in place."""
        if taps is not None and layer in self.tapped_layers:
            taps[:, self.tapped_layers.index(layer)] = x
