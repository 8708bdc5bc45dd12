"""Verification whose verdict is set beforehand: what a head of random weights is timed with.

Every draft stands with the same chance, given that those before it do, so that a step gives the
asked number of tokens on the average. The kernels run as ever; then their verdict is replaced.
"""

from typing import Any

import torch
import triton
import triton.language as tl
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
        batch, k = ids.shape
        _verdict_kernel[(batch,)](
            verified.token_ids,
            verified.num_tokens,
            ids,
            ids.stride(0),
            num_drafts,
            args[3],
            args[2].seed,
            by_device[logits.device],
            k,
            COLUMNS=64,
            num_warps=1,
        )
        return verified

    verifier.verify = verdict  # type: ignore[assignment]


@triton.jit
def _verdict_kernel(
    token_ids_ptr,  # [B, k + 1]
    num_tokens_ptr,  # [B]
    ids_ptr,  # [B, k], the drafts
    ids_stride,
    num_drafts_ptr,  # [B]
    anchor_ptr,  # [B]
    seed_ptr,  # [B]
    log_chance_ptr,  # [k + 1] by the number of drafts
    k,
    COLUMNS: tl.constexpr,
):
    """One launch, so that it adds next to nothing to the time of a step."""
    i = tl.program_id(0)
    x = tl.load(anchor_ptr + i).to(tl.int64) * 0x9E3779B1 + tl.load(seed_ptr + i) * 0x85EBCA77
    for _ in tl.static_range(2):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x45D9F3B
    x = x & 0xFFFFFFFF
    uniform = (((x ^ (x >> 16)) & 0xFFFFFF).to(tl.float32) + 0.5) / (1 << 24)
    num_drafts = tl.load(num_drafts_ptr + i)
    stand = (tl.log(uniform) / tl.load(log_chance_ptr + num_drafts)).to(tl.int32)
    stand = tl.minimum(stand, num_drafts)
    column = tl.arange(0, COLUMNS)
    drafts = tl.load(ids_ptr + i * ids_stride + column, mask=column < k, other=0)
    last = tl.load(token_ids_ptr + i * (k + 1))
    token_ids = tl.where(column < stand, drafts, tl.where(column == stand, last, -1))
    tl.store(token_ids_ptr + i * (k + 1) + column, token_ids, mask=column <= k)
    tl.store(num_tokens_ptr + i, stand + 1)
