"""Gated delta nets: per value head a matrix S that each row of a sequence decays and corrects.

    q, k, v = silu(convolution of the row and the rows before it, channel by channel)
    q, k    = x / sqrt(sum(x^2) + 1e-6) of each head, q also / sqrt(key_dim)
    decay   = exp(-exp(a_log) softplus(a + dt_bias)),   b = sigmoid(b)
    S       = decay S + k (b (v - (decay S)^T k))^T,    out = S^T q

A key head serves several value heads. S is float32, and rows pass one by one: the bits of a row
depend on its sequence alone, however the sequence is split into passes.

S cannot go back. So S of a slot covers the rows of known tokens alone; rows of drafts are kept as
they came in, in a ring, which the convolution needs anyway. The next pass begins by taking S
through those of them that were accepted: it knows how many by its own first position.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..triton_or_none import tl, triton
from .rows import BatchRows
from .silu_mul import silu

_EPS = 1e-6  # of the norms of q and k
_BLOCK_V = 16  # columns of S in a program, which is one warp: its sums over S pass no barrier
_HEADS = 4  # convolved by a program
_ROWS = 64  # convolved by a program, at most
_CHANNELS = 1024  # copied at once


class DeltaHeads(NamedTuple):
    """The sizes of a delta net."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """Of q, k and v, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def row_width(self) -> int:
        """q, k, v of all heads, then b and a of each value head."""
        return self.num_channels + 2 * self.num_value_heads


class DeltaWeights(NamedTuple):
    """What a delta net has learned, besides its linear layers."""

    convolution: Tensor  # [num_channels, taps], the last for the row itself
    a_log: Tensor  # [num_value_heads] float32
    dt_bias: Tensor  # [num_value_heads] float32


class DeltaMemory(NamedTuple):
    """What it keeps of the sequence in each slot. A sequence begins at position 0, without any."""

    state: Tensor  # [num_slots, num_value_heads, key_dim, value_dim] float32
    # [num_slots, taps - 1 + most drafts, row_width]; the row at a position lies at position % size
    ring: Tensor
    num_rows: Tensor  # [num_slots] int64, how many of the sequence's rows the state covers


def delta_net(
    x: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    memory: DeltaMemory,
    rows: BatchRows,
    num_tokens: Tensor,
) -> Tensor:
    """Pass the rows of a batch through their sequences' memory. Rows at the position `num_tokens`
    of their slot, or beyond, are of drafts; no more of them than the ring has room for.

    Shape: x [T, row_width], each row dense; num_tokens [num_slots] int64
        -> [T, num_value_heads, value_dim], 0 in rows of padding.
    """
    if not uses_triton(x):
        return delta_net_reference(x, heads, weights, memory, rows, num_tokens)
    assert x.stride(1) == 1
    assert weights.convolution.is_contiguous()
    assert all(part.is_contiguous() for part in memory)
    out = x.new_zeros(len(x), heads.num_value_heads, heads.value_dim)
    num_seqs, ring_size = len(rows.slots), memory.ring.shape[1]
    sequences = rows.slots, rows.seq_lens, rows.cu_seqlens_q, memory.num_rows
    # A sequence has its rows here, and before them those of accepted drafts that S takes first.
    num_rows = len(x) + num_seqs * ring_size
    convolved = x.new_empty(num_rows, heads.num_channels)
    num_factors = 2 * (heads.num_key_heads + heads.num_value_heads)
    factors = torch.empty(num_rows, num_factors, dtype=torch.float32, device=x.device)
    sizes = {
        "RING": ring_size,
        "KEY_HEADS": heads.num_key_heads,
        "VALUE_HEADS": heads.num_value_heads,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
    }
    num_heads = 2 * heads.num_key_heads + heads.num_value_heads
    _prepare_kernel[
        (triton.cdiv(num_heads, _HEADS), triton.cdiv(len(x) + ring_size, _ROWS), num_seqs)
    ](
        convolved,
        factors,
        x,
        x.stride(0),
        *weights,
        memory.ring,
        *sequences,
        heads.key_dim**-0.5,
        **sizes,
        TAPS=weights.convolution.shape[1],
        HEADS=_HEADS,
        BLOCK_D=triton.next_power_of_2(max(heads.key_dim, heads.value_dim)),
        ROWS=_ROWS,
    )
    block_v = min(_BLOCK_V, triton.next_power_of_2(heads.value_dim))
    _delta_net_kernel[(triton.cdiv(heads.value_dim, block_v), heads.num_value_heads, num_seqs)](
        out,
        convolved,
        factors,
        memory.state,
        *sequences,
        num_tokens,
        **sizes,
        BLOCK_K=triton.next_power_of_2(heads.key_dim),
        BLOCK_V=block_v,
        num_warps=1,
    )
    # After all programs above have read the ring and the number of rows.
    _remember_kernel[(num_seqs, triton.cdiv(heads.row_width, _CHANNELS))](
        x, x.stride(0), memory.ring, *sequences, num_tokens, RING=ring_size,
        WIDTH=heads.row_width, BLOCK=_CHANNELS,
    )  # fmt: skip
    return out


