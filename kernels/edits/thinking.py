"""Ends a thought whose tokens are spent: bans every token but the one that closes it.

A table for each slot says how the first `num_counted` tokens leave the budget. The tokens from
there to a row's position (drafts, and known tokens not counted yet) are counted by the kernel. So a
row is right however long ago the table was updated, which `count_thoughts` does.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .edit_rows import EditRows, check_rows

_BLOCK = 4096


class ThinkingState(NamedTuple):
    """A slot's row of the table, in this order."""

    open_id: int  # the token that opens a thought
    close_id: int  # the token that closes it
    num_opening: int  # tokens after the first that open it as well, and are not counted
    num_counted: int  # leading tokens of the sequence, which the next two fields count
    is_open: int  # 1 within a thought
    num_left: int  # tokens that thoughts may still have; below 0 after the end was banned

    def after(self, token_ids: Iterable[int]) -> "ThinkingState":
        """The row once these tokens, which follow the counted ones, are counted too."""
        open_id, close_id, num_opening, num_counted, is_open, num_left = self
        for token_id in token_ids:
            num_counted += 1
            if not is_open:
                is_open = int(token_id == open_id)
                num_left += is_open * num_opening
            elif token_id == close_id:
                is_open = 0
            else:
                num_left -= 1
        return ThinkingState(open_id, close_id, num_opening, num_counted, is_open, num_left)


# Of slots that limit no thoughts: no token is left to count, and no thought is open.
NO_LIMIT = ThinkingState(-1, 0, 0, num_counted=2**62, is_open=0, num_left=0)


def end_thoughts(
    logits: torch.Tensor,
    rows: EditRows,
    thoughts: torch.Tensor,
    token_ids: torch.Tensor,
    vocab_size: int,
) -> None:
    """Ban, in place, all tokens but the closing one in rows within a thought that has none left.

    A row in which the closing token is banned already, or is NaN, stays as it is. Ids from
    vocab_size on are not touched.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided. V' may be smaller than
        vocab_size.
    rows
        Shape: [M] each.
    thoughts
        `ThinkingState` by slot. Shape: [S, 6] int64.
    token_ids
        Sequences by slot. Shape: [S, width] int32.
    """
    check_rows(logits, rows)
    assert thoughts.dtype == torch.int64, "thoughts: int64 fields expected"
    assert thoughts.is_contiguous(), "thoughts: dense rows expected"
    vocab_size = min(vocab_size, logits.shape[1])
    if not uses_triton(logits):  # also on a CPU: mostly, it looks at a few integers
        end_thoughts_reference(logits, rows, thoughts, token_ids, vocab_size)
    elif len(rows.row):
        _thinking_kernel[(len(rows.row),)](
            logits, logits.stride(0), vocab_size, rows, thoughts, token_ids, token_ids.stride(0),
            FIELDS=len(ThinkingState._fields), BLOCK=_BLOCK,
        )  # fmt: skip


def end_thoughts_reference(
    logits: torch.Tensor,
    rows: EditRows,
    thoughts: torch.Tensor,
    token_ids: torch.Tensor,
    vocab_size: int,
) -> None:
    own = thoughts[rows.slot]
    for row, slot, position, fields in zip(*(each.tolist() for each in (*rows, own)), strict=True):
        counted = ThinkingState(*fields)
        state = counted.after(token_ids[slot, counted.num_counted : position].tolist())
        if not state.is_open or state.num_left > 0 or state.close_id >= vocab_size:
            continue
        close = logits[row, state.close_id].clone()
        if close > -torch.inf:
            logits[row, :vocab_size] = -torch.inf
            logits[row, state.close_id] = close


def count_thoughts(
    thoughts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Count the known tokens of these slots, so that rows have few left to count.

    Shape: thoughts and token_ids as above, slots [B] int32, none twice of those with a limit,
    num_tokens [S] int64.
    """
    if not uses_triton(thoughts):
        count_thoughts_reference(thoughts, slots, token_ids, num_tokens)
    elif len(slots):
        _count_kernel[(len(slots),)](
            thoughts, slots, token_ids, token_ids.stride(0), num_tokens,
            FIELDS=len(ThinkingState._fields),
        )  # fmt: skip


def count_thoughts_reference(
    thoughts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    for slot in slots.tolist():
        counted = ThinkingState(*thoughts[slot].tolist())
        new = token_ids[slot, counted.num_counted : int(num_tokens[slot])].tolist()
        thoughts[slot] = torch.tensor(counted.after(new), device=thoughts.device)


@triton.jit
def _after(thoughts_ptr, tokens_ptr, last):
    """`is_open` and `num_left` behind the first `last` tokens of a slot."""
    open_id = tl.load(thoughts_ptr)
    close_id = tl.load(thoughts_ptr + 1)
    num_opening = tl.load(thoughts_ptr + 2)
    is_open = tl.load(thoughts_ptr + 4)
    num_left = tl.load(thoughts_ptr + 5)
    for at in range(tl.load(thoughts_ptr + 3), last):
        token = tl.load(tokens_ptr + at)
        was_open = is_open
        is_open = tl.where(was_open != 0, token != close_id, token == open_id).to(tl.int64)
        num_left += tl.where(was_open != 0, -is_open, is_open * num_opening)
    return is_open, num_left


@triton.jit
def _count_kernel(
    thoughts_ptr,  # [S, FIELDS]
    slot_ptr,  # [B]
    token_ids_ptr,  # [S, width]
    token_ids_stride,
    num_tokens_ptr,  # [S]
    FIELDS: tl.constexpr,
):
    slot = tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    thoughts_ptr += slot * FIELDS
    last = tl.load(num_tokens_ptr + slot)
    if tl.load(thoughts_ptr + 3) < last:
        is_open, num_left = _after(thoughts_ptr, token_ids_ptr + slot * token_ids_stride, last)
        tl.store(thoughts_ptr + 3, last)
        tl.store(thoughts_ptr + 4, is_open)
        tl.store(thoughts_ptr + 5, num_left)


@triton.jit
def _thinking_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    vocab_size,
    rows,
    thoughts_ptr,  # [S, FIELDS]
    token_ids_ptr,  # [S, width]
    token_ids_stride,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(rows.slot + i)
    thoughts_ptr += slot * FIELDS
    tokens_ptr = token_ids_ptr + slot * token_ids_stride
    is_open, num_left = _after(thoughts_ptr, tokens_ptr, tl.load(rows.position + i))
    close_id = tl.load(thoughts_ptr + 1)
    logits_ptr += tl.load(rows.row + i) * logits_stride
    close = tl.load(logits_ptr + close_id, mask=close_id < vocab_size, other=-float("inf"))
    if (is_open != 0) & (num_left <= 0) & (close > -float("inf")):
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            banned = (ids < vocab_size) & (ids != close_id)
            tl.store(logits_ptr + ids, -float("inf"), mask=banned)
