"""Decides a row's own token once its state is known, and then its request's outcome.

The own token of a greedy row is its argmax; under `match` it is chosen by the noise of its
position; under `token` it is the draft if that is accepted, and otherwise the recovered token.
Drafts that equal their rows' own tokens are accepted; the first own token that differs ends the
step. The last row of a request to get here emits the outcome, or lists the rows that must be read
again first (finish.py).
"""

from typing import NamedTuple

import torch

from ..triton_or_none import tl, triton
from .decide import BAD, accept_tests
from .match import own_token
from .sampling import BLOCK, store_state
from .step import COLUMNS, emit

_BLOCK = tl.constexpr(BLOCK)


class RowOutcomes(NamedTuple):
    state: torch.Tensor  # [N, 4] float32, for rows that draw
    tests: torch.Tensor  # [B, K + 1, 2] float32: log p(X) / q(X) of each draft, and its u
    own: torch.Tensor  # [B, K + 1] int64 token ids, or BAD, or OPEN
    log_scale: torch.Tensor  # [B, K + 1] float32 log P, for rows to read
    num_open: torch.Tensor  # [B] int32 number of rows to read
    to_read: torch.Tensor  # [B * (K + 1)] int32: request * COLUMNS + offset of rows, in any order
    to_bisect: torch.Tensor  # [B * (K + 1)] int32, likewise
    counters: torch.Tensor  # [B + 2] int32, from 0: lengths of both lists, finished rows a request


@triton.jit
def greedy_token(block_max, row_max, row_ptr, vocab_size, NB: tl.constexpr):
    """The lowest id with the row's maximum."""
    block = tl.min(tl.where(block_max == row_max, tl.arange(0, NB), NB - 1), 0)
    ids = block * _BLOCK + tl.arange(0, _BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where(x == row_max, ids, 0x7FFFFFFF), 0)


@triton.jit
def conclude_row(
    own, is_block, request, offset, k, num_columns, slot, anchor, tokens_ptr, step, rows, out_ptr
):
    """Store a row's own token. The last row of a request emits, or lists the rows to read."""
    column = tl.arange(0, COLUMNS)
    at = request * num_columns
    tl.store(rows.own + at + offset, own)
    tl.debug_barrier()
    num_before = 0
    if k > 0:
        num_before = tl.atomic_add(rows.counters + 2 + request, 1, sem="acq_rel")
    if num_before == k:
        tl.debug_barrier()
        accepted, owns, is_open, log_scale, _u = accept_tests(
            request, k, is_block, num_columns, tokens_ptr, rows
        )
        num_open = tl.sum(is_open.to(tl.int32), 0)
        tl.store(rows.num_open + request, num_open)
        if num_open > 0:
            place = tl.atomic_add(rows.counters, num_open, sem="relaxed")
            place += tl.cumsum(is_open.to(tl.int32), 0) - 1
            tl.store(rows.to_read + place, request * COLUMNS + column, mask=is_open)
            tl.store(rows.log_scale + at + column, log_scale, mask=is_open)
        else:
            last = tl.sum(tl.where(column == accepted, owns, 0), 0)
            emit(
                request, accepted, last, owns == BAD, num_columns, slot, anchor, tokens_ptr, step,
                out_ptr,
            )  # fmt: skip


@triton.jit
def settle_row(
    test, drawn, request, offset, row, row_ptr, state, inv_t, group_max_ptr, num_groups,
    vocab_size, num_columns, slot, position, tokens_ptr, step, sampling, rows,
):  # fmt: skip
    """Write the state of a row that draws, also where a draw keeps it, and test; returns its token.

    `drawn` is the token that recovers the draft, or OPEN.
    """
    row_max, log_z, threshold, cutoff = state
    store_state(rows.state + row * 4, state)
    if step.kept_state is not None:
        kept_row = step.kept_state + slot * step.kept_stride
        store_state(kept_row + tl.load(step.offset + request) * 4, state)
    ratio, u, accepts = test
    at = rows.tests + (request * num_columns + offset) * 2
    tl.store(at, ratio)
    tl.store(at + 1, u)
    rule = tl.load(sampling.rule + slot)
    own = drawn
    if rule == 2:
        own = own_token(
            row_ptr, vocab_size, group_max_ptr, num_groups, row_max, log_z, threshold, cutoff,
            inv_t, tl.load(sampling.seed + slot), position + offset,
        )  # fmt: skip
    elif (rule == 0) & accepts:
        own = tl.load(tokens_ptr + offset).to(tl.int64)
    return tl.where(log_z == log_z, own, BAD)