def delta_net_reference(
    x: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    memory: DeltaMemory,
    rows: BatchRows,
    num_tokens: Tensor,
) -> Tensor:
    out = x.new_zeros(len(x), heads.num_value_heads, heads.value_dim)
    ring_size, num_before = memory.ring.shape[1], weights.convolution.shape[1] - 1
    bounds, seq_lens = rows.cu_seqlens_q.tolist(), rows.seq_lens.tolist()
    for i, slot in enumerate(rows.slots.tolist()):
        begin, end, seq_len = bounds[i], bounds[i + 1], seq_lens[i]
        if begin == end:
            continue
        first, num_known = seq_len - (end - begin), min(seq_len, int(num_tokens[slot]))
        ring, state = memory.ring[slot], memory.state[slot]
        start = int(memory.num_rows[slot]) if first > 0 else 0
        if first == 0:
            state.zero_()
        kept = torch.arange(start - num_before, first, device=x.device)
        kept_rows = ring[kept % ring_size]
        kept_rows[kept < 0] = 0
        seen = torch.cat((kept_rows, x[begin:end]))
        for position in range(start, seq_len):
            window = seen[position - start : position - start + num_before + 1]
            if position == num_known:
                state = state.clone()  # what drafts do to it is not kept
            y = _pass_row(state, window, heads, weights)
            if position >= first:
                out[begin + position - first] = y
        last = torch.arange(max(first, seq_len - ring_size), seq_len, device=x.device)
        ring[last % ring_size] = x[begin + last - first]
        memory.num_rows[slot] = num_known
    return out


def _pass_row(state: Tensor, window: Tensor, heads: DeltaHeads, weights: DeltaWeights) -> Tensor:
    """Change the state by the last row of a window, and return what it reads from it.

    One row at a time, and all steps of it: over several rows torch might round some of them in
    another way. Shape: state [HV, DK, DV], window [taps, row_width] -> [HV, DV].
    """
    num_channels, repeats = heads.num_channels, heads.num_value_heads // heads.num_key_heads
    mixed, (b, a) = window[:, :num_channels].float(), window[-1, num_channels:].view(2, -1)
    taps = weights.convolution.float()
    convolved = mixed[0] * taps[:, 0]
    for i in range(1, len(mixed)):
        convolved += mixed[i] * taps[:, i]
    convolved = F.silu(convolved.to(window.dtype)).float()
    num_keys = heads.num_key_heads * heads.key_dim
    qk, v = convolved.tensor_split([2 * num_keys])
    qk = qk.view(2, heads.num_key_heads, heads.key_dim)
    qk = qk * torch.rsqrt((qk * qk).sum(2, keepdim=True) + _EPS)
    q, k = qk.repeat_interleave(repeats, 1)[..., None]
    decay = torch.exp(-weights.a_log.exp() * F.softplus(a.float() + weights.dt_bias))
    state *= decay[:, None, None]
    error = v.view(heads.num_value_heads, heads.value_dim) - (state * k).sum(1)
    state += k * (b.sigmoid().float()[:, None] * error)[:, None]
    out: Tensor = (state * (q * heads.key_dim**-0.5)).sum(1)
    return out


