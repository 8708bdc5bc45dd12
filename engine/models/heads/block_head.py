"""A head that drafts a whole block in one pass: DFlash, and DSpark, which extends it.

The target's states g_t are the head's context. Each layer stores keys and values of

    c_t = hidden_norm(fc(g_t))

as if c_t were its normalised input: RoPE(k_norm(W_k c_t), t) and W_v c_t. The rows of a block, at
positions n, n + 1, …, embed the last known token x_n (the anchor) and then mask tokens. They attend
to the context before n and to the whole block, including later rows. Their KV in the pages is
overwritten once the target has computed these positions.

A mask's row predicts the token at its own position. In heads that predict from the anchor, each row
predicts the next token instead. A Markov head (DSpark) adds to a draft's logits a term of the token
before it; so q_i depends on x_{i-1} and on no other draft:

    logits_i = lm_head(h_i) + W2 e,    e = W1[x_{i-1}]

A confidence head estimates how likely draft i is accepted if those before it are:
sigmoid(w . [h_i; e] + b).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from ..attention import ForwardBatch, PagedAttention, Rope
from ..weights import Change, Linear
from .config import BlockConfig
from .head import Head


class MarkovHead(NamedTuple):
    """Computes the term that the token before a draft adds to its logits."""

    embedding: Tensor  # [V, r], by the target's ids
    output: Linear  # of [V', r]


class ConfidenceHead(NamedTuple):
    """Estimates how likely a draft is accepted if those before it are."""

    weight: Tensor  # [hidden] or, if it also reads the token before, [hidden + r]; float32
    bias: Tensor  # [1]

    def __call__(self, h: Tensor, previous: Tensor | None) -> Tensor:
        """Shape: h [N, hidden], previous [N, r] -> [N] float32."""
        if previous is not None and len(self.weight) > h.shape[1]:
            h = torch.cat((h, previous), -1)
        return torch.sigmoid(h.float() @ self.weight + self.bias)


class Context(NamedTuple):
    """What stores keys and values of the context for one layer."""

    kv: Linear  # the part of the layer's qkv
    attention: PagedAttention
    rope: Rope
    head_norms: tuple[Norm, Norm] | None


class BlockHead(Head):
    """A head over its target's states that drafts a block of tokens in one pass."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        hidden_norm: Norm,
        context: Sequence[Context],
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        **layers: Any,
    ) -> None:
        """`layers` as in Head; `context` has an entry for each of them."""
        super().__init__(**layers)
        self.kind = "dflash" if markov is None else "dspark"
        self.hidden_norm = hidden_norm
        self.context = list(context)
        self.mask_token_id = config.mask_token_id
        # Rows of a block before the first that predicts a draft.
        self.num_leading_rows = 0 if config.predicts_from_anchor else 1
        self.max_drafts = config.size - self.num_leading_rows
        self.embedding_scale = config.embedding_scale
        self.markov = markov
        self.confidence = confidence

    def change_linears(self, change: Change) -> None:
        super().change_linears(change)
        self.context = [layer._replace(kv=change(layer.kv)) for layer in self.context]
        if self.markov is not None:
            self.markov = self.markov._replace(output=change(self.markov.output))

    def read(self, taps: Tensor, batch: ForwardBatch) -> None:
        """Store keys and values of the target's states. Shape: [T, num_taps, target's hidden]."""
        c = rms_norm(self.fc(taps.flatten(1)), self.hidden_norm)
        for layer in self.context:
            layer.attention.store(layer.kv(c), 0, layer.rope, layer.head_norms, batch)

    def __call__(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """The rows of blocks, before the last norm. Shape: [T] -> [T, hidden]."""
        x = F.embedding(input_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        self.through_blocks(x, None, batch)
        return x

    def states(self, x: Tensor) -> Tensor:
        """The normalised states h of predicting rows. Shape: [N, hidden]."""
        return rms_norm(x, self.norm)
