"""Verification whose verdict is set beforehand: what a head of random weights is timed with.

Every draft is accepted with the same chance, given that those before it are, so that a step gives
the asked number of tokens on the average: with any k, or with the named k, so that more drafts
bring more tokens. Or the chance is the seed's, so that sequences differ. The kernels run as ever;
then their verdict is replaced.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.scoring import verifier
from outrider.kernels.verify.step import SlotContents

MAX_DRAFTS = 32
SPAN_TOKENS = 64  # after so many, a sequence's chance is that of the other digit of its seed


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


def set_acceptance(tokens_a_step: float, most: int, at_k: int | None = None) -> None:
    """From now on engines of this process verify so; call it before they are made."""
    _set_chances([chance_of(tokens_a_step, at_k or k) for k in range(most + 1)], by_seed=False)


def set_acceptance_by_seed() -> None:
    """Likewise, but a draft of a sequence whose seed ends in the digits ab is accepted with the
    chance a / 10, and with b / 10 in every other SPAN_TOKENS tokens of its text.
    """
    _set_chances([digit / 10 for digit in range(10)], by_seed=True)


def _set_chances(chances: Sequence[float], *, by_seed: bool) -> None:
    """`chances` are by digit of the seed, or else by the number of drafts."""
    verify = verifier.verify
    log_chance = torch.tensor(chances).clamp(1e-6, 1 - 1e-6).log()
    by_device: dict[torch.device, Tensor] = {}

    def verdict(
        logits: Tensor,
        cu_rows: Tensor,
        slots: SlotContents,
        slot: Tensor,
        num_drafts: Tensor,
        k: int,
        *args: Any,
        **more: Any,
    ) -> Tensor:
        batch, common = len(slot), {"k": k, "COLUMNS": 64, "num_warps": 1}
        drafts, anchor = slots.num_tokens.new_empty(batch, k), slots.num_tokens.new_empty(batch)
        at = slots.token_ids, slots.token_ids.stride(0), slots.num_tokens, slot
        if k:
            _drafts_kernel[(batch,)](drafts, anchor, *at, **common)
        out = verify(logits, cu_rows, slots, slot, num_drafts, k, *args, **more)
        if logits.device not in by_device:  # in a warm-up: no copy is captured
            by_device[logits.device] = log_chance.to(logits.device)
        if k:
            _verdict_kernel[(batch,)](
                out, drafts, anchor, num_drafts, slots.sampling.seed, by_device[logits.device],
                *at, **common, BY_SEED=by_seed, SPAN=SPAN_TOKENS,
            )  # fmt: skip
        return out

    verifier.verify = verdict  # type: ignore[assignment]


@triton.jit
def _drafts_kernel(
    drafts_ptr,  # [B, k]
    anchor_ptr,  # [B]
    token_ids_ptr,  # [num_slots, stride]
    token_ids_stride,
    num_tokens_ptr,  # [num_slots]
    slot_ptr,  # [B]
    k,
    COLUMNS: tl.constexpr,
):
    """What verification overwrites. One launch, and one after it for the verdict, so that they add
    next to nothing to the time of a step.
    """
    i = tl.program_id(0)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    anchor = tl.load(num_tokens_ptr + slot)
    column = tl.arange(0, COLUMNS)
    at = token_ids_ptr + slot * token_ids_stride + anchor + column
    tl.store(anchor_ptr + i, anchor)
    tl.store(drafts_ptr + i * k + column, tl.load(at, mask=column < k), mask=column < k)


@triton.jit
def _verdict_kernel(
    out_ptr,  # [B, k + 2]
    drafts_ptr,  # [B, k]
    anchor_ptr,  # [B]
    num_drafts_ptr,  # [B]
    seed_ptr,  # [num_slots]
    log_chance_ptr,  # by the number of drafts, or by a digit of the seed
    token_ids_ptr,  # [num_slots, stride]
    token_ids_stride,
    num_tokens_ptr,  # [num_slots]
    slot_ptr,  # [B]
    k,
    COLUMNS: tl.constexpr,
    BY_SEED: tl.constexpr,
    SPAN: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(slot_ptr + i).to(tl.int64)
    anchor, seed = tl.load(anchor_ptr + i), tl.load(seed_ptr + slot)
    x = anchor * 0x9E3779B1 + seed * 0x85EBCA77
    for _ in tl.static_range(2):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x45D9F3B
    x = x & 0xFFFFFFFF
    uniform = (((x ^ (x >> 16)) & 0xFFFFFF).to(tl.float32) + 0.5) / (1 << 24)
    num_drafts = tl.load(num_drafts_ptr + i)
    entry = num_drafts
    if BY_SEED:
        entry = tl.where(anchor // SPAN % 2 == 0, seed // 10, seed) % 10
    accepted = (tl.log(uniform) / tl.load(log_chance_ptr + entry)).to(tl.int32)
    accepted = tl.minimum(accepted, num_drafts)
    column = tl.arange(0, COLUMNS)
    drafts = tl.load(drafts_ptr + i * k + column, mask=column < k, other=0)
    last = tl.load(out_ptr + i * (k + 2))
    tl.debug_barrier()
    token_ids = tl.where(column < accepted, drafts, tl.where(column == accepted, last, -1))
    tl.store(out_ptr + i * (k + 2) + column, token_ids, mask=column <= k)
    at = token_ids_ptr + slot * token_ids_stride + anchor + column
    tl.store(at, tl.maximum(token_ids, 0).to(tl.int32), mask=column <= k)
    tl.store(num_tokens_ptr + slot, anchor + accepted + 1, mask=anchor > 0)
