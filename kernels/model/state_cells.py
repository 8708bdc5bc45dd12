"""Rows of layers with a state on their way through it, 16 at once: a cell. See `state_layer.py`.

Cells lie at absolute positions, and S is kept behind whole cells alone. With S in front of a cell,
and G the sum of log(decay) in it up to a row:

    U_i = b_i (v_i - e^(G_i) S^T k_i - sum over j < i of e^(G_i - G_j) (k_i . k_j) U_j)
    out_i = e^(G_i) S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) U_j
    S behind it = e^(G_last) S + sum over j of e^(G_last - G_j) k_j U_j^T

The first line, of a delta net, solves a system: U = T b (v - ...). T does not depend on S, so all
cells get theirs at once. In Mamba2 U_i = b_i v_i, and b is dt. A row takes nothing from rows behind
it but products with 0, and every product has one shape, however many rows of a cell are there. So
its bits depend on its sequence alone. But a draft that is not a number spoils what its pass gives
for the rows beside it, though no state: as with the KV beside it, the sequence then starts over
without drafts.

q and k enter products as they were convolved, which is exact; their norms, which Mamba2 does not
have, are factors. What is float32 enters as the sum of two bfloat16.
"""

from ..dependent_launch import start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .state_rows import rows_of, sequence_of

CELL = 16  # rows; those of an MMA


