"""Rows of layers with a state, before and after their way through it, which is `state_cells.py`.

See `delta_net.py` and `mamba2.py` for the formulas.
"""

from ..dependent_launch import start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .rms_norm import rounded
from .sigmoid_gate import rounded_sigmoid
from .silu_mul import silu


@triton.jit
def _at(
    x_ptr, ring_ptr, position, first, column, mask, stride, RING: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns of the rows at some positions, 0 before the sequence. `x_ptr` points to the row
    `first`; those before it lie in the ring.
    """
    here_ptr = x_ptr + (position - first).to(tl.int64) * stride
    kept_ptr = ring_ptr + position % RING * WIDTH
    row_ptr = tl.where(position >= first, here_ptr, kept_ptr)
    return tl.load(row_ptr + column, mask=mask & (position >= 0), other=0.0)


@triton.jit
def _softplus(x):
    """log(1 + e^x), also where e^x is small: then 1 + e^x has lost most of it."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr):
    """A sequence's first row in the batch, its slot, the position of that row, and the number of
    its tokens. Without rows that position is behind its last token.

    All this was written before the pass: a kernel may read it before it waits for its inputs.
    """
    begin, end = tl.load(bounds_ptr + seq).to(tl.int64), tl.load(bounds_ptr + seq + 1)
    slot, seq_len = tl.load(slots_ptr + seq).to(tl.int64), tl.load(seq_lens_ptr + seq)
    return begin, slot, tl.where(begin < end, seq_len - (end - begin), seq_len), seq_len


@triton.jit
def sequence_of(part, bounds_ptr, num_seqs, size, extra):
    """Which sequence a part belongs to, and which of its parts that is.

    The parts of sequence s, of `size` rows each, begin at begin // size + s * extra.
    """
    before = 0
    for low in range(0, num_seqs, 128):
        seq = low + tl.arange(0, 128)
        begin = tl.load(bounds_ptr + seq, mask=seq < num_seqs, other=0)
        is_before = (seq < num_seqs) & (begin // size + seq * extra <= part)
        before += tl.sum(is_before.to(tl.int32))
    seq = before - 1
    return seq, part - (tl.load(bounds_ptr + seq) // size + seq * extra)


@triton.jit(do_not_specialize=["num_seqs", "size", "extra"])
def prepare_kernel(
    convolved_ptr,  # [T + num_seqs * RING, channels]
    factors_ptr,  # [T + num_seqs * RING, 2 * (KEY_HEADS + VALUE_HEADS)]
    starts_ptr,  # [num_seqs]
    x_ptr,  # [T, channels]
    x_stride,
    scalars_ptr,  # [T, WIDTH - channels]
    scalars_stride,
    convolution_ptr,  # [channels, TAPS]
    channel_stride,
    tap_stride,
    bias_ptr,  # [channels], or None
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    ring_ptr,  # [num_slots, RING, row_width]
    ring_stride,
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_rows_stride,
    num_seqs,
    size,
    extra,
    scale,
    RING: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CORRECTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: some heads (of q, then of k, then of v) in `size` rows of one sequence.

    Writes what their convolution gives, and factors: of q and k 1 / norm, of values log(decay) and
    b, which is dt in Mamba2; and of each sequence the position where S goes on.
    """
    start_next_kernel(DEPENDENT)
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    NUM_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * NUM_KEYS + NUM_VALUES
    ALL_HEADS: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    seq, part = sequence_of(tl.program_id(1), bounds_ptr, num_seqs, size, extra)
    begin, slot, first, seq_len = rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr)
    start = tl.where(first > 0, tl.load(num_rows_ptr + slot * num_rows_stride), 0)
    start = tl.where(first < seq_len, start, seq_len)
    wait_for_inputs(DEPENDENT)
    if (tl.program_id(0) == 0) & (part == 0):
        tl.store(starts_ptr + seq, start)
    # Positions in 32 bits: of 64, their remainders would take longer than the convolution.
    start, first, seq_len = start.to(tl.int32), first.to(tl.int32), seq_len.to(tl.int32)
    pair, d = tl.arange(0, ROWS * HEADS), tl.arange(0, BLOCK_D)
    head = tl.program_id(0) * HEADS + pair % HEADS
    is_value_head = (head >= 2 * KEY_HEADS) & (head < ALL_HEADS)
    value_head = head - 2 * KEY_HEADS
    dim = tl.where(is_value_head, VALUE_DIM, KEY_DIM)
    column = tl.where(is_value_head, 2 * NUM_KEYS + value_head * VALUE_DIM, head * KEY_DIM)
    first_channel = column
    if not CORRECTS:  # its rows have v, k, q
        key_head = head + tl.where(head < KEY_HEADS, KEY_HEADS, -KEY_HEADS)
        of_key = NUM_VALUES + key_head * KEY_DIM
        first_channel = tl.where(is_value_head, value_head * VALUE_DIM, of_key)
    channel = first_channel[:, None] + d[None, :]
    is_channel = (d[None, :] < dim[:, None]) & (head < ALL_HEADS)[:, None]
    weight_ptr = convolution_ptr + channel * channel_stride
    first_x_ptr, slot_ring_ptr = x_ptr + begin * x_stride, ring_ptr + slot * ring_stride
    dtype = x_ptr.dtype.element_ty
    first_of_part = start + part.to(tl.int32) * size
    for low in range(first_of_part, tl.minimum(first_of_part + size, seq_len), ROWS):
        position = low + pair // HEADS
        is_there = (position < seq_len) & (head < ALL_HEADS)
        mask = is_channel & is_there[:, None]
        total = tl.zeros([ROWS * HEADS, BLOCK_D], tl.float32)
        for tap in tl.static_range(TAPS):
            x = _at(
                first_x_ptr, slot_ring_ptr, position[:, None] - (TAPS - 1) + tap, first, channel,
                mask, x_stride, RING, WIDTH,
            )  # fmt: skip
            weight = tl.load(weight_ptr + tap * tap_stride, mask=is_channel, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        y = rounded(silu(rounded(total, dtype).to(tl.float32)), dtype)
        row = begin + seq * RING + (position - start)
        at = convolved_ptr + row[:, None] * CHANNELS + column[:, None] + d[None, :]
        tl.store(at, y, mask=mask)
        is_value = is_value_head & is_there
        first_scalars_ptr = scalars_ptr + begin * scalars_stride - CHANNELS  # as if behind them
        b = _at(
            first_scalars_ptr, slot_ring_ptr, position, first, CHANNELS + value_head, is_value,
            scalars_stride, RING, WIDTH,
        ).to(tl.float32)  # fmt: skip
        a_factor = -tl.exp(tl.load(a_log_ptr + value_head, mask=is_value, other=0.0))
        dt_bias = tl.load(dt_bias_ptr + value_head, mask=is_value, other=0.0)
        if CORRECTS:
            y = y.to(tl.float32)
            norm = tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * tl.where(head < KEY_HEADS, scale, 1.0)
            a = _at(
                first_scalars_ptr, slot_ring_ptr, position, first,
                CHANNELS + VALUE_HEADS + value_head, is_value, scalars_stride, RING, WIDTH,
            ).to(tl.float32)  # fmt: skip
            dt = _softplus(a + dt_bias)
            b = rounded_sigmoid(b, dtype)
        else:
            norm = tl.full([ROWS * HEADS], 1.0, tl.float32)
            dt = _softplus(b + dt_bias)
            b = dt
        log_decay = a_factor * dt
        factor_ptr = factors_ptr + row * (ALL_HEADS + VALUE_HEADS) + head
        tl.store(factor_ptr, tl.where(is_value, log_decay, norm), mask=is_there)
        tl.store(factor_ptr + VALUE_HEADS, b, mask=is_value)


@triton.jit
def remember(
    seq,
    part,
    start,
    x_ptr,  # [T, CHANNELS]
    x_stride,
    scalars_ptr,  # [T, WIDTH - CHANNELS]
    scalars_stride,
    ring_ptr,  # [num_slots, RING, WIDTH]
    ring_stride,
    slots_ptr,  # [num_seqs]
    seq_lens_ptr,  # [num_seqs]
    bounds_ptr,  # [num_seqs + 1]
    num_rows_ptr,  # [num_slots]
    num_rows_stride,
    num_tokens_ptr,  # [num_slots]
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    CELL: tl.constexpr,
):
    """Keep one of PARTS parts of a sequence's last rows, and how many rows S covers."""
    begin, slot, first, seq_len = rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr)
    SIZE: tl.constexpr = (WIDTH + 8 * PARTS - 1) // (8 * PARTS) * 8
    if first < seq_len:
        i, c = tl.arange(0, 4)[:, None], tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
        column = part * SIZE + c
        for low in range(tl.maximum(first, seq_len - RING), seq_len, 4):
            position = low + i
            mask = (position < seq_len) & (c < SIZE) & (column < WIDTH)
            row = begin + position - first
            x = tl.load(x_ptr + row * x_stride + column, mask=mask & (column < CHANNELS))
            scalar_ptr = scalars_ptr + row * scalars_stride + (column - CHANNELS)
            scalar = tl.load(scalar_ptr, mask=mask & (column >= CHANNELS))
            x = tl.where(column < CHANNELS, x, scalar)
            at = ring_ptr + slot * ring_stride + position % RING * WIDTH + column
            tl.store(at, x, mask=mask)
        if part == 0:
            num_known = tl.minimum(seq_len, tl.load(num_tokens_ptr + slot))
            # Cells count from where S began: if a reference was there before, at any position.
            num_rows = start + tl.maximum(num_known - start, 0) // CELL * CELL
            tl.store(num_rows_ptr + slot * num_rows_stride, num_rows)
