"""Bans tokens by a bitmask: for allowed_token_ids and for grammars."""

import numpy as np
import torch

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from . import cpu
from .edit_rows import EditRows, check_rows
from .token_mask import num_words

_BLOCK = 1024


def apply_bitmask(
    logits: torch.Tensor, rows: EditRows, bitmask: torch.Tensor, vocab_size: int
) -> None:
    """Ban, in place, every token of a row whose bit is not set in bitmask[slot].

    `token_mask.py` describes the layout. Other rows, and ids from vocab_size on, are not touched.

    Parameters
    ----------
    logits
        Shape: [N, V'], float32, float16 or bfloat16, rows may be strided.
    rows
        Their positions do not matter. Shape: [M] each.
    bitmask
        Shape: [S, num_words(vocab_size)] int32.
    vocab_size
        V' may be smaller.
    """
    check_rows(logits, rows)
    assert bitmask.dtype == torch.int32, "bitmask: int32 words expected"
    assert bitmask.shape[1] >= num_words(vocab_size), "bitmask: narrower than the vocabulary"
    vocab_size = min(vocab_size, logits.shape[1])
    if cpu.takes(logits):
        cpu.call("bitmask", logits, rows, (bitmask,), bitmask.shape[1], vocab_size)
    elif not uses_triton(logits):
        apply_bitmask_reference(logits, rows, bitmask, vocab_size)
    elif len(rows.row):
        assert bitmask.stride(1) == 1, "bitmask: the words must be the dense dimension"
        _bitmask_kernel[(len(rows.row), triton.cdiv(vocab_size, _BLOCK))](
            logits, logits.stride(0), vocab_size, rows.row, bitmask, bitmask.stride(0), rows.slot,
            BLOCK=_BLOCK,
        )  # fmt: skip


def apply_bitmask_reference(
    logits: torch.Tensor, rows: EditRows, bitmask: torch.Tensor, vocab_size: int
) -> None:
    octets = bitmask[rows.slot].numpy(force=True).view(np.uint8)  # on a little-endian machine
    is_banned = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little") == 0
    masks = torch.from_numpy(is_banned).to(logits.device)
    for i, mask in zip(rows.row.tolist(), masks, strict=True):
        logits[i, :vocab_size].masked_fill_(mask, -torch.inf)


@triton.jit
def _bitmask_kernel(
    logits_ptr,  # [N, V']
    logits_stride,
    vocab_size,
    row_ptr,  # [M]
    bitmask_ptr,  # [S, words]
    bitmask_stride,
    slot_ptr,  # [M]
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    words_ptr = bitmask_ptr + tl.load(slot_ptr + i) * bitmask_stride
    words = tl.load(words_ptr + ids // 32, mask=inside, other=-1)
    banned = ((words >> (ids % 32)) & 1) == 0
    at = logits_ptr + tl.load(row_ptr + i) * logits_stride + ids
    tl.store(at, -float("inf"), mask=inside & banned)
