"""K1b: a row's state (maximum, log-normaliser, threshold, tie cutoff) from its blocks' stats.

Top-k, top-p (of what top-k leaves) and min-p (relative to the maximum) each keep a prefix of the
order (logit descending, token id ascending), so together they keep the shortest of the three, and
(threshold, cutoff) describes it without any probability being stored.
"""

from typing import NamedTuple

import torch

from outrider.kernels.philox import FIXED_ONE
from outrider.kernels.sampling import STATE_WIDTH, Sampling
from outrider.kernels.scan import BlockStats

_FIRST_CANDIDATES = 1024  # a nucleus is rarely wider; wider ones are sorted in full


class RowStates(NamedTuple):
    state: torch.Tensor  # [N, 4] float32 (max, log_z, threshold, cutoff); log_z NaN: a bad row
    argmax: torch.Tensor  # [N] int32 token id


def row_state_reference(
    logits: torch.Tensor, stats: BlockStats, sampling: Sampling, vocab_size: int
) -> RowStates:
    """States of rows under their own parameters. Shape: logits [N, V], sampling [N]."""
    row_max, block = stats.max.max(-1)
    argmax = stats.argmax.gather(1, block[:, None]).squeeze(1)
    inv_t = sampling.inverse_temperature()
    relative = torch.exp((stats.max - row_max[:, None]) * inv_t[:, None])
    log_z = (stats.total.double() * relative).sum(-1).log().float()
    # Greedy rows need no normaliser, only to be told from bad ones.
    log_z = torch.where(sampling.temperature > 0, log_z, 0.0)
    bad = ~row_max.isfinite()
    state = torch.empty(len(logits), STATE_WIDTH, device=logits.device)
    state[:, 0] = row_max
    state[:, 1] = torch.where(bad, torch.nan, log_z)
    state[:, 2] = -torch.inf
    state[:, 3] = vocab_size
    filtered = (sampling.is_filtered(vocab_size) & ~bad).nonzero().squeeze(-1)
    if len(filtered):
        x = logits[filtered, :vocab_size].float()
        state[filtered] = _filter_reference(x, state[filtered], sampling.take(filtered))
    return RowStates(state, torch.where(bad, 0, argmax).int())


def _filter_reference(x: torch.Tensor, state: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Threshold, cutoff and log_z of filtered rows. Shape: x [F, V] float32, state [F, 4]."""
    vocab_size = x.shape[1]
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocab_size).clamp_max(vocab_size)
    inv_t = sampling.inverse_temperature()[:, None]
    top_p, row_max = sampling.top_p.double()[:, None], state[:, 0, None]
    num_candidates = min(vocab_size, _FIRST_CANDIDATES)
    while True:
        value = x.topk(num_candidates, sorted=True).values  # [F, C], best first
        relative = torch.exp((value - row_max) * inv_t)
        weight = (relative * FIXED_ONE).long()
        rank = torch.arange(num_candidates, device=x.device)
        below_k = rank < top_k[:, None]
        mass = (weight * below_k).sum(-1).double()
        mass = torch.where(top_k < vocab_size, mass, state[:, 1].double().exp() * FIXED_ONE)
        before = (weight.cumsum(-1) - weight).double()
        keep = below_k & ((top_p >= 1) | (before < top_p * mass[:, None]))
        keep &= relative >= sampling.min_p[:, None]
        keep[:, 0] = True
        num_kept = keep.sum(-1, keepdim=True)
        if num_candidates == vocab_size or bool((num_kept < num_candidates).all()):
            break
        num_candidates = vocab_size
    threshold = value.gather(1, num_kept - 1)
    num_ties = num_kept - (value > threshold).sum(-1, keepdim=True)
    tied = x == threshold
    state = state.clone()
    state[:, 1] = ((weight * keep).sum(-1).double() / FIXED_ONE).log().float()
    state[:, 2] = threshold[:, 0]
    cut = (tied.sum(-1, keepdim=True) > num_ties).squeeze(1).nonzero().squeeze(-1)
    if len(cut):
        reached = tied[cut].cumsum(-1) >= num_ties[cut]
        state[cut, 3] = reached.float().argmax(-1).float()
    return state
