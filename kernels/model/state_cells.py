"""Rows of layers with a state on their way through it, 16 at once: a cell. See `state_layer.py`.

Cells lie at absolute positions, and S is kept behind whole cells alone. With S in front of a cell,
and G the sum of log(decay) in it up to a row:

    U_i = b_i (v_i - e^(G_i) S^T k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) U_j)
    out_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) U_j
    S behind it = e^(G_last) S + sum over j of e^(G_last - G_j) k_j U_j^T

The first line, of a delta net, solves a system: U = T b X with x_i = v_i - e^(G_i) S^T k_i. T does
not depend on S, so `cells_kernel` computes it for all cells at once, and what follows from it:

    out = e^G S^T q + R X,    R = P T b,  P_ij = e^(G_i - G_j) (q_i . k_j) for j <= i
    S behind it = e^(G_last) S + K^T U',    U' = T' X,  T'_ij = e^(G_last - G_i) (T b)_ij

Then cells pass one by one, and each has S^T k and S^T q to compute, then R X and T' X, neither of
which waits for the other. In Mamba2 X is v, U_i = b_i v_i, and b is dt: R = P b, and U' takes a
factor of each row in place of T'. A row takes nothing from rows behind it but products with 0, and
every product has one shape, however many rows of a cell are there. So its bits depend on its
sequence alone. But a draft that is not a number spoils what its pass gives for the rows beside it,
though no state: as with the KV beside it, the sequence then starts over without drafts.

q and k enter products as they were convolved, which is exact; their norms, which Mamba2 does not
have, are factors. What is float32 enters as the sum of two bfloat16.

`state_warpgroups.py` passes cells on Hopper GPUs, with sums in the order of those here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import INTERPRET
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .state_rows import remember, rows_of, sequence_of

CELL = 16  # rows; those of an MMA
_COLUMNS = 16  # of S in a program that goes cell by cell, a warp for every 16
_STAGES = 2  # cells whose rows are on their way


@triton.jit
def halves(x):
    """Two bfloat16 whose sum is x but for 2^-17 of it. The first is cut off, not rounded: a GPU
    does this four times as fast as it converts numbers one by one.
    """
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    low = x - (bits & -65536).to(tl.float32, bitcast=True)
    return high, low.to(tl.bfloat16)


@triton.jit
def _times(x, y, total, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """total + x y, of float32 x; y is exact in DTYPE."""
    y = y.to(DTYPE)
    if SPLIT:
        high, low = halves(x)
        total = tl.dot(high.to(DTYPE), y, total, input_precision="ieee")
        total = tl.dot(low.to(DTYPE), y, total, input_precision="ieee")
    else:
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@triton.jit
def _times_both(x, y, y_low, total, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """total + x (y + y_low), of float32 x; y and y_low, if there is one, are exact in DTYPE."""
    total = _times(x, y, total, DTYPE, SPLIT)
    if SPLIT:
        high, _ = halves(x)
        total = tl.dot(high.to(DTYPE), y_low.to(DTYPE), total, input_precision="ieee")
    return total


@triton.jit
def _store(cell_ptr, WHICH: tl.constexpr, x, CELL: tl.constexpr, SPLIT: tl.constexpr):
    """Store a matrix of a cell, if SPLIT as halves, one behind the other."""
    i = tl.arange(0, CELL)
    at = cell_ptr + WHICH * CELL * CELL
    if SPLIT:
        at = at.to(tl.pointer_type(tl.bfloat16)) + i[:, None] * CELL + i[None, :]
        high, low = halves(x)
        tl.store(at, high)
        tl.store(at + CELL * CELL, low)
    else:
        tl.store(at + i[:, None] * CELL + i[None, :], x)


@triton.jit
def _load_transposed(cell_ptr, WHICH: tl.constexpr, CELL: tl.constexpr, SPLIT: tl.constexpr):
    """What `_store` stored; without halves, twice the whole."""
    i = tl.arange(0, CELL)
    at = cell_ptr + WHICH * CELL * CELL
    if SPLIT:
        at = at.to(tl.pointer_type(tl.bfloat16)) + i[None, :] * CELL + i[:, None]
        high, low = tl.load(at), tl.load(at + CELL * CELL)
    else:
        high = tl.load(at + i[None, :] * CELL + i[:, None])
        low = high
    return high, low


@triton.jit(do_not_specialize=["num_seqs", "num_cells"])
def cells_kernel(
    cells_ptr,  # [num_cells, VALUE_HEADS, 2 * CELL + 8, CELL]
    convolved_ptr,  # [T + num_seqs * RING, channels]
    factors_ptr,  # [T + num_seqs * RING, 2 * (KEY_HEADS + VALUE_HEADS)]
    x_ptr,  # [T, channels]
    x_stride,
    scalars_ptr,  # [T, WIDTH - channels]
    scalars_stride,
    ring_ptr,  # [num_slots, RING, WIDTH]
    ring_stride,
    starts_ptr,  # [num_seqs]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_rows_stride,
    num_tokens_ptr,  # [num_slots]
    num_seqs,
    num_cells,
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CORRECTS: tl.constexpr,
    CELL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: what a head's rows of a cell take from each other.

    Writes T' and R; then, of each row, the factors of S^T k and of S^T q; and e^(G_last). In Mamba2
    it writes no T', and U' = factor v in place of the factors of S^T k.

    Behind the programs of all cells there is one for each sequence and head that keeps last rows:
    the kernel before has read the ring, and this saves a launch.
    """
    start_next_kernel(DEPENDENT)
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * NUM_KEYS + VALUE_HEADS * VALUE_DIM
    FACTORS: tl.constexpr = 2 * (KEY_HEADS + VALUE_HEADS)
    head, index = tl.program_id(0), tl.program_id(1)
    if index >= num_cells:
        wait_for_inputs(DEPENDENT)
        seq = index - num_cells
        remember(
            seq, head, tl.load(starts_ptr + seq), x_ptr, x_stride, scalars_ptr, scalars_stride,
            ring_ptr, ring_stride, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr,
            num_rows_stride, num_tokens_ptr, RING, CHANNELS, WIDTH, VALUE_HEADS, CELL,
        )  # fmt: skip
        return
    seq, part = sequence_of(index, bounds_ptr, num_seqs, CELL, EXTRA)
    begin, _, _, seq_len = rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr)
    wait_for_inputs(DEPENDENT)
    start = tl.load(starts_ptr + seq)
    low = start + part * CELL
    if low < seq_len:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i, d = tl.arange(0, CELL), tl.arange(0, BLOCK_K)
        is_there = low + i < seq_len
        row = begin + seq * RING + (low + i - start)
        at = convolved_ptr + row[:, None] * CHANNELS + key_head * KEY_DIM + d[None, :]
        mask = is_there[:, None] & (d < KEY_DIM)[None, :]
        q = tl.load(at, mask=mask, other=0.0).to(DTYPE)
        k = tl.load(at + NUM_KEYS, mask=mask, other=0.0).to(DTYPE)
        at = factors_ptr + row * FACTORS
        norm_q = tl.load(at + key_head, mask=is_there, other=0.0)
        norm_k = tl.load(at + KEY_HEADS + key_head, mask=is_there, other=0.0)
        log_decay = tl.load(at + 2 * KEY_HEADS + head, mask=is_there, other=0.0)
        b = tl.load(at + 2 * KEY_HEADS + VALUE_HEADS + head, mask=is_there, other=0.0)
        # Below e^-100 nothing is left anyway, and the difference of two infinities is no number.
        g = tl.cumsum(tl.where(log_decay < -100.0, -100.0, log_decay), 0)
        g_last = tl.sum(tl.where(i == CELL - 1, g, 0.0), 0)
        is_behind = i[:, None] >= i[None, :]
        decay = tl.exp(tl.where(is_behind, g[:, None] - g[None, :], 0.0)) * norm_k[None, :]
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * decay
        cell_ptr = cells_ptr + (index.to(tl.int64) * VALUE_HEADS + head) * (2 * CELL + 8) * CELL
        of_u = tl.exp(g_last - g) * norm_k
        p = tl.where(is_behind, norm_q[:, None] * qk, 0.0)
        if CORRECTS:
            kk = tl.dot(k, tl.trans(k), input_precision="ieee") * decay
            a = tl.where(i[:, None] > i[None, :], (b * norm_k)[:, None] * kk, 0.0)
            # (1 + a) t = 1, row by row: each needs those before it.
            t = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            a_by_column = tl.trans(a)
            for r in range(1, CELL):
                a_r = tl.sum(tl.where(i[None, :] == r, a_by_column, 0.0), 1)
                t_r = tl.sum(a_r[:, None] * t, 0)
                t = tl.where(i[:, None] == r, t - t_r[None, :], t)
            t *= b[None, :]
            y, y_low = t, t
            if SPLIT:
                y, y_low = halves(t)
            nothing = tl.zeros([CELL, CELL], tl.float32)
            _store(cell_ptr, 0, t * of_u[:, None], CELL, SPLIT)
            _store(cell_ptr, 1, _times_both(p, y, y_low, nothing, DTYPE, SPLIT), CELL, SPLIT)
            factor = tl.exp(g) * norm_k
        else:
            _store(cell_ptr, 1, p * b[None, :], CELL, SPLIT)
            factor = b * of_u
        at = cell_ptr + 2 * CELL * CELL + i
        tl.store(at, factor)
        tl.store(at + CELL, tl.exp(g) * norm_q)
        tl.store(at + 2 * CELL, tl.exp(g_last + tl.zeros([CELL], tl.float32)))


