"""Repetition, frequency and presence penalties, counted over each row's own prefix.

    l = l / repetition if l > 0 else l * repetition      if the prefix contains the token
    l = l - frequency * n - presence                     if the output contains it n > 0 times

A table for each slot counts the first `num_counted` tokens. The tokens from there to a row's
position (drafts, and known tokens not counted yet) are compared one by one. So a row is right
however long ago the table was updated, which `count_tokens` does.
"""

from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows, check_rows

_BLOCK = 1024
_LANES = 64


class PenaltyState(NamedTuple):
    """For each slot; without penalties, repetition is 1 and the others are 0."""

    repetition: torch.Tensor  # [S] float32
    frequency: torch.Tensor  # [S] float32
    presence: torch.Tensor  # [S] float32
    seen: torch.Tensor  # [S, vocab_size] int32: 2 * times in the output + (in the prompt)
    num_counted: torch.Tensor  # [S] int64, tokens counted in `seen`: at least the prompt


def apply_penalties(
    logits: torch.Tensor, rows: EditRows, penalties: PenaltyState, token_ids: torch.Tensor
) -> None:
    """Penalise the tokens of the rows' prefixes, in place.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    rows
        Shape: [M] each.
    penalties
        Shape: [S, ...] each.
    token_ids
        Sequences by slot. Shape: [S, width] int32.
    """
    check_rows(logits, rows)
    if cpu.takes(logits):
        tables = *penalties, token_ids
        sizes = penalties.seen.shape[1], token_ids.shape[1]
        cpu.call("penalties", logits, rows, tables, *sizes)
    elif not uses_triton(logits):
        apply_penalties_reference(logits, rows, penalties, token_ids)
    elif len(rows.row):
        vocab_size = min(penalties.seen.shape[1], logits.shape[1])
        _penalties_kernel[(len(rows.row), triton.cdiv(vocab_size, _BLOCK))](
            logits, logits.stride(0), vocab_size, rows, penalties, penalties.seen.stride(0),
            token_ids, token_ids.stride(0),
            BLOCK=_BLOCK,
        )  # fmt: skip


def apply_penalties_reference(
    logits: torch.Tensor, rows: EditRows, penalties: PenaltyState, token_ids: torch.Tensor
) -> None:
    seen = penalties.seen[rows.slot]
    first = penalties.num_counted[rows.slot]
    lag = rows.position - first
    offset = torch.arange(max(0, int(lag.max())), device=logits.device)
    at = (first[:, None] + offset).clamp_max(token_ids.shape[1] - 1)
    uncounted = token_ids[rows.slot[:, None], at].long()
    seen.scatter_add_(1, uncounted, 2 * (offset < lag[:, None]).int())

    i, ids = seen[:, : logits.shape[1]].nonzero(as_tuple=True)
    count, row, slot = seen[i, ids] >> 1, rows.row[i], rows.slot[i]
    logit = logits[row, ids].float()
    repetition = penalties.repetition[slot]
    logit = torch.where(logit > 0, logit / repetition, logit * repetition)
    logit -= penalties.frequency[slot] * count
    logit -= penalties.presence[slot] * (count > 0)
    logits[row, ids] = logit.to(logits.dtype)


def count_tokens(
    penalties: PenaltyState, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Count the known tokens of these slots, so that rows have few left to compare.

    Slots without penalties are left alone. Shape: penalties as above, slots [B] int32, none twice
    of those with penalties; token_ids [S, width] int32, num_tokens [S] int64.
    """
    if not uses_triton(penalties.seen):
        count_tokens_reference(penalties, slots, token_ids, num_tokens)
    elif len(slots):
        _count_kernel[(len(slots),)](
            penalties, penalties.seen.stride(0), slots, token_ids, token_ids.stride(0), num_tokens,
            LANES=_LANES,
        )  # fmt: skip


def count_tokens_reference(
    penalties: PenaltyState, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    for slot in slots.tolist():
        repetition, frequency, presence = (float(field[slot]) for field in penalties[:3])
        if (repetition, frequency, presence) == (1, 0, 0):
            continue
        first, last = int(penalties.num_counted[slot]), int(num_tokens[slot])
        new = token_ids[slot, first:last].long()
        penalties.seen[slot].index_add_(0, new, torch.full_like(new, 2, dtype=torch.int32))
        penalties.num_counted[slot] = last


@triton.jit
def _are_asked(penalties, slot):
    repetition = tl.load(penalties.repetition + slot)
    frequency = tl.load(penalties.frequency + slot)
    return (repetition != 1) | (frequency != 0) | (tl.load(penalties.presence + slot) != 0)


@triton.jit
def _count_kernel(
    penalties,
    seen_stride,
    slot_ptr,  # [B]
    token_ids_ptr,  # [S, width]
    token_ids_stride,
    num_tokens_ptr,  # [S]
    LANES: tl.constexpr,
):
    slot = tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    if _are_asked(penalties, slot):
        last = tl.load(num_tokens_ptr + slot)
        twice = tl.full((LANES,), 2, tl.int32)
        for first in range(tl.load(penalties.num_counted + slot), last, LANES):
            at = first + tl.arange(0, LANES)
            token = tl.load(token_ids_ptr + slot * token_ids_stride + at, mask=at < last, other=0)
            # Added one by one: several lanes may have the same token.
            tl.atomic_add(penalties.seen + slot * seen_stride + token, twice, mask=at < last)
        tl.store(penalties.num_counted + slot, last)


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    vocab_size,
    rows,
    penalties,
    seen_stride,
    token_ids_ptr,  # [S, width]
    token_ids_stride,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(rows.slot + i)
    if _are_asked(penalties, slot):
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        seen = tl.load(penalties.seen + slot * seen_stride + ids, mask=inside, other=0)
        for at in range(tl.load(penalties.num_counted + slot), tl.load(rows.position + i)):
            token = tl.load(token_ids_ptr + slot * token_ids_stride + at)
            seen += tl.where(ids == token, 2, 0)
        penalised = inside & (seen > 0)
        count = seen >> 1
        logit_ptr = logits_ptr + tl.load(rows.row + i) * logits_stride + ids
        logit = tl.load(logit_ptr, mask=penalised, other=0.0).to(tl.float32)
        repetition = tl.load(penalties.repetition + slot)
        logit = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit -= tl.load(penalties.frequency + slot) * count.to(tl.float32)
        logit -= tl.where(count > 0, tl.load(penalties.presence + slot), 0.0)
        tl.store(logit_ptr, logit, mask=penalised)
