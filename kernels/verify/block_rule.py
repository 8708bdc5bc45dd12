"""How many drafts are accepted by the rule `block`, once the open rows have been read."""

import torch

from ..triton_or_none import tl, triton
from .decide import Decision, accept_words_reference
from .philox import FIXED_ONE, exp, of_fixed, uniform_reference
from .sampling import Rule
from .step import COLUMNS, GatheredStep


def accept_blocks_reference(
    step: GatheredStep, decision: Decision, mass: torch.Tensor
) -> torch.Tensor:
    """Accepted drafts once Z is known: for `block`, the last i with u_i <= h_i. Shape: [B]."""
    accepted = decision.num_accepted
    k_max = step.draft_ids.shape[1] - 1
    is_block = step.sampling.rule == Rule.BLOCK
    if k_max < 2 or not bool(is_block.any()):
        return accepted
    offset = torch.arange(1, k_max, device=accepted.device)
    u = uniform_reference(accept_words_reference(step))[:, :-1]
    z = mass[:, 1:-1].sum(-1).clamp_min(0).float() / FIXED_ONE  # 0 of a bad row
    h = z / (z + 1.0 - decision.log_scale[:, 1:-1].exp())
    open_rows = ((decision.rows_to_read[:, None] >> offset) & 1).bool()
    open_rows &= is_block[:, None] & (offset > accepted[:, None])
    passed = torch.where(open_rows & ((u <= h) | h.isnan()), offset, 0)
    return torch.maximum(accepted, passed.amax(-1))


@triton.jit
def accept_blocks(accepted, is_open, log_scale, u, k, num_blocks, mass_ptr, NB: tl.constexpr):
    """Accepted drafts of a `block` request, once Z is known: the last i with u_i <= h_i."""
    lane = tl.arange(0, NB)
    column = tl.arange(0, COLUMNS)
    for i in range(accepted + 1, k):
        here = column == i
        if tl.sum((is_open & here).to(tl.int32), 0) > 0:
            mass = tl.load(mass_ptr + i * num_blocks + lane, mask=lane < num_blocks, other=0)
            z = of_fixed(tl.sum(mass, 0))
            h = z / (z + 1.0 - exp(tl.sum(tl.where(here, log_scale, 0.0), 0)))
            passed = (tl.sum(tl.where(here, u, 0.0), 0) <= h) | (h != h)
            accepted = tl.where(passed, i, accepted)
    return accepted
