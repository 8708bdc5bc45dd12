"""An EAGLE-3 head: one decoder layer, as a rule, that reads the target's hidden states.

Row t pairs the target's states g_t with the token behind them, x_{t+1}, and predicts x_{t+2}:

    f = fc(N(g_t))                          in a draft's row: what the row before it recycled
    e = input_layernorm(E[x_{t+1}]),  a = hidden_norm(f)
    r = a if norm_before_residual else f
    u = r + o_proj(attention(q, k, v of [e; a]))
    y = u + mlp(post_attention_layernorm(u))
    logits = lm_head(norm(y)),  recycled = norm(y) if norm_output else y

N is nothing, one norm of the whole, or a norm of each state. EAGLE 3.1 has the last and recycles
normalised. Further layers are ordinary ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from .attention import PassContext
from .head import Head


class Eagle3Head(Head):
    """A head that drafts token by token, over states and mostly the embedding of its target."""

    kind = "eagle3"
    lookahead = 1

    def __init__(
        self,
        *,
        fc_norms: Sequence[Norm],
        hidden_norm: Norm,
        norm_before_residual: bool,
        norm_output: bool,
        **layers: Any,
    ) -> None:
        """`layers` are those of Head; the first block's mixer reads [e; a].

        Shape: fc_norms none, one of all, or one a tap.
        """
        super().__init__(**layers)
        self.fc_norms = tuple(fc_norms)
        self.hidden_norm = hidden_norm
        self.norm_before_residual = norm_before_residual
        self.norm_output = norm_output

    def bytes_read(self, num_drafts: int) -> int:
        return num_drafts * self.weight_bytes

    def fused(self, taps: Tensor) -> Tensor:
        """f of the target's states. Shape: [T, num_taps, target's hidden] -> [T, hidden]."""
        if len(self.fc_norms) == 1:
            return self.fc(rms_norm(taps.flatten(1), self.fc_norms[0]))
        if self.fc_norms:
            each = [rms_norm(taps[:, i], norm) for i, norm in enumerate(self.fc_norms)]
            return self.fc(torch.cat(each, -1))
        return self.fc(taps.flatten(1))

    def __call__(self, f: Tensor, next_ids: Tensor, context: PassContext) -> Tensor:
        """y of every row; f is overwritten. Shape: f [T, hidden], next_ids [T] -> [T, hidden]."""
        e = rms_norm(F.embedding(next_ids, self.embedding), self.blocks[0].mixer.norm)
        a = rms_norm(f, self.hidden_norm)
        normed: Tensor | None = torch.cat((e, a), -1)
        x = a if self.norm_before_residual else f
        for block, next_norm in zip(self.blocks, self._next_norms, strict=True):
            normed = block(x, normed, next_norm, context)
        return x

    def recycled(self, y: Tensor) -> Tensor:
        """f of the next row, in place of y if they are equal. Shape: [N, hidden]."""
        return rms_norm(y, self.norm) if self.norm_output else y

    def logits(self, y: Tensor) -> Tensor:
        """Over the draft's own vocabulary. Shape: [N, hidden] -> [N, V']."""
        return self.head(rms_norm(y, self.norm))