@triton.jit
def _halves(x):
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
        high, low = _halves(x)
        total = tl.dot(high.to(DTYPE), y, total, input_precision="ieee")
        total = tl.dot(low.to(DTYPE), y, total, input_precision="ieee")
    else:
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@triton.jit
def _times_both(x, y, total, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """total + x y, both of them float32."""
    if SPLIT:
        y_high, y_low = _halves(y)
        total = _times(x, y_high, total, DTYPE, SPLIT)
        high, _ = _halves(x)
        total = tl.dot(high.to(DTYPE), y_low.to(DTYPE), total, input_precision="ieee")
    else:
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_seqs"])
def cells_kernel(
    cells_ptr,  # [num_cells, VALUE_HEADS, 2 * CELL + 4, CELL]
    convolved_ptr,  # [T + num_seqs * RING, channels]
    factors_ptr,  # [T + num_seqs * RING, 2 * (KEY_HEADS + VALUE_HEADS)]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_rows_stride,
    num_seqs,
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
    DEPENDENT: tl.constexpr,
):
    """Each program: what a head's rows of a cell take from each other.

    Writes T b; the factors of U in `out`; then, of each row, the factors of S^T k, of S^T q, and
    of U in S; and e^(G_last). In Mamba2, in place of the factors of S^T k, b; and no T b.
    """
    start_next_kernel(DEPENDENT)
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * NUM_KEYS + VALUE_HEADS * VALUE_DIM
    FACTORS: tl.constexpr = 2 * (KEY_HEADS + VALUE_HEADS)
    head, index = tl.program_id(0), tl.program_id(1)
    seq, part = sequence_of(index, bounds_ptr, num_seqs, CELL, EXTRA)
    begin, _, _, start, seq_len = rows_of(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr, num_rows_stride
    )
    wait_for_inputs(DEPENDENT)
    low = (start // CELL + part) * CELL
    if (start < seq_len) & (low < seq_len):
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i, d = tl.arange(0, CELL), tl.arange(0, BLOCK_K)
        is_there = (low + i >= start) & (low + i < seq_len)
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
        cell_ptr = cells_ptr + (index.to(tl.int64) * VALUE_HEADS + head) * (2 * CELL + 4) * CELL
        at = cell_ptr + i[:, None] * CELL + i[None, :]
        tl.store(at + CELL * CELL, tl.where(is_behind, norm_q[:, None] * qk, 0.0))
        of_k = b
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
            tl.store(at, t * b[None, :])
            of_k = tl.exp(g) * norm_k
        at = cell_ptr + 2 * CELL * CELL + i
        tl.store(at, of_k)
        tl.store(at + CELL, tl.exp(g) * norm_q)
        tl.store(at + 2 * CELL, tl.exp(g_last - g) * norm_k)
        tl.store(at + 3 * CELL, tl.exp(g_last + tl.zeros([CELL], tl.float32)))


@triton.jit
def cell_by_cell_kernel(
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM]
    convolved_ptr,  # [T + num_seqs * RING, channels]
    cells_ptr,  # [num_cells, VALUE_HEADS, 2 * CELL + 4, CELL]
    skip_ptr,  # [VALUE_HEADS], or None
    state_ptr,  # [num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    state_stride,
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_rows_stride,
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
    begin, slot, first, start, seq_len = rows_of(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr, num_rows_stride
    )
    wait_for_inputs(DEPENDENT)
    if start < seq_len:
        num_known = tl.minimum(seq_len, tl.load(num_tokens_ptr + slot))
        end_of_kept = num_known // CELL * CELL
        i, d = tl.arange(0, CELL), tl.arange(0, BLOCK_K)
        c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_key, is_column = (d < KEY_DIM)[None, :], (c < VALUE_DIM)[:, None]
        state_at = state_ptr + slot * state_stride + head * KEY_DIM * VALUE_DIM
        state_at += d[None, :] * VALUE_DIM + c[:, None]
        key_at = convolved_ptr + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + d[None, :]
        value_at = convolved_ptr + 2 * NUM_KEYS + head * VALUE_DIM + c[:, None]
        cell = begin // CELL + seq * EXTRA
        cell_ptr = cells_ptr + (cell * VALUE_HEADS + head) * (2 * CELL + 4) * CELL
        s = tl.load(state_at, mask=is_key & is_column & (start > 0), other=0.0)
        for low in range(start // CELL * CELL, seq_len, CELL):
            position = low + i
            is_there = (position >= start) & (position < seq_len)
            at = (begin + seq * RING + (position - start)) * CHANNELS
            q = tl.load(key_at + at[:, None], mask=is_key & is_there[:, None], other=0.0)
            k = tl.load(key_at + at[:, None] + NUM_KEYS, mask=is_key & is_there[:, None], other=0.0)
            v = tl.load(value_at + at[None, :], mask=is_column & is_there[None, :], other=0.0)
            if CORRECTS:
                t = tl.load(cell_ptr + i[None, :] * CELL + i[:, None])
            p = tl.load(cell_ptr + CELL * CELL + i[None, :] * CELL + i[:, None])
            factors_at = cell_ptr + 2 * CELL * CELL + i
            of_k, of_q = tl.load(factors_at)[None, :], tl.load(factors_at + CELL)[None, :]
            of_u = tl.load(factors_at + 2 * CELL)[None, :]
            decay = tl.load(cell_ptr + (2 * CELL + 3) * CELL)
            nothing = tl.zeros([BLOCK_V, CELL], tl.float32)
            # In this order registers suffice for all of it.
            if CORRECTS:
                of_state = _times(s, tl.trans(k), nothing, DTYPE, SPLIT) * of_k
            y = _times(s, tl.trans(q), nothing, DTYPE, SPLIT) * of_q
            if CORRECTS:
                u = _times_both(v.to(tl.float32) - of_state, t, nothing, DTYPE, SPLIT)
            else:
                u = v.to(tl.float32) * of_k
            y = _times_both(u, p, y, DTYPE, SPLIT)
            if skip_ptr is not None:
                y += v.to(tl.float32) * tl.load(skip_ptr + head)
            s = _times(u * of_u, k, s * decay, DTYPE, SPLIT)
            at = ((begin + position - first) * VALUE_HEADS + head) * VALUE_DIM
            is_written = is_there & (position >= first)
            tl.store(
                out_ptr + at[None, :] + c[:, None], y.to(out_ptr.dtype.element_ty),
                mask=is_written[None, :] & is_column,
            )  # fmt: skip
            if low + CELL == end_of_kept:
                tl.store(state_at, s, mask=is_key & is_column)
            cell_ptr += VALUE_HEADS * (2 * CELL + 4) * CELL
