"""What DSpark and DFlash2 add to a DFlash head, in training; tensors are named as in their files.

The formulas are those of `engine/models/heads/chain.py` and `engine/models/parts/convolved.py`.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NOWHERE = -1e4  # a logit of what is no candidate: finite, because a divergence multiplies it


class Convolution(nn.Module):
    """conv_1(part(conv_0(n))) over the rows of each block, with taps that depend on n."""

    def __init__(self, width: int, num_taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * num_taps * (width // group), bias=False)

    def forward(self, n: Tensor, num_rows: int, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Shape: n [B, A * num_rows, hidden] -> the same."""
        num_taps = self.base_kernel.shape[1]
        delta = self.kernel_projection(n).unflatten(-1, (2, num_taps, -1, 1))

        def convolved(side: int, x: Tensor) -> Tensor:
            blocks = x.unflatten(1, (-1, num_rows))
            out = torch.zeros_like(x)
            for tap in range(num_taps):
                before = F.pad(blocks, (0, 0, tap, 0))[:, :, :num_rows].flatten(1, 2)
                grouped = before.unflatten(-1, (delta.shape[-2], -1))
                out = out + self.base_kernel[side, tap] * before
                out = out + (delta[:, :, side, tap] * grouped).flatten(-2)
            return out

        return convolved(1, part(convolved(0, n)))


class Markov(nn.Module):
    """Adds a term of the token before: logits_i + W2 W1[x_{i-1}]."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, h: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Shape: h [B, A, k, hidden], logits [B, A, k, V'], previous [B, A, k] -> as logits."""
        return logits + cast(Tensor, self.markov_w2(self.markov_w1(previous)))


class SelectorModule(nn.Module):
    """Draws among a row's likeliest tokens, by logits_i[c] + sum of pre[x_{i-1}] (W h_i) suc[c]."""

    def __init__(self, vocab_size: int, width: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self._top_k = top_k

    def forward(self, h: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Shape: as those of `Markov`."""
        best, ids = logits.topk(min(self._top_k, logits.shape[-1]), -1)
        factors = self.hidden_projection(h) * self.predecessor_codebook[previous]
        scores = (self.successor_codebook[ids] @ factors[..., None]).squeeze(-1)
        nothing = torch.full_like(logits, _NOWHERE)
        return nothing.scatter(-1, ids, (best + scores).to(logits.dtype))


class Confidence(nn.Module):
    """Estimates how likely a draft is accepted if those before it are: a logit of that chance."""

    def __init__(self, width: int, rank: int, *, bias: bool) -> None:
        """It reads states and, unless `rank` is 0, what a Markov head has of the token before."""
        super().__init__()
        self.proj = nn.Linear(width + rank, 1, bias=bias)
        self._rank = rank

    def forward(self, h: Tensor, of_previous: Tensor | None) -> Tensor:
        """States do not learn from it. Shape: [B, A, k, …] each -> [B, A, k]."""
        inputs = torch.cat((h, of_previous), -1) if self._rank and of_previous is not None else h
        return cast(Tensor, self.proj(inputs.detach())).squeeze(-1)
