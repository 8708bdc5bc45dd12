"""Blocks between an embedding and an output layer: our decoder, and the heads that draft for it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Normed

from .attention import PagedAttention, PassContext
from .blocks import Block
from .paged_layers import PagedLayers
from .weights import Kept, Linear


class Stack(PagedLayers):
    """Embedding, blocks, norm and output layer, however a model passes its rows through them."""

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
    def weights(self) -> list[Kept]:
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

    def through_blocks(self, x: Tensor, normed: Normed | None, context: PassContext) -> None:
        """Add the outputs of all blocks to x in place. Shape: x, normed [T, hidden]."""
        for block, next_norm in zip(self.blocks, self._next_norms, strict=True):
            normed = block(x, normed, next_norm, context)
