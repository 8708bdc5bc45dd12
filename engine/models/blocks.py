"""Blocks, and stacks of them: a model's layers, however it passes its rows through them."""

from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm
from outrider.kernels.model.row_codes import Rows

from .attention import ForwardBatch, KeptRows, PagedAttention
from .network import PagedLayers
from .parts.base import Part
from .slot_state import SlotState
from .weights import Change, Layer, Linear, Weight


class Block:
    """Parts, one after the other: of most models a mixer, which looks at other tokens, then an MLP.

    A block that is alone with its mixer, or its MLP, has one part.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    def __call__(
        self, x: Tensor, normed: Rows | None, next_norm: Norm | None, batch: ForwardBatch
    ) -> Rows | None:
        """As a part's: x passes through the block in place. Shape: x, normed [T, hidden]."""
        next_norms = *(part.norm for part in self.parts[1:]), next_norm
        for part, norm in zip(self.parts, next_norms, strict=True):
            normed = part(x, normed, norm, batch)
        return normed

    def of_rows(
        self, kept: KeptRows, x: Tensor, normed: Rows | None, batch: ForwardBatch
    ) -> Tensor:
        """x behind the block, of these rows alone. Shape: x, normed [T, hidden] -> [N, hidden]

        From its last part on that keeps something of every row, it computes no others.
        """
        num_for_all = max((i for i, part in enumerate(self.parts, 1) if part.keeps_rows), default=0)
        if num_for_all:
            *before, last = self.parts[:num_for_all]
            for part in before:
                normed = part(x, normed, None, batch)
            x = last.of_rows(kept, x, normed, batch)
        else:
            x = x[kept.rows]
        for part in self.parts[num_for_all:]:
            if len(x):
                part(x, None, None, kept.batch)
        return x

    @property
    def mixer(self) -> Part:
        return self.parts[0]

    @property
    def mlp(self) -> Part:
        return self.parts[-1]

    @property
    def linears(self) -> list[Layer[Weight]]:
        """All of its linear layers."""
        return [linear for part in self.parts for linear in part.linears.values()]

    def changed(self, change: Change) -> "Block":
        """The same with its linear layers replaced, one by one in their order."""
        return Block(*(part.changed(change) for part in self.parts))


class Stack(PagedLayers):
    """Embedding, blocks, norm and output layer."""

    def __init__(
        self, embedding: Tensor, blocks: Sequence[Block], norm: Norm, output_layer: Linear
    ) -> None:
        """Shape: embedding [V, hidden]; output_layer of [V', hidden]."""
        self.embedding = embedding
        self.blocks = list(blocks)
        self.norm = norm
        self.output_layer = output_layer
        self.dtype, self.device = embedding.dtype, embedding.device

    @property
    def attentions(self) -> list[PagedAttention]:
        each = (part.attention for block in self.blocks for part in block.parts)
        return [attention for attention in each if attention is not None]

    @property
    def states(self) -> list[SlotState]:
        states = (part.state for block in self.blocks for part in block.parts)
        return [state for state in states if state is not None]

    @property
    def linears(self) -> list[Layer[Weight]]:
        """All linear layers that a pass computes."""
        return [*(each for block in self.blocks for each in block.linears), self.output_layer]

    @property
    def weights(self) -> list[Weight]:
        return [linear.weight for linear in self.linears]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of few rows reads: all but most of the embeddings."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def weight_formats(self) -> str:
        return ", ".join(sorted({weight.format for weight in self.weights} - {""}))

    def change_linears(self, change: Change) -> None:
        """Replace all linear layers, one by one, so that old weights are freed early."""
        for i, block in enumerate(self.blocks):
            self.blocks[i] = block.changed(change)
        self.output_layer = change(self.output_layer)

    def through_blocks(
        self, x: Tensor, normed: Rows | None, batch: ForwardBatch, last: Norm | None = None
    ) -> Rows | None:
        """Add the outputs of all blocks to x in place. Shape: x, normed [T, hidden].

        Returns last(x) if that comes cheaply; otherwise None.
        """
        for block, next_norm in zip(self.blocks, self.next_norms(last), strict=True):
            normed = block(x, normed, next_norm, batch)
        return normed

    def of_rows(
        self, kept: KeptRows, x: Tensor, normed: Rows | None, batch: ForwardBatch
    ) -> Tensor:
        """x behind all blocks, of these rows alone: the last block computes few others.

        Shape: x, normed [T, hidden] -> [N, hidden]
        """
        *blocks, last = self.blocks
        for block, next_norm in zip(blocks, self.next_norms(), strict=False):
            normed = block(x, normed, next_norm, batch)
        return last.of_rows(kept, x, normed, batch)

    def next_norms(self, last: Norm | None = None) -> list[Norm | None]:
        """The norm behind each block: that of the next block, or the last."""
        return [*(block.parts[0].norm for block in self.blocks[1:]), last]
