"""How far the draft's distribution q is from the target's p, with the gradient written out.

    forward_kl       sum p log(p / q)       d/dlogits = q - p
    total_variation  1/2 sum |p - q|        d/dlogits = 1/2 q (s - sum q s),  s = sign(q - p)

1 - total_variation is the chance that a drawn draft is accepted.

Only the likeliest tokens S of p are known, and the mass P of all others together. We assume that
the others share P as q shares its own mass Q outside S: p(x) = q(x) P / Q. Then each sum has the
terms of S and one more, which depends on P and Q alone. Autograd would need a dozen copies of
[N, V]; these formulas need none.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .recipe import Divergence

_CHUNK_ROWS = 4096
_LEAST_MASS = 1e-6

# p, q: [N, K + 1], the tokens of S and then the rest -> loss [N], factor [N, K + 1]: the gradient
# of a logit is q(x) times its own factor.
Formula = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_kl(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return (p * (p / q).log()).sum(-1), 1 - p / q


def total_variation(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    sign = (q - p).sign()
    return (p - q).abs().sum(-1) / 2, (sign - (q * sign).sum(-1, keepdim=True)) / 2


DIVERGENCES: dict[Divergence, Formula] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
}


def mean_divergence(
    name: Divergence, top_ids: Tensor, top_log_probs: Tensor, logits: Tensor, weight: float = 1.0
) -> Tensor:
    """Mean over N rows, times `weight`. Call `backward` on it as it is: nothing may come after it.

    Shape:
        top_ids, top_log_probs: [N, K], the target's likeliest tokens
        logits: [N, V], the draft's
    """
    loss: Tensor = _MeanDivergence.apply(name, top_ids, top_log_probs, logits, weight)  # type: ignore[no-untyped-call]
    return loss


class _MeanDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: Divergence,
        top_ids: Tensor,
        top_log_probs: Tensor,
        logits: Tensor,
        weight: float,
    ) -> Tensor:
        weight /= max(1, len(logits))
        if logits.is_cuda:
            fused = _fused_loss_and_gradient()
            # As a tensor: a number would be compiled in.
            scale = torch.full((), weight, device=logits.device)
            loss, grad = fused(name, top_ids, top_log_probs, logits, scale)
        else:
            loss, grad = torch.zeros(()), torch.empty_like(logits)
            for first in range(0, len(logits), _CHUNK_ROWS):
                rows = slice(first, first + _CHUNK_ROWS)
                of_rows, grad[rows] = _loss_and_gradient(
                    name, top_ids[rows], top_log_probs[rows], logits[rows], weight
                )
                loss += of_rows
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, Tensor, None]:
        # Not scaled by grad_outputs, which is 1: that would go through [N, V] once more.
        (grad,) = ctx.saved_tensors
        return None, None, None, grad, None


def _loss_and_gradient(
    name: Divergence, top_ids: Tensor, top_log_probs: Tensor, logits: Tensor, weight: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The divergence summed over rows, and its gradient [N, V] in the logits' dtype."""
    ids = top_ids.long()
    log_sum = logits.float().logsumexp(-1, keepdim=True)
    top_q = (logits.gather(1, ids).float() - log_sum).exp()
    p, q = _with_rest(top_log_probs.float().exp()), _with_rest(top_q)
    loss, factor = DIVERGENCES[name](p, q)
    factor = factor * weight
    grad = ((logits.float() - log_sum).exp() * factor[:, -1:]).to(logits.dtype)
    return loss.sum() * weight, grad.scatter(1, ids, (q * factor)[:, :-1].to(logits.dtype))


@functools.cache
def _fused_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    """Reads the logits twice and writes a gradient; op by op, six times as much is moved."""
    return torch.compile(_loss_and_gradient)


def _with_rest(top: Tensor) -> Tensor:
    """[N, K] probabilities with what is missing to 1 behind them."""
    rest = (1 - top.sum(-1, keepdim=True)).clamp_min(_LEAST_MASS)
    return torch.cat((top.clamp_min(_LEAST_MASS * _LEAST_MASS), rest), dim=-1)


@torch.no_grad()
def agreement(top_ids: Tensor, top_log_probs: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How often the first choices agree, and how often a drawn draft is accepted at least.

    Both are sums over the rows.

    Shapes as in `mean_divergence`, each row's tokens likeliest first.
    """
    same = (top_ids[:, 0] == logits.argmax(-1)).sum()
    q = logits.float().softmax(-1).gather(1, top_ids.long())
    return same, torch.minimum(top_log_probs.float().exp(), q).sum()
