"""Between the token ids of a draft and those of its target."""

import torch
from torch import Tensor

from ..config import DraftVocabulary
from .admission import UnsupportedModelError

_ALIGNED = 64  # rows of logits begin at a multiple of so many


class TokenMap:
    """What a draft reads and draws in terms of the target's ids, which all else uses.

    Its logits are written to their places among the target's, and the others stay -inf. So q is the
    distribution that drafts are drawn from, and every rule is exact with any map. What the draft
    reads is only the context of its guesses.
    """

    def __init__(self, target_ids: Tensor, width: int, read_as: Tensor | None = None) -> None:
        """`width` is that of the target's logits, or more: what is written behind is never drawn.

        Shape: target_ids [V'] int64, the place of each of the draft's logits; read_as [V] int64,
        the draft's id for each of the target's, or None: they are equal.
        """
        self.target_ids, self.width, self.read_as = target_ids, width, read_as
        self._wide: Tensor | None = None  # [most rows so far, width], -inf where nothing is written

    @classmethod
    def of(
        cls, vocabulary: DraftVocabulary, num_logits: int, num_embeddings: int, device: torch.device
    ) -> "TokenMap":
        """For a draft of so many logits and embeddings.

        Raises UnsupportedModelError if the vocabulary is not that of such a model.
        """
        target_ids, read_as = torch.tensor(vocabulary.target_ids), torch.tensor(vocabulary.read_as)
        size, num_own = len(read_as), int(read_as.max()) + 1
        if len(target_ids) != num_logits or num_own > num_embeddings:
            raise UnsupportedModelError(
                f"its vocabulary is of {max(len(target_ids), num_own)} tokens, but it has "
                f"{num_logits} logits and {num_embeddings} embeddings"
            )
        drawn = target_ids[target_ids >= 0]
        if len(drawn) == 0 or int(drawn.max()) >= size or len(drawn.unique()) < len(drawn):
            raise UnsupportedModelError(
                f"its tokens must lead to distinct ones of the target's {size}, and some to any"
            )
        # The others are written behind the target's.
        target_ids = torch.where(target_ids < 0, size, target_ids)
        width = size // _ALIGNED * _ALIGNED + _ALIGNED
        return cls(target_ids.to(device), width, read_as.to(device))

    @property
    def drawn(self) -> Tensor:
        """The draft's own ids of tokens that are the target's, too. Shape: [N]."""
        assert self.read_as is not None
        return (self.target_ids < len(self.read_as)).nonzero().squeeze(1)

    def only(self, rows: Tensor) -> "TokenMap":
        """Of a draft with only these of its logits. Shape: rows [N] int64."""
        return TokenMap(self.target_ids[rows], self.width, self.read_as)

    def read(self, input_ids: Tensor) -> Tensor:
        """The draft's ids of the target's. Shape: [T] -> [T]."""
        return input_ids if self.read_as is None else self.read_as[input_ids]

    def reserve(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """The tensor that `widened` writes, with room for so many rows. Shape: [>= num_rows, V]

        Graphs write to it: for the largest step it must be there before any is captured.
        """
        if self._wide is None or len(self._wide) < num_rows:
            shape = num_rows, self.width
            self._wide = torch.full(shape, -torch.inf, dtype=dtype, device=self.target_ids.device)
        return self._wide

    def widened(self, logits: Tensor) -> Tensor:
        """The draft's logits by the target's ids, valid until the next call. [N, V'] -> [N, V]"""
        wide = self.reserve(len(logits), logits.dtype)
        return wide[: len(logits)].index_copy_(1, self.target_ids, logits.to(wide.dtype))
