"""Mamba2: per value head a matrix S that each row of a sequence decays and adds to.

    v, k, q = silu(convolution of the row and the rows before it, channel by channel, + bias)
    dt      = softplus(dt + dt_bias),    decay = exp(-exp(a_log) dt)
    S       = decay S + k (dt v)^T,      out = S^T q + skip v

Mamba2 calls v, k, q x, B, C, key heads groups, and key_dim the size of its state. A row's channels
are v, k, q of all heads, its scalars dt of each value head. How rows pass is in `state_layer.py`.

dt has no limits: Mamba2's own kernels, with which models are trained and served, set none unless
they are asked to. transformers' path of prompts raises dt to `time_step_min`, which is meant for
random initialisation; its path of one token does not.
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


def _pass_row(state: Tensor, window: Tensor, heads: StateHeads, weights: StateWeights) -> Tensor:
    num_values, repeats = (
        heads.num_value_heads * heads.value_dim,
        heads.num_value_heads // heads.num_key_heads,
    )
    v, kq = convolved_reference(window, weights).tensor_split([num_values])
    v = v.view(heads.num_value_heads, heads.value_dim)
    kq = kq.view(2, heads.num_key_heads, heads.key_dim)
    k, q = kq.repeat_interleave(repeats, 1)[..., None]
    dt = F.softplus(window[-1, heads.num_channels :].float() + weights.dt_bias)
    state *= torch.exp(-weights.a_log.exp() * dt)[:, None, None]
    state += k * (dt[:, None] * v)[:, None]
    out: Tensor = (state * q).sum(1)
    return out if weights.skip is None else out + weights.skip[:, None] * v


mamba2 = partial(pass_rows, pass_row=_pass_row)
mamba2_reference = partial(pass_rows_reference, pass_row=_pass_row)
