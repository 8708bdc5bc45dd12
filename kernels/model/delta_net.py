"""Gated delta nets: per value head a matrix S that each row of a sequence decays and corrects.

    q, k, v = silu(convolution of the row and the rows before it, channel by channel)
    q, k    = x / sqrt(sum(x^2) + 1e-6) of each head, q also / sqrt(key_dim)
    decay   = exp(-exp(a_log) softplus(a + dt_bias)),   b = sigmoid(b)
    S       = decay S + k (b (v - (decay S)^T k))^T,    out = S^T q

A row's channels are q, k, v of all heads, its scalars b, then a of each value head. How rows pass
is in `state_layer.py`.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .state_layer import (
    StateHeads,
    StateWeights,
    convolved_reference,
    pass_rows,
    pass_rows_reference,
)

_EPS = 1e-6  # of the norms of q and k


def _pass_row(state: Tensor, window: Tensor, heads: StateHeads, weights: StateWeights) -> Tensor:
    repeats = heads.num_value_heads // heads.num_key_heads
    b, a = window[-1, heads.num_channels :].view(2, -1)
    convolved = convolved_reference(window, weights)
    num_keys = heads.num_key_heads * heads.key_dim
    qk, v = convolved.tensor_split([2 * num_keys])
    qk = qk.view(2, heads.num_key_heads, heads.key_dim)
    qk = qk * torch.rsqrt((qk * qk).sum(2, keepdim=True) + _EPS)
    q, k = qk.repeat_interleave(repeats, 1)[..., None]
    decay = torch.exp(-weights.a_log.exp() * F.softplus(a.float() + weights.dt_bias))
    state *= decay[:, None, None]
    error = v.view(heads.num_value_heads, heads.value_dim) - (state * k).sum(1)
    state += k * (b.sigmoid().float()[:, None] * error)[:, None]
    out: Tensor = (state * (q * heads.key_dim**-0.5)).sum(1)
    return out


delta_net = partial(pass_rows, pass_row=_pass_row)
delta_net_reference = partial(pass_rows_reference, pass_row=_pass_row)
