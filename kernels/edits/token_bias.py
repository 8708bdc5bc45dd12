"""Adds a bias to single tokens' logits (logit_bias), or bans them for a while (min_tokens).

Both are one short list for each request. No token is in it twice, so no two lanes write one logit.
"""

from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows, check_rows

_LANES = 128


class BiasState(NamedTuple):
    """For each slot; entries from num_entries on are ignored."""

    token_ids: torch.Tensor  # [S, E] int32, no token twice in a slot
    bias: torch.Tensor  # [S, E] float32
    banned_until: torch.Tensor  # [S, E] int64: -inf at positions below, `bias` from there on
    num_entries: torch.Tensor  # [S] int32


def apply_token_bias(logits: torch.Tensor, rows: EditRows, token_bias: BiasState) -> None:
    """Add the rows' biases to their logits, or ban the tokens, in place.

    Shape: logits [N, V'], float32, float16 or bfloat16; rows [M] each.
    """
    check_rows(logits, rows)
    if cpu.takes(logits):
        cpu.call("token_bias", logits, rows, token_bias, token_bias.token_ids.shape[1])
    elif not uses_triton(logits):
        apply_token_bias_reference(logits, rows, token_bias)
    elif len(rows.row):
        _token_bias_kernel[(len(rows.row),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            rows,
            token_bias,
            token_bias.token_ids.stride(0),
            LANES=_LANES,
        )


def apply_token_bias_reference(logits: torch.Tensor, rows: EditRows, token_bias: BiasState) -> None:
    num_entries = token_bias.num_entries[rows.slot]
    entry = torch.arange(int(num_entries.max()), device=logits.device)
    ids, bias, banned_until = (
        field[rows.slot, : len(entry)]
        for field in (token_bias.token_ids, token_bias.bias, token_bias.banned_until)
    )
    bias = torch.where(rows.position[:, None] < banned_until, -torch.inf, bias)
    i, entry = ((entry < num_entries[:, None]) & (ids < logits.shape[1])).nonzero(as_tuple=True)
    row, token = rows.row[i], ids[i, entry].long()
    logits[row, token] = (logits[row, token].float() + bias[i, entry]).to(logits.dtype)


@triton.jit
def _token_bias_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    width,
    rows,
    token_bias,
    entries_stride,
    LANES: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(rows.slot + i)
    position = tl.load(rows.position + i)
    logits_ptr += tl.load(rows.row + i) * logits_stride
    num_entries = tl.load(token_bias.num_entries + slot)
    for first in range(0, num_entries, LANES):
        entry = first + tl.arange(0, LANES)
        at = slot * entries_stride + entry
        exists = entry < num_entries
        token = tl.load(token_bias.token_ids + at, mask=exists, other=width)
        exists &= token < width
        bias = tl.load(token_bias.bias + at, mask=exists, other=0.0)
        banned = position < tl.load(token_bias.banned_until + at, mask=exists, other=0)
        logit = tl.load(logits_ptr + token, mask=exists, other=0.0).to(tl.float32)
        logit += tl.where(banned, -float("inf"), bias)  # NaN stays
        tl.store(logits_ptr + token, logit, mask=exists)
