"""Token sequences that the output must not contain: bans the token that would complete one."""

from itertools import pairwise
from typing import NamedTuple

import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows, check_rows

_LANES = 64


class BadWordsState(NamedTuple):
    """For each slot: the tokens of all words in one row, and where each word ends."""

    token_ids: torch.Tensor  # [S, T] int32
    end: torch.Tensor  # [S, W] int32, exclusive
    num_words: torch.Tensor  # [S] int32
    output_start: torch.Tensor  # [S] int64, position of the first output token


def apply_bad_words(
    logits: torch.Tensor, rows: EditRows, bad_words: BadWordsState, token_ids: torch.Tensor
) -> None:
    """Ban, in place, each word's last token if the row's output ends with the rest of the word.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    rows
        Shape: [M] each.
    bad_words
        Shape: [S, ...] each.
    token_ids
        Sequences by slot. Shape: [S, width] int32.
    """
    check_rows(logits, rows)
    if cpu.takes(logits):
        tables = *bad_words, token_ids
        sizes = bad_words.token_ids.shape[1], bad_words.end.shape[1], token_ids.shape[1]
        cpu.call("bad_words", logits, rows, tables, *sizes)
    elif not uses_triton(logits):
        apply_bad_words_reference(logits, rows, bad_words, token_ids)
    elif len(rows.row):
        _bad_words_kernel[(len(rows.row),)](
            logits, logits.stride(0), logits.shape[1], rows, bad_words,
            bad_words.token_ids.stride(0), bad_words.end.stride(0), token_ids, token_ids.stride(0),
            LANES=_LANES,
        )  # fmt: skip


def apply_bad_words_reference(
    logits: torch.Tensor, rows: EditRows, bad_words: BadWordsState, token_ids: torch.Tensor
) -> None:
    for row, slot, position in zip(*(field.tolist() for field in rows), strict=True):
        output = token_ids[slot, int(bad_words.output_start[slot]) : position].tolist()
        ends = [0, *bad_words.end[slot, : int(bad_words.num_words[slot])].tolist()]
        flat = bad_words.token_ids[slot, : ends[-1]].tolist()
        words = (flat[start:end] for start, end in pairwise(ends))
        banned = [
            last
            for *before, last in words
            if last < logits.shape[1] and output[max(0, len(output) - len(before)) :] == before
        ]
        logits[row, banned] = -torch.inf


@triton.jit
def _bad_words_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    width,
    rows,
    bad_words,
    words_stride,
    end_stride,
    token_ids_ptr,  # [S, width]
    token_ids_stride,
    LANES: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(rows.slot + i)
    position = tl.load(rows.position + i)
    num_words = tl.load(bad_words.num_words + slot)
    words_ptr = bad_words.token_ids + slot * words_stride
    end_ptr = bad_words.end + slot * end_stride
    for first in range(0, num_words, LANES):
        word = first + tl.arange(0, LANES)
        exists = word < num_words
        end = tl.load(end_ptr + word, mask=exists, other=1)
        start = tl.load(end_ptr + word - 1, mask=exists & (word > 0), other=0)
        num_before = tl.where(exists, end - start - 1, 0)
        begin = position - num_before
        completes = exists & (begin >= tl.load(bad_words.output_start + slot))
        for j in range(tl.max(num_before, 0)):
            compared = completes & (j < num_before)
            wanted = tl.load(words_ptr + start + j, mask=compared, other=0)
            found = tl.load(
                token_ids_ptr + slot * token_ids_stride + begin + j, mask=compared, other=0
            )
            completes &= wanted == found
        last = tl.load(words_ptr + end - 1, mask=completes, other=width)
        at = logits_ptr + tl.load(rows.row + i) * logits_stride + last
        tl.store(at, -float("inf"), mask=completes & (last < width))
