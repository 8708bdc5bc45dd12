"""Decoder blocks, their two parts, and stacks of them.

A block is a mixer, which looks at other tokens, and an MLP. Each part gets the residual stream x
and adds its output to it, in place:

    x += part(norm(x))

If the part before has already applied this norm, the result is passed as `normed`. In the same way
a part applies the norm of the next part if that is cheap, and returns the result; otherwise it
returns None. A new kind of layer is a `Part` of this form; a subclass of `LlamaReader` builds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.rope import rope_and_store
from outrider.kernels.model.row_codes import Normed

from .attention import ForwardBatch, PagedAttention, Rope
from .experts import ExpertMLP
from .network import PagedLayers
from .weights import Linear, Part, StoredWeights


@dataclass(slots=True)
class AttentionMixer(Part):
    """Attention with RoPE and, in some families, a norm for each head."""

    norm: Norm
    qkv: Linear  # query heads, then key heads, then value heads
    output: Linear
    attention: PagedAttention
    rope: Rope
    head_norms: tuple[Norm, Norm] | None = None  # of query and key heads

    def __post_init__(self) -> None:
        self.norm = self.qkv.weight.before(self.norm)

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Normed | None:
        # Launched before the product: what reads them does so before it waits for its inputs.
        batch.rotary(self.rope, x.dtype)
        if uses_triton(x):
            batch.items(self.attention)
        qkv = self.qkv.of_normed(x, normed, self.norm)
        query = self.store(qkv, self.attention.num_heads, batch)
        out = self.attention(query, batch)
        return self.output.add_to(x, out.flatten(1), norm=next_norm)

    def store(self, qkv: Tensor, num_heads: int, batch: ForwardBatch) -> Tensor:
        """Store keys and values in the pages; returns the rotated queries, if the rows have any.

        Shape: qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> [T, num_heads, head_dim]
        """
        q_norm, k_norm = self.head_norms or (None, None)
        return rope_and_store(
            qkv,
            *batch.rotary(self.rope, qkv.dtype),
            *self.attention.bound_pages,
            batch.rows.slot_mapping,
            num_heads,
            q_norm,
            k_norm,
            self.attention.k_scale,
            self.attention.v_scale,
        )


@dataclass(slots=True)
class GatedMLP(Part):
    """down(silu(gate(x)) * up(x))."""

    norm: Norm
    gate_up: Linear  # the gate's outputs, then those of `up`
    down: Linear

    def __post_init__(self) -> None:
        self.norm = self.gate_up.weight.before(self.norm)

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Normed | None:
        gated = self.gate_up.of_normed(x, normed, self.norm, gated=True)
        return self.down.add_to(x, gated, norm=next_norm)


@dataclass(slots=True)
class Block:
    """A mixer, then an MLP."""

    mixer: AttentionMixer
    mlp: GatedMLP | ExpertMLP

    def __call__(
        self, x: Tensor, normed: Normed | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Normed | None:
        """Shape: x, normed [T, hidden]; returns next_norm(x) or None."""
        normed = self.mixer(x, normed, self.mlp.norm, batch)
        return self.mlp(x, normed, next_norm, batch)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.linears, *self.mlp.linears

    @property
    def weights(self) -> tuple[StoredWeights, ...]:
        experts = (self.mlp.experts,) if isinstance(self.mlp, ExpertMLP) else ()
        return *(linear.weight for linear in self.linears), *experts

    def changed(self, change: Callable[[Linear], Linear]) -> "Block":
        """The same block with its linear layers replaced."""
        return Block(self.mixer.changed(change), self.mlp.changed(change))


class Stack(PagedLayers):
    """Embedding, blocks, norm and output layer, however a model passes its rows through them."""

    target_ids: Tensor | None = None  # [V'] tokens that the output layer has rows for; None: all
    _wide: Tensor | None = None  # [most rows so far, V], -inf for all other tokens

    def __init__(
        self, embedding: Tensor, blocks: Sequence[Block], norm: Norm, head: Linear
    ) -> None:
        """Shape: embedding [V, hidden]; head of [V', hidden]."""
        self.embedding = embedding
        self.blocks = list(blocks)
        self.norm = norm
        self.head = head
        self.dtype, self.device = norm.weight.dtype, norm.weight.device
        self._next_norms = [*(block.mixer.norm for block in self.blocks[1:]), None]

    @property
    def attentions(self) -> list[PagedAttention]:
        return [block.mixer.attention for block in self.blocks]

    @property
    def linears(self) -> list[Linear]:
        """All linear layers that a pass computes, except those of experts."""
        return [*(linear for block in self.blocks for linear in block.linears), self.head]

    @property
    def weights(self) -> list[StoredWeights]:
        return [*(weight for block in self.blocks for weight in block.weights), self.head.weight]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of few rows reads: all but most of the embeddings."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def weight_formats(self) -> str:
        return ", ".join(sorted({weight.format for weight in self.weights} - {""}))

    def change_linears(self, change: Callable[[Linear], Linear]) -> None:
        """Replace all linear layers, one by one, so that old weights are freed early."""
        for i, block in enumerate(self.blocks):
            self.blocks[i] = block.changed(change)
        self.head = change(self.head)

    def widened(self, logits: Tensor) -> Tensor:
        """The output layer's logits by token id, valid until the next call. [N, V'] -> [N, V]"""
        if self.target_ids is None:
            return logits
        # Graphs write to this tensor: the largest step is rehearsed before any is captured.
        if self._wide is None or len(self._wide) < len(logits):
            self._wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return self._wide[: len(logits)].index_copy_(1, self.target_ids, logits)

    def through_blocks(self, x: Tensor, normed: Normed | None, batch: ForwardBatch) -> None:
        """Add the outputs of all blocks to x in place. Shape: x, normed [T, hidden]."""
        for block, next_norm in zip(self.blocks, self._next_norms, strict=True):
            normed = block(x, normed, next_norm, batch)
