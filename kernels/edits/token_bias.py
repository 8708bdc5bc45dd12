"""Adds a bias to single tokens' logits (logit_bias), or bans them for a while (min_tokens).

Both are one short list for each request. No token is in it twice, so no two lanes write one logit.
A ban ends early where it would leave no token at all: min_tokens does not overrule a grammar whose
text is complete.
"""

from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows, check_rows

_LANES = 128
_BLOCK = 4096


class BiasState(NamedTuple):
    """For each slot; entries from num_entries on are ignored."""

    token_ids: torch.Tensor  # [S, E] int32, no token twice in a slot
    bias: torch.Tensor  # [S, E] float32
    # [S, E] int64: at positions below -inf, if that leaves another token; else `bias`
    banned_until: torch.Tensor
    num_entries: torch.Tensor  # [S] int32


def apply_token_bias(
    logits: torch.Tensor, rows: EditRows, token_bias: BiasState, vocab_size: int
) -> None:
    """Add the rows' biases to their logits, or ban the tokens, in place.

    Shape: logits [N, V'], float32, float16 or bfloat16; rows [M] each. V' may be smaller than
    vocab_size; ids from vocab_size on are not touched.
    """
    check_rows(logits, rows)
    vocab_size = min(vocab_size, logits.shape[1])
    if cpu.takes(logits):
        num_entries = token_bias.token_ids.shape[1]
        cpu.call("token_bias", logits, rows, token_bias, num_entries, vocab_size)
    elif not uses_triton(logits):
        apply_token_bias_reference(logits, rows, token_bias, vocab_size)
    elif len(rows.row):
        _token_bias_kernel[(len(rows.row),)](
            logits, logits.stride(0), vocab_size, rows, token_bias, token_bias.token_ids.stride(0),
            LANES=_LANES, BLOCK=_BLOCK,
        )  # fmt: skip


def apply_token_bias_reference(
    logits: torch.Tensor, rows: EditRows, token_bias: BiasState, vocab_size: int
) -> None:
    num_entries = token_bias.num_entries[rows.slot]
    entry = torch.arange(int(num_entries.max()), device=logits.device)
    ids, bias, banned_until = (
        field[rows.slot, : len(entry)]
        for field in (token_bias.token_ids, token_bias.bias, token_bias.banned_until)
    )
    exists = (entry < num_entries[:, None]) & (ids < vocab_size)
    banned = exists & (rows.position[:, None] < banned_until)
    left = logits[rows.row, :vocab_size] != -torch.inf
    i, entry = banned.nonzero(as_tuple=True)
    left[i, ids[i, entry].long()] = False
    banned &= left.any(dim=1, keepdim=True)
    bias = torch.where(banned, -torch.inf, bias)
    i, entry = exists.nonzero(as_tuple=True)
    row, token = rows.row[i], ids[i, entry].long()
    logits[row, token] = (logits[row, token].float() + bias[i, entry]).to(logits.dtype)


@triton.jit
def _token_bias_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    vocab_size,
    rows,
    token_bias,
    entries_stride,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(rows.slot + i)
    position = tl.load(rows.position + i)
    logits_ptr += tl.load(rows.row + i) * logits_stride
    num_entries = tl.load(token_bias.num_entries + slot)
    ids_ptr = token_bias.token_ids + slot * entries_stride
    until_ptr = token_bias.banned_until + slot * entries_stride
    num_left = 0  # other tokens, counted until there is one; before, less those that are banned
    for first in range(0, num_entries, LANES):
        entry = first + tl.arange(0, LANES)
        token, banned = _banned(ids_ptr, until_ptr, entry, num_entries, position, vocab_size)
        logit = tl.load(logits_ptr + token, mask=banned, other=-float("inf"))
        num_left -= tl.sum((logit != -float("inf")).to(tl.int32))
    first = 0
    while (num_left <= 0) & (first < vocab_size):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
        num_left += tl.sum((logit != -float("inf")).to(tl.int32))
        first += BLOCK
    for first in range(0, num_entries, LANES):
        entry = first + tl.arange(0, LANES)
        token, banned = _banned(ids_ptr, until_ptr, entry, num_entries, position, vocab_size)
        exists = token < vocab_size
        bias_ptr = token_bias.bias + slot * entries_stride
        bias = tl.load(bias_ptr + entry, mask=exists, other=0.0)
        logit = tl.load(logits_ptr + token, mask=exists, other=0.0).to(tl.float32)
        logit += tl.where(banned & (num_left > 0), -float("inf"), bias)  # NaN stays
        tl.store(logits_ptr + token, logit, mask=exists)


@triton.jit
def _banned(ids_ptr, until_ptr, entry, num_entries, position, vocab_size):
    """The tokens of entries, and whether they are banned; where there is none, vocab_size."""
    token = tl.load(ids_ptr + entry, mask=entry < num_entries, other=vocab_size)
    banned = position < tl.load(until_ptr + entry, mask=token < vocab_size, other=0)
    return token, banned
