"""The common part of heads: layers that read the target's hidden states and draft for it."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm

from ..attention import ForwardBatch, KeptRows
from ..blocks import Block, Stack
from ..token_map import TokenMap
from ..weights import Change, Layer, Linear, Weight
from .chain import Chain, ConfidenceHead


class Head(Stack):
    """All heads have a projection of the target's states, layers, and logits."""

    kind: str  # the name that users know
    max_drafts: int | None = None  # in one step; None: no limit
    chain: Chain | None = None  # what makes logits depend on the draft before, if anything does
    confidence: ConfidenceHead | None = None

    def __init__(
        self,
        *,
        fc: Linear,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: Norm,
        output_layer: Linear,
        target_ids: Tensor | None,
        vocab_size: int,
    ) -> None:
        """Shape: fc of [hidden, num_taps * target's]; embedding [V, hidden]; output_layer of
        [V', hidden]; target_ids [V'] int64, the target's id of each of its tokens, or None: they
        are equal.
        """
        super().__init__(embedding, blocks, norm, output_layer)
        self.fc = fc
        self.token_map = None if target_ids is None else TokenMap(target_ids, vocab_size)
        self.vocab_size = vocab_size

    @property
    def hidden_size(self) -> int:
        return len(self.norm.weight)

    @property
    def linears(self) -> list[Layer[Weight]]:
        of_chain = self.chain.linears.values() if self.chain else ()
        return [*super().linears, self.fc, *of_chain]

    def change_linears(self, change: Change) -> None:
        super().change_linears(change)
        self.fc = change(self.fc)
        self.chain = self.chain and self.chain.changed(change)


class AutoregressiveHead(Head):
    """A head whose row for a draft reads the output y of the row before it."""

    lookahead = 1

    @abstractmethod
    def fused(self, taps: Tensor) -> Tensor:
        """f of the target's states. Shape: [T, num_taps, target's hidden] -> [T, hidden]."""

    @abstractmethod
    def __call__(
        self, f: Tensor, next_ids: Tensor, batch: ForwardBatch, kept: KeptRows | None = None
    ) -> Tensor:
        """y of every row, or of these alone; may overwrite f.

        Shape: f [T, hidden], next_ids [T] -> [T, hidden] or [N, hidden]
        """

    @abstractmethod
    def recycled(self, y: Tensor) -> Tensor:
        """f of the next row; may be y itself. Shape: [N, hidden]."""

    @abstractmethod
    def logits(self, y: Tensor) -> Tensor:
        """Logits over the draft's own vocabulary. Shape: [N, hidden] -> [N, V']."""
