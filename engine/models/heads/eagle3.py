"""An EAGLE-3 head: usually one decoder layer, which reads the target's hidden states.

Row t pairs the target's states g_t with the next token x_{t+1}, and predicts x_{t+2}:

    f = fc(N(g_t))                          for a draft's row: `recycled` of the row before
    e = input_layernorm(E[x_{t+1}]),  a = hidden_norm(f)
    r = a if norm_before_residual else f
    u = r + o_proj(attention(q, k, v of [e; a]))
    y = u + mlp(post_attention_layernorm(u))
    logits = lm_head(norm(y)),  recycled = norm(y) if norm_output else y

N is the identity, one norm over all states, or a norm for each state. EAGLE 3.1 has the last, and
recycles normalised outputs. Further layers are ordinary decoder layers.

P-EAGLE recycles nothing. All of a step's drafts but the first are predicted by rows of masks, with
f = fc(N(mask_hidden)) and the embedding of a mask token, in one pass after the true rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm

from ..attention import ForwardBatch, KeptRows
from .head import AutoregressiveHead


class Eagle3Head(AutoregressiveHead):
    """A head that drafts token by token, from its target's states and mostly its embedding."""

    def __init__(
        self,
        *,
        fc_norms: Sequence[Norm],
        hidden_norm: Norm,
        norm_before_residual: bool,
        norm_output: bool,
        mask_hidden: Tensor | None = None,
        mask_token_id: int = 0,
        **layers: Any,
    ) -> None:
        """`layers` as in Head; the first block's mixer reads [e; a].

        fc_norms: none, one for all taps, or one for each tap. mask_hidden: [num_taps, target's
        hidden], for a head that drafts in parallel.
        """
        super().__init__(**layers)
        self.fc_norms = tuple(fc_norms)
        self.hidden_norm = hidden_norm
        self.norm_before_residual = norm_before_residual
        self.norm_output = norm_output
        self.mask_token_id = mask_token_id
        self.mask = None if mask_hidden is None else self.fused(mask_hidden[None])  # [1, hidden]
        self.kind = "eagle3" if mask_hidden is None else "p-eagle"

    def fused(self, taps: Tensor) -> Tensor:
        if len(self.fc_norms) == 1:
            return self.fc(rms_norm(taps.flatten(1), self.fc_norms[0]))
        if self.fc_norms:
            each = [rms_norm(taps[:, i], norm) for i, norm in enumerate(self.fc_norms)]
            return self.fc(torch.cat(each, -1))
        return self.fc(taps.flatten(1))

    def __call__(
        self, f: Tensor, next_ids: Tensor, batch: ForwardBatch, kept: KeptRows | None = None
    ) -> Tensor:
        both = f.new_empty(len(f), 2 * self.hidden_size)
        e, a = both.chunk(2, -1)
        norm = self.blocks[0].mixer.norm
        assert norm is not None
        rms_norm(self.embedding, norm, next_ids, out=e)
        rms_norm(f, self.hidden_norm, out=a)
        x = a.contiguous() if self.norm_before_residual else f
        if kept is not None:
            return self.of_rows(kept, x, both, batch)
        self.through_blocks(x, both, batch)
        return x

    def of_masks(self, batch: ForwardBatch) -> Tensor:
        """y of rows that are all masks. Shape: [T, hidden]."""
        assert self.mask is not None
        ids = torch.full_like(batch.input_ids, self.mask_token_id)
        return self(self.mask.repeat(len(ids), 1), ids, batch)

    def recycled(self, y: Tensor) -> Tensor:
        return rms_norm(y, self.norm) if self.norm_output else y

    def logits(self, y: Tensor) -> Tensor:
        return self.output_layer(y, norm=self.norm)
