"""What a draft's logits take from the token before it: the Markov head of DSpark, the candidate
selector of DFlash2; and a head that estimates how likely a draft is accepted.

Both make q_i depend on x_{i-1} and on no other draft. What they need of all drafts of a block is
computed at once; then drafts are drawn one after another.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import Layered, Linear


class Chain(Layered, ABC):
    """Makes the logits of a draft from those of its row and the token before it."""

    @abstractmethod
    def prepared(self, h: Tensor, logits: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
        """What it needs of all drafts. Ids from `vocab_size` on are not drawn.

        Shape: h [k, N, hidden], logits [k, N, V'] -> [k, N, …] each.
        """

    @abstractmethod
    def __call__(self, previous: Tensor, *prepared: Tensor) -> Tensor:
        """The logits of a draft behind these tokens, given what was prepared for it.

        Shape: previous [N], prepared [N, …] each -> [N, V'].
        """


@dataclass(frozen=True, slots=True)
class MarkovHead(Chain):
    """Adds a term of the token before: logits_i + W2 W1[x_{i-1}]."""

    embedding: Tensor  # W1, [V, r], by the target's ids
    output: Linear  # W2, of [V', r]

    def prepared(self, h: Tensor, logits: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
        return (logits,)

    def __call__(self, previous: Tensor, *prepared: Tensor) -> Tensor:
        (logits,) = prepared
        return logits + self.output(F.embedding(previous, self.embedding))


@dataclass(frozen=True, slots=True)
class Selector(Chain):
    """Draws among the candidates of a row, its `top_k` likeliest tokens, by

        score(c) = logits_i[c] + sum of pre[x_{i-1}] (W h_i) suc[c]

    q_i is 0 for all other tokens.
    """

    predecessors: Tensor  # pre, [V, rank]
    successors: Tensor  # suc, [V, rank]
    projection: Linear  # W, of [rank, hidden]
    top_k: int

    def prepared(self, h: Tensor, logits: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
        best, ids = logits[..., :vocab_size].topk(min(self.top_k, vocab_size), -1)
        projected = self.projection(h.flatten(0, 1)).view(*h.shape[:2], 1, -1)
        factors = F.embedding(ids, self.successors).float() * projected.float()
        return best.float(), ids, factors

    def __call__(self, previous: Tensor, *prepared: Tensor) -> Tensor:
        best, ids, factors = prepared
        before = F.embedding(previous, self.predecessors)
        scores = best + (factors * before.float()[:, None]).sum(-1)
        nothing = before.new_full((len(before), len(self.successors)), -torch.inf)
        return nothing.scatter_(1, ids, scores.to(nothing.dtype))


class ConfidenceHead(NamedTuple):
    """Estimates how likely a draft is accepted if those before it are: sigmoid(w [h_i; e] + b)."""

    weight: Tensor  # [hidden] or, if it also reads the token before, [hidden + r]; float32
    bias: Tensor  # [1]
    embedding: Tensor | None  # e by the token before, [V, r]; None: it reads h alone

    def __call__(self, h: Tensor, previous: Tensor) -> Tensor:
        """Shape: h [N, hidden], previous [N] -> [N] float32."""
        if self.embedding is not None:
            h = torch.cat((h, F.embedding(previous, self.embedding)), -1)
        return torch.sigmoid(h.float() @ self.weight + self.bias)