@triton.jit
def _at(
    x_ptr, ring_ptr, position, first, column, mask, stride, RING: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns of the row at a position, 0 before the sequence. `x_ptr` points to the row `first`;
    those before it lie in the ring.
    """
    here_ptr = x_ptr + (position - first) * stride + column
    kept_ptr = ring_ptr + ((position + RING) % RING) * WIDTH + column
    here = tl.load(here_ptr, mask=mask & (position >= first), other=0.0)
    kept = tl.load(kept_ptr, mask=mask & (position < first) & (position >= 0), other=0.0)
    return tl.where(position >= first, here, kept)


@triton.jit
def _softplus(x):
    """log(1 + e^x), also where e^x is small: then 1 + e^x has lost most of it."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr):
    """A sequence's first row in the batch, its slot, the position of that first row, the position
    where S goes on, and the number of its tokens.
    """
    begin, end = tl.load(bounds_ptr + seq).to(tl.int64), tl.load(bounds_ptr + seq + 1)
    slot, seq_len = tl.load(slots_ptr + seq).to(tl.int64), tl.load(seq_lens_ptr + seq)
    first = tl.where(begin < end, seq_len - (end - begin), seq_len)
    start = tl.where(first > 0, tl.load(num_rows_ptr + slot), 0)
    return begin, slot, first, tl.where(begin < end, start, seq_len), seq_len


@triton.jit
def _prepare_kernel(
    convolved_ptr,  # [T + num_seqs * RING, channels]
    factors_ptr,  # [T + num_seqs * RING, 2 * (KEY_HEADS + VALUE_HEADS)]
    x_ptr,  # [T, row_width]
    x_stride,
    convolution_ptr,  # [channels, TAPS]
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    ring_ptr,  # [num_slots, RING, row_width]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    scale,
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program: some heads (of q, then of k, then of v) of some rows of one sequence.

    Writes what their convolution gives, and factors: of q and k 1 / norm, of values decay and b.
    """
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * NUM_KEYS + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    ALL_HEADS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    seq = tl.program_id(2)
    begin, slot, first, start, seq_len = _rows_of(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr
    )
    low = start + tl.program_id(1) * ROWS
    if low < seq_len:
        head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, BLOCK_D)
        is_value = head >= 2 * KEY_HEADS
        value_head = head - 2 * KEY_HEADS
        dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
        column = tl.where(is_value, 2 * NUM_KEYS + value_head * VALUE_DIM, head * KEY_DIM)
        channel = column[:, None] + d[None, :]
        mask = (d[None, :] < dim[:, None]) & (head < ALL_HEADS)[:, None]
        is_value &= value_head < VALUE_HEADS
        a_factor = -tl.exp(tl.load(a_log_ptr + value_head, mask=is_value, other=0.0))
        dt_bias = tl.load(dt_bias_ptr + value_head, mask=is_value, other=0.0)
        first_x_ptr, slot_ring_ptr = x_ptr + begin * x_stride, ring_ptr + slot * RING * WIDTH
        dtype = x_ptr.dtype.element_ty
        for position in range(low, tl.minimum(low + ROWS, seq_len)):
            total = tl.zeros([HEADS, BLOCK_D], tl.float32)
            for tap in tl.static_range(TAPS):
                x = _at(
                    first_x_ptr, slot_ring_ptr, position - (TAPS - 1) + tap, first, channel, mask,
                    x_stride, RING, WIDTH,
                )  # fmt: skip
                weight = tl.load(convolution_ptr + channel * TAPS + tap, mask=mask, other=0.0)
                total += x.to(tl.float32) * weight.to(tl.float32)
            y = silu(total.to(dtype).to(tl.float32)).to(dtype)
            row = begin + seq * RING + (position - start)
            tl.store(convolved_ptr + row * CHANNELS + channel, y, mask=mask)
            y = y.to(tl.float32)
            norm = tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * tl.where(head < KEY_HEADS, scale, 1.0)
            b = _at(
                first_x_ptr, slot_ring_ptr, position, first, CHANNELS + value_head, is_value,
                x_stride, RING, WIDTH,
            ).to(tl.float32)  # fmt: skip
            a = _at(
                first_x_ptr, slot_ring_ptr, position, first, CHANNELS + VALUE_HEADS + value_head,
                is_value, x_stride, RING, WIDTH,
            ).to(tl.float32)  # fmt: skip
            decay = tl.exp(a_factor * _softplus(a + dt_bias))
            b = (1.0 / (1.0 + tl.exp(-b))).to(dtype).to(tl.float32)
            factor_ptr = factors_ptr + row * (ALL_HEADS + VALUE_HEADS) + head
            tl.store(factor_ptr, tl.where(is_value, decay, norm), mask=head < ALL_HEADS)
            tl.store(factor_ptr + VALUE_HEADS, b, mask=is_value)


@triton.jit
def _row_of_head(
    convolved_ptr, factors_ptr, key_head, head, i, j, is_there, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """q, k, v, decay and b of a head in a row, v for some columns."""
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    at, is_key = convolved_ptr + key_head * KEY_DIM + i, (i < KEY_DIM) & is_there
    q = tl.load(at, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(at + NUM_KEYS, mask=is_key, other=0.0).to(tl.float32)
    at = convolved_ptr + 2 * NUM_KEYS + head * VALUE_DIM + j
    v = tl.load(at, mask=(j < VALUE_DIM) & is_there, other=0.0).to(tl.float32)
    q *= tl.load(factors_ptr + key_head, mask=is_there, other=0.0)
    k *= tl.load(factors_ptr + KEY_HEADS + key_head, mask=is_there, other=0.0)
    at = factors_ptr + 2 * KEY_HEADS + head
    decay = tl.load(at, mask=is_there, other=0.0)
    return q, k, v, decay, tl.load(at + VALUE_HEADS, mask=is_there, other=0.0)


@triton.jit
def _delta_net_kernel(
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM]
    convolved_ptr,  # [T + num_seqs * RING, channels]
    factors_ptr,  # [T + num_seqs * RING, 2 * (KEY_HEADS + VALUE_HEADS)]
    state_ptr,  # [num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_tokens_ptr,  # [num_slots]
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Each program: BLOCK_V columns of a head's state, through all rows of one sequence."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    FACTORS: tl.constexpr = 2 * (KEY_HEADS + VALUE_HEADS)
    head, seq = tl.program_id(1), tl.program_id(2)
    begin, slot, first, start, seq_len = _rows_of(
        seq, slots_ptr, seq_lens_ptr, bounds_ptr, num_rows_ptr
    )
    if start < seq_len:
        i, j = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        num_known = tl.load(num_tokens_ptr + slot)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        state_at = state_ptr + (slot * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
        state_at += i[:, None] * VALUE_DIM + j[None, :]
        mask = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
        row = begin + seq * RING
        convolved_at, factors_at = convolved_ptr + row * CHANNELS, factors_ptr + row * FACTORS
        out_at = out_ptr + (begin * VALUE_HEADS + head) * VALUE_DIM + j
        q, k, v, decay, b = _row_of_head(
            convolved_at, factors_at, key_head, head, i, j, True, KEY_HEADS, VALUE_HEADS, KEY_DIM,
            VALUE_DIM,
        )  # fmt: skip
        s = tl.load(state_at, mask=mask & (first > 0), other=0.0)
        # One loop for all rows: in two, the compiler might round them in two ways.
        for position in range(start, seq_len):
            convolved_at += CHANNELS
            factors_at += FACTORS
            # The next row is on its way while this one is computed.
            next_q, next_k, next_v, next_decay, next_b = _row_of_head(
                convolved_at, factors_at, key_head, head, i, j, position + 1 < seq_len, KEY_HEADS,
                VALUE_HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            s *= decay
            error = b * (v - tl.sum(s * k[:, None], 0))
            k_all, error_all = (
                tl.broadcast_to(k[:, None], s.shape),
                tl.broadcast_to(error[None, :], s.shape),
            )
            s = tl.fma(k_all, error_all, s)
            y = tl.sum(s * q[:, None], 0)
            at = out_at + (position - first) * VALUE_HEADS * VALUE_DIM
            is_written = (j < VALUE_DIM) & (position >= first)
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_written)
            is_last_kept = (position == seq_len - 1) | (position == num_known - 1)
            tl.store(state_at, s, mask=mask & is_last_kept & (position < num_known))
            q, k, v, decay, b = next_q, next_k, next_v, next_decay, next_b


@triton.jit
def _remember_kernel(
    x_ptr,  # [T, WIDTH]
    x_stride,
    ring_ptr,  # [num_slots, RING, WIDTH]
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_tokens_ptr,  # [num_slots]
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program: BLOCK numbers of the last rows of one sequence."""
    seq, part = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(bounds_ptr + seq), tl.load(bounds_ptr + seq + 1)
    if begin < end:
        slot, seq_len = tl.load(slots_ptr + seq), tl.load(seq_lens_ptr + seq)
        c = part * BLOCK + tl.arange(0, BLOCK)
        for row in range(tl.maximum(begin, end - RING), end):
            position = seq_len - (end - row)
            x = tl.load(x_ptr + row * x_stride + c, mask=c < WIDTH)
            at = ring_ptr + (slot * RING + position % RING) * WIDTH + c
            tl.store(at, x, mask=c < WIDTH)
        if part == 0:
            num_known = tl.minimum(seq_len, tl.load(num_tokens_ptr + slot))
            tl.store(num_rows_ptr + slot, num_known)
