"""A head that drafts a whole block in one pass: DFlash, and DSpark and DFlash2, which extend it.

The target's states g_t are the head's context. Each layer stores keys and values of

    c_t = hidden_norm(fc(g_t))

as if c_t were its normalised input: RoPE(k_norm(W_k c_t), t) and W_v c_t. The rows of a block, at
positions n, n + 1, …, embed the last known token x_n (the anchor) and then mask tokens. They attend
to the context before n and to the whole block, including later rows. Their KV in the pages is
overwritten once the target has computed these positions.

A mask's row predicts the token at its own position. In heads that predict from the anchor, each row
predicts the next token instead. In DSpark and DFlash2 the logits also depend on the token before:
see `chain.py`. The layers of DFlash2 convolve the rows of a block: see `parts/convolved.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from ..attention import ForwardBatch, PagedAttention, Rope
from ..weights import Change, Layered, Linear
from .chain import Chain, ConfidenceHead
from .config import BlockConfig
from .head import Head


@dataclass(frozen=True, slots=True)
class Context(Layered):
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
        chain: Chain | None,
        confidence: ConfidenceHead | None,
        **layers: Any,
    ) -> None:
        """`layers` as in Head; `context` has an entry for each of them."""
        super().__init__(**layers)
        self.kind = config.kind
        self.hidden_norm = hidden_norm
        self.context = list(context)
        self.mask_token_id = config.mask_token_id
        # Rows of a block before the first that predicts a draft.
        self.num_leading_rows = 0 if config.predicts_from_anchor else 1
        self.max_drafts = config.size - self.num_leading_rows
        self.embedding_scale = config.embedding_scale
        self.logit_scale, self.softcap = config.logit_scale, config.softcap
        self.chain = chain
        self.confidence = confidence

    def change_linears(self, change: Change) -> None:
        super().change_linears(change)
        self.context = [layer.changed(change) for layer in self.context]

    def read(self, taps: Tensor, batch: ForwardBatch) -> None:
        """Store keys and values of the target's states. Shape: [T, num_taps, target's hidden]."""
        c = rms_norm(self.fc(taps.flatten(1)), self.hidden_norm)
        for layer in self.context:
            layer.attention.store(layer.kv(c), 0, layer.rope, layer.head_norms, batch)

    def __call__(self, input_ids: Tensor, batch: ForwardBatch, predicting: Tensor) -> Tensor:
        """The normalised states h of the predicting rows. Shape: [T], [N] -> [N, hidden]."""
        x = F.embedding(input_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        self.through_blocks(x, None, batch)
        return rms_norm(x, self.norm, predicting)

    def logits(self, h: Tensor) -> Tensor:
        """Of states h, before the chain. Shape: [N, hidden] -> [N, V']."""
        logits = self.output_layer(h)
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        return logits
