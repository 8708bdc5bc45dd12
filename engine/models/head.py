"""A head: layers that read the target's hidden states and draft for it."""

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
    """What heads of all kinds have: a projection of the target's states, layers, and logits."""

    kind: str  # as users know it
    lookahead: int = 0  # tokens behind a row's own that its KV depends on
    max_drafts: int | None = None  # in one step; None: as many as wanted

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
        """What a pass reads of the weights; `fc` is read once a step."""
        linears = [linear for block in self.blocks for linear in block.linears]
        return sum(linear.weight.num_bytes for linear in (*linears, self.head))

    @abstractmethod
    def bytes_read(self, num_drafts: int) -> int:
        """What so many drafts read of the weights."""

    def pack(self, *, rounds: bool) -> None:
        """Lay the weights out as a CPU reads them best; with `rounds`, in 8 bits if that pays."""
        change = partial(packed, rounds=rounds)
        self.blocks = [block.changed(change) for block in self.blocks]
        self.fc, self.head = change(self.fc), change(self.head)
