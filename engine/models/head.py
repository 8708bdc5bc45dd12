"""The common part of heads: layers that read the target's hidden states and draft for it."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm

from .attention import PagedAttention
from .blocks import Block
from .paged_layers import PagedLayers
from .weights import Linear, packed


class Head(PagedLayers):
    """All heads have a projection of the target's states, layers, and logits."""

    kind: str  # the name that users know
    lookahead: int = 0  # how many tokens after its own the KV of a row depends on
    max_drafts: int | None = None  # in one step; None: no limit

    def __init__(
        self,
        *,
        fc: Linear,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: Norm,
        head: Linear,
        target_ids: Tensor | None,
        vocab_size: int,
    ) -> None:
        """Shape: fc of [hidden, num_taps * target's]; embedding [V, hidden]; head of [V', hidden];
        target_ids [V'] int64, the target's id of each of its tokens, or None: they are equal.
        """
        self.fc = fc
        self.embedding = embedding
        self.blocks = list(blocks)
        self.norm = norm
        self.head = head
        self.target_ids = target_ids
        self.vocab_size = vocab_size
        self.dtype, self.device = norm.weight.dtype, norm.weight.device
        self._next_norms = [*(block.mixer.norm for block in self.blocks[1:]), None]

    @property
    def hidden_size(self) -> int:
        return len(self.norm.weight)

    @property
    def attentions(self) -> list[PagedAttention]:
        return [block.mixer.attention for block in self.blocks]

    @property
    def weight_formats(self) -> str:
        linears = [linear for block in self.blocks for linear in block.linears]
        formats = {linear.weight.format for linear in (*linears, self.fc, self.head)}
        return ", ".join(sorted(formats - {""}))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads; `fc` is read once a step."""
        linears = [linear for block in self.blocks for linear in block.linears]
        return sum(linear.weight.num_bytes for linear in (*linears, self.head))

    @abstractmethod
    def bytes_read(self, num_drafts: int) -> int:
        """Bytes of weights that are read for this many drafts."""

    def pack(self, *, rounds: bool) -> None:
        """Convert the weights to the fastest format for a CPU; `rounds` allows 8 bits."""
        change = partial(packed, rounds=rounds)
        self.blocks = [block.changed(change) for block in self.blocks]
        self.fc, self.head = change(self.fc), change(self.head)
