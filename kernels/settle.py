"""K4, for `block`: how many drafts stand, once K3 has read what was left open."""

import torch
import triton
import triton.language as tl

from outrider.kernels.decide import Plan, accept_words_reference
from outrider.kernels.drafts import Drafts
from outrider.kernels.philox import FIXED_ONE, exp, philox, uniform, uniform_reference
from outrider.kernels.sampling import Rule, Sampling


def accept_blocks_reference(
    plan: Plan,
    mass: torch.Tensor,
    drafts: Drafts,
    sampling: Sampling,
    anchor: torch.Tensor,
    words: torch.Tensor | None,
) -> torch.Tensor:
    """Accepted drafts once Z is known: of `block`, the last i with u_i <= h_i. Shape: [B]."""
    accepted = plan.num_accepted.long()
    k_max = drafts.token_ids.shape[1]
    if k_max == 0 or not bool((sampling.rule == Rule.BLOCK).any()):
        return accepted
    offset = torch.arange(1, k_max, device=accepted.device)
    u = uniform_reference(accept_words_reference(sampling, anchor, k_max, words))[:, :-1]
    z = mass[:, 1:-1].sum(-1).float() / FIXED_ONE
    h = z / (z + 1.0 - plan.log_scale[:, 1:-1].exp())
    open_rows = ((plan.rows_to_read[:, None] >> offset) & 1).bool()
    open_rows &= (sampling.rule == Rule.BLOCK)[:, None] & (offset > accepted[:, None])
    passed = torch.where(open_rows & ((u <= h) | h.isnan()), offset, 0)
    return torch.maximum(accepted, passed.amax(-1)) if k_max > 1 else accepted


@triton.jit
def accept_blocks(
    accepted, rows_to_read, request, k, num_columns, num_blocks, log_scale_ptr, mass_ptr,
    seed, anchor, words_ptr, NB: tl.constexpr,
):  # fmt: skip
    """Accepted drafts of a `block` request now that Z is known: the last i with u_i <= h_i."""
    lane = tl.arange(0, NB)
    one = tl.full((), 1, tl.int32)
    first = accepted
    for i in range(first + 1, k):
        if ((rows_to_read >> i) & 1) != 0:
            at = request * num_columns + i
            mass = tl.load(mass_ptr + at * num_blocks + lane, mask=lane < num_blocks, other=0)
            z = tl.sum(mass, 0).to(tl.float32) * 9.094947017729282e-13
            h = z / (z + 1.0 - exp(tl.load(log_scale_ptr + at)))
            if words_ptr is None:
                word, _, _, _ = philox(seed, anchor.to(tl.int32), one * (i - 1), one, one - one)
            else:
                at_word = words_ptr + (request * (num_columns + 1) + i - 1) * 4
                word = tl.load(at_word).to(tl.uint32)
            passed = (uniform(word) <= h) | (h != h)
            accepted = tl.where(passed, i, accepted)
    return accepted
