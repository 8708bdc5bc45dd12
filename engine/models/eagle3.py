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
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from .attention import PagedAttention, PassContext
from .blocks import Block
from .paged_layers import PagedLayers
from .weights import Linear, packed


class Eagle3Head(PagedLayers):
    """A head over the states, and mostly the embedding, of its target."""

    def __init__(
        self,
        *,
        fc: Linear,
        fc_norms: Sequence[Norm],
        embedding: Tensor,
        hidden_norm: Norm,
        blocks: Sequence[Block],
        norm: Norm,
        head: Linear,
        target_ids: Tensor | None,
        vocab_size: int,
        norm_before_residual: bool,
        norm_output: bool,
    ) -> None:
        """Shape: fc of [hidden, num_taps * target's]; fc_norms none, one of all, or one a tap;
        embedding [V, hidden]; head of [V', hidden]; target_ids [V'] int64 or None: they are equal.
        The first block's mixer reads [e; a].
        """
        self.fc = fc
        self.fc_norms = tuple(fc_norms)
        self.embedding = embedding
        self.hidden_norm = hidden_norm
        self.blocks = list(blocks)
        self.norm = norm
        self.head = head
        self.target_ids = target_ids
        self.vocab_size = vocab_size
        self.norm_before_residual = norm_before_residual
        self.norm_output = norm_output
        self.dtype, self.device = norm.weight.dtype, norm.weight.device
        self._next_norms = [*(block.mixer.norm for block in self.blocks[1:]), None]

    @property
    def hidden_size(self) -> int:
        return len(self.norm.weight)

    @property
    def attentions(self) -> list[PagedAttention]:
        return [block.mixer.attention for block in self.blocks]

    @property
    def weight_bytes(self) -> int:
        """What a draft reads of the weights; `fc` is read once a step."""
        linears = [linear for block in self.blocks for linear in block.linears]
        return sum(linear.weight.num_bytes for linear in (*linears, self.head))

    def pack(self, *, rounds: bool) -> None:
        """Lay the weights out as a CPU reads them best; with `rounds`, in 8 bits if that pays."""
        change = partial(packed, rounds=rounds)
        self.blocks = [block.changed(change) for block in self.blocks]
        self.fc, self.head = change(self.fc), change(self.head)

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