@triton.jit
def cell_by_cell_kernel(
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM]
    convolved_ptr,  # [T + num_seqs * RING, channels]
    cells_ptr,  # [num_cells, VALUE_HEADS, 2 * CELL + 8, CELL]
    skip_ptr,  # [VALUE_HEADS], or None
    state_ptr,  # [num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    state_stride,
    starts_ptr,  # [num_seqs]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_tokens_ptr,  # [num_slots]
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CORRECTS: tl.constexpr,
    CELL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXTRA: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: BLOCK_V columns of a head's state, through all rows of one sequence.

    Everything lies transposed, columns of S first: then what one product gives is in those
    registers from which the next takes it.
    """
    start_next_kernel(DEPENDENT)
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * NUM_KEYS + VALUE_HEADS * VALUE_DIM
    head, seq = tl.program_id(1), tl.program_id(2)
    begin, slot, first, seq_len = rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr)
    wait_for_inputs(DEPENDENT)
    start = tl.load(starts_ptr + seq)
    if start < seq_len:
        num_known = tl.minimum(seq_len, tl.load(num_tokens_ptr + slot))
        # From here on rows are counted from `start`, where a cell begins.
        num_rows = (seq_len - start).to(tl.int32)
        num_kept = ((num_known - start) // CELL * CELL).to(tl.int32)
        num_before = (first - start).to(tl.int32)
        i, d = tl.arange(0, CELL), tl.arange(0, BLOCK_K)
        c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_key, is_column = (d < KEY_DIM)[None, :], (c < VALUE_DIM)[:, None]
        state_at = state_ptr + slot * state_stride + head * KEY_DIM * VALUE_DIM
        state_at += d[None, :] * VALUE_DIM + c[:, None]
        rows_ptr = convolved_ptr + (begin + seq * RING) * CHANNELS
        key_ptr = rows_ptr + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        value_ptr = rows_ptr + 2 * NUM_KEYS + head * VALUE_DIM
        written_ptr = out_ptr + ((begin - num_before) * VALUE_HEADS + head) * VALUE_DIM
        cell = begin // CELL + seq * EXTRA
        cell_ptr = cells_ptr + (cell * VALUE_HEADS + head) * (2 * CELL + 8) * CELL
        s = tl.load(state_at, mask=is_key & is_column & (start > 0), other=0.0)
        for low in range(0, num_rows, CELL):
            is_there = low + i < num_rows
            at = key_ptr + i[:, None] * CHANNELS + d[None, :]
            q = tl.load(at, mask=is_key & is_there[:, None], other=0.0)
            k = tl.load(at + NUM_KEYS, mask=is_key & is_there[:, None], other=0.0)
            at = value_ptr + i[None, :] * CHANNELS + c[:, None]
            v = tl.load(at, mask=is_column & is_there[None, :], other=0.0)
            r, r_low = _load_transposed(cell_ptr, 1, CELL, SPLIT)
            factors_at = cell_ptr + 2 * CELL * CELL + i
            factor, of_q = tl.load(factors_at)[None, :], tl.load(factors_at + CELL)[None, :]
            decay = tl.load(cell_ptr + (2 * CELL + 2) * CELL)
            nothing = tl.zeros([BLOCK_V, CELL], tl.float32)
            # In this order registers suffice for all of it.
            x = v.to(tl.float32)
            if CORRECTS:
                t, t_low = _load_transposed(cell_ptr, 0, CELL, SPLIT)
                x -= _times(s, tl.trans(k), nothing, DTYPE, SPLIT) * factor
            y = _times(s, tl.trans(q), nothing, DTYPE, SPLIT) * of_q
            u = _times_both(x, t, t_low, nothing, DTYPE, SPLIT) if CORRECTS else x * factor
            y = _times_both(x, r, r_low, y, DTYPE, SPLIT)
            if skip_ptr is not None:
                y += v.to(tl.float32) * tl.load(skip_ptr + head)
            s = _times(u, k, s * decay, DTYPE, SPLIT)
            tl.store(
                written_ptr + i[None, :] * (VALUE_HEADS * VALUE_DIM) + c[:, None],
                y.to(out_ptr.dtype.element_ty),
                mask=(is_there & (low + i >= num_before))[None, :] & is_column,
            )
            if low + CELL == num_kept:
                tl.store(state_at, s, mask=is_key & is_column)
            key_ptr += CELL * CHANNELS
            value_ptr += CELL * CHANNELS
            written_ptr += CELL * VALUE_HEADS * VALUE_DIM
            cell_ptr += VALUE_HEADS * (2 * CELL + 8) * CELL


def constants_of(key_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of both kernels that follow from the size of keys and the dtype of rows."""
    splits = dtype == torch.bfloat16
    return {
        "CELL": CELL,
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        # Triton's interpreter cannot multiply bfloat16.
        "DTYPE": tl.bfloat16 if splits and not INTERPRET else tl.float32,
        "SPLIT": splits,
    }


class CellPass(NamedTuple):
    """Cells on their way through the states of sequences; shapes as in `cell_by_cell_kernel`."""

    out: Tensor  # which is written
    convolved: Tensor
    cells: Tensor
    skip: Tensor | None
    state: Tensor  # which changes
    starts: Tensor
    sequences: tuple[Tensor, Tensor, Tensor]  # slots, lengths and bounds
    num_tokens: Tensor
    sizes: dict[str, int]  # the constants from RING to CORRECTS, and EXTRA

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """Those of both kernels that are no constants."""
        *before, state, starts, sequences, num_tokens, _ = self
        return (*before, state, state.stride(0), starts, *sequences, num_tokens)


def pass_cells(of: CellPass) -> None:
    value_dim = of.out.shape[2]
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(value_dim)))
    cell_by_cell_kernel[(triton.cdiv(value_dim, columns), of.out.shape[1], len(of.starts))](
        *of.arguments, **of.sizes, **constants_of(of.sizes["KEY_DIM"], of.out.dtype),
        BLOCK_V=columns, **dependent_launch(of.out.device), num_warps=columns // 16,
        num_stages=_STAGES,
    )  # fmt: skip
