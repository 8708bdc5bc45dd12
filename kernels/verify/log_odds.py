"""How sure a draft's distribution is: the log odds of its likeliest token, log(q / (1 - q)).

At the request's temperature, before filters; at temperature 1 if it is greedy. They are known
before the draft is drawn, and do not depend on which token it becomes: so drafts may be left
unverified by them, and every rule stays exact.
"""

import torch

from ..triton_or_none import tl, triton
from .philox import log
from .sampling import Sampling
from .scan import merge_max, merge_totals

LEAST = 2.0**-30  # of the other tokens' mass relative to the likeliest's
_LEAST = tl.constexpr(LEAST)


def keep_log_odds_reference(
    log_odds: torch.Tensor,
    logits: torch.Tensor,
    slot: torch.Tensor,
    offset: torch.Tensor,
    sampling: Sampling,
    vocab_size: int,
) -> None:
    """Keep those of each row; NaN for a row with NaN, inf or no finite logit.

    Shape: log_odds [num_slots, K] float32, logits [N, V], slot, offset [N], sampling [num_slots].
    """
    x = logits[:, :vocab_size].double()
    inv_t = sampling.take(slot.long()).inverse_temperature()[:, None]
    z = torch.exp((x - x.amax(-1, keepdim=True)) * inv_t).sum(-1)  # NaN for a bad row
    log_odds[slot.long(), offset.long()] = -(z - 1).clamp_min(LEAST).log().float()


@triton.jit
def keep_log_odds(block_max, total, temperature, request, slot, step):
    """From what the scan has summed of a draft's row."""
    row_max, bad = merge_max(block_max)
    z = merge_totals(block_max, total, row_max, tl.where(temperature > 0, 1.0 / temperature, 1.0))
    odds = tl.where(bad, float("nan"), -log(tl.maximum(z - 1.0, _LEAST)))
    at = step.log_odds + slot * step.odds_stride + tl.load(step.offset + request)
    tl.store(at, odds)
