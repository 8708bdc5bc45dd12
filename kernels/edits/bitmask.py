"""Bans tokens by a bitmask: for allowed_token_ids and for grammars."""

import numpy as np
import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows
from .token_mask import num_words

_BLOCK = 1024


def apply_bitmask(
    logits: torch.Tensor,
    row: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_row: torch.Tensor,
    vocab_size: int,
) -> None:
    """Set logits[row[i]] to -inf, in place, wherever bitmask[bitmask_row[i]] has no bit set.

    `token_mask.py` tells the layout. Other rows, and ids from vocab_size on, are not touched.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    row
        Shape: [M] int64, no row twice.
    bitmask
        Shape: [R, num_words(vocab_size)] int32.
    bitmask_row
        Shape: [M] int64; rows may share a mask.
    vocab_size
        V' may be smaller.
    """
    assert bitmask.dtype == torch.int32, "bitmask: int32 words expected"
    assert bitmask.shape[1] >= num_words(vocab_size), "bitmask: narrower than the vocabulary"
    vocab_size = min(vocab_size, logits.shape[1])
    if cpu.takes(logits):
        rows = EditRows(row, bitmask_row, bitmask_row)  # positions do not matter
        cpu.call("bitmask", logits, rows, (bitmask,), bitmask.shape[1], vocab_size)
    elif not uses_triton(logits):
        apply_bitmask_reference(logits, row, bitmask, bitmask_row, vocab_size)
    elif len(row):
        assert logits.stride(1) == 1, "logits: the vocabulary must be the dense dimension"
        assert bitmask.stride(1) == 1, "bitmask: the words must be the dense dimension"
        _bitmask_kernel[(len(row), triton.cdiv(vocab_size, _BLOCK))](
            logits,
            logits.stride(0),
            vocab_size,
            row,
            bitmask,
            bitmask.stride(0),
            bitmask_row,
            BLOCK=_BLOCK,
        )


def apply_bitmask_reference(
    logits: torch.Tensor,
    row: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_row: torch.Tensor,
    vocab_size: int,
) -> None:
    octets = bitmask[bitmask_row].numpy(force=True).view(np.uint8)  # on a little-endian machine
    is_banned = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little") == 0
    for i, mask in zip(row.tolist(), torch.from_numpy(is_banned).to(logits.device), strict=True):
        logits[i, :vocab_size].masked_fill_(mask, -torch.inf)


@triton.jit
def _bitmask_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    vocab_size,
    row_ptr,  # [M]
    bitmask_ptr,  # [R, words]
    bitmask_stride,
    bitmask_row_ptr,  # [M]
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    words_ptr = bitmask_ptr + tl.load(bitmask_row_ptr + i) * bitmask_stride
    words = tl.load(words_ptr + ids // 32, mask=inside, other=-1)
    banned = ((words >> (ids % 32)) & 1) == 0
    at = logits_ptr + tl.load(row_ptr + i) * logits_stride + ids
    tl.store(at, -float("inf"), mask=inside & banned)
