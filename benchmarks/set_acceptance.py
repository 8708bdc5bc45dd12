"""Verification whose verdict is set beforehand: what a head of random weights is timed with.

Every draft stands with the same chance, given that those before it do, so that a step gives the
asked number of tokens on the average. The kernels run as ever; then their verdict is replaced.
"""

from typing import Any

import torch
from torch import Tensor

from outrider.engine.scoring import verifier
from outrider.kernels.verify.drafts import Verified

MAX_DRAFTS = 32


def chance_of(tokens_a_step: float, k: int) -> float:
    """The a with 1 + a + … + a^k = tokens_a_step, or the nearest in [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(k + 1)) < tokens_a_step:
            low = middle
        else:
            high = middle
    return low


def set_acceptance(tokens_a_step: float, most: int) -> None:
    """From now on engines of this process verify so; call it before they are made."""
    verify = verifier.verify
    chances = [chance_of(tokens_a_step, k) for k in range(most + 1)]
    log_chance = torch.tensor(chances).clamp(1e-6, 1 - 1e-6).log()
    by_device: dict[torch.device, Tensor] = {}

    def verdict(
        logits: Tensor, cu_rows: Tensor, ids: Tensor, num_drafts: Tensor, *args: Any, **more: Any
    ) -> Verified:
        verified = verify(logits, cu_rows, ids, num_drafts, *args, **more)
        if ids.shape[1] == 0:
            return verified
        if logits.device not in by_device:  # in a warm-up: no copy is captured
            by_device[logits.device] = log_chance.to(logits.device)
        anchor, seed = args[3], args[2].seed
        num_drafts = num_drafts.long()
        stand = uniform(anchor, seed).log() / by_device[logits.device][num_drafts]
        stand = torch.minimum(stand.long(), num_drafts)
        column = torch.arange(ids.shape[1] + 1, device=ids.device)
        padded = torch.cat((ids, ids[:, :1]), 1)
        last = verified.token_ids[:, :1]
        token_ids = torch.where(column < stand[:, None], padded, -1)
        token_ids = torch.where(column == stand[:, None], last, token_ids)
        return Verified(token_ids, (stand + 1).int(), verified.is_bad)

    verifier.verify = verdict  # type: ignore[assignment]


def uniform(anchor: Tensor, seed: Tensor) -> Tensor:
    """In (0, 1), by sequence and position. Shape: [B] each."""
    x = (anchor * 0x9E3779B1 + seed * 0x85EBCA77) & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) & 0xFFFFFF).float().add(0.5) / (1 << 24)
