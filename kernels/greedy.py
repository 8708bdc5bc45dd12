"""K2, for greedy requests: a row's own token is its argmax, and nothing is left to draw."""

import triton
import triton.language as tl

from outrider.kernels.scan import merge_max


@triton.jit
def greedy_tokens(
    row0, k, logits_ptr, logits_stride, vocab_size, max_ptr, num_blocks, draft_ids_ptr,
    NB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Drafts of a greedy request that stand, the token after them, and whether a row was bad."""
    # Of the rows whose own token is not their draft the first, packed with that token.
    first_failed = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    first_bad = k + 1
    for start in range(0, k + 1, ROWS):
        j = start + tl.arange(0, ROWS)
        row = row0 + j
        token = tl.load(draft_ids_ptr + j, mask=j < k, other=-1)
        row_max, block, bad, _ = merge_max(row, j <= k, max_ptr, num_blocks, NB)
        ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        at = row.to(tl.int64)[:, None] * logits_stride + ids
        inside = (j <= k)[:, None] & (ids < vocab_size)
        x = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
        own = tl.min(tl.where(x == row_max[:, None], ids, 0x7FFFFFFF), 1)
        own = tl.where(bad, 0, own)
        failed = (j <= k) & (own != token)
        packed = (j.to(tl.int64) << 32) | own.to(tl.int64)
        packed = tl.where(failed, packed, 0x7FFFFFFFFFFFFFFF)
        first_failed = tl.minimum(first_failed, tl.min(packed, 0))
        first_bad = tl.minimum(first_bad, tl.min(tl.where(bad & (j <= k), j, k + 1), 0))
    accepted = (first_failed >> 32).to(tl.int32)
    return accepted, first_failed & 0xFFFFFFFF, first_bad <= accepted
