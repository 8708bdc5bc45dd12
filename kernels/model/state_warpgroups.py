"""`pass_cells` of `state_cells.py` by the warpgroups of a Hopper GPU.

A warpgroup takes 64 columns of S, 16 a warp, and the four share what they read of a cell, which is
copied while cells before are computed. See there for the formulas.
"""

import torch

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import gl, gluon, hopper
from .state_cells import CellPass, halves
from .state_rows import rows_of
from .warpgroups import has_warpgroups

_COLUMNS = gl.constexpr(64)  # of S in a program
_CELL = gl.constexpr(16)
_STAGES = 3  # cells that are copied or computed at once
_FEW_ROWS = 256  # with more in a pass, programs start once the kernel before has ended

cp = hopper.async_copy

# Devices on which it does not work; `state_trial` finds them out.
failed: set[torch.device] = set()


def is_for(dtype: torch.dtype, key_dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether it passes rows of this dtype through states of this size."""
    return (
        dtype == torch.bfloat16
        and key_dim in (64, 128)  # of more, S is too large for the registers of a warpgroup
        and value_dim % _COLUMNS.value == 0
        and has_warpgroups(device)
        and device not in failed
    )


def pass_cells_by_warpgroups(of: CellPass) -> None:
    """As `pass_cells`, for what it `is_for`."""
    # Where programs start early, a multiprocessor that was free first gets several of them, though
    # there may be one for each; two take twice as long.
    num_rows, num_heads, value_dim = of.out.shape
    how = dependent_launch(of.out.device) if num_rows <= _FEW_ROWS else {"DEPENDENT": False}
    _cell_by_cell_kernel[value_dim // _COLUMNS.value, num_heads, len(of.starts)](
        *of.arguments, **of.sizes, STAGES=_STAGES, **how, num_warps=4
    )


@gluon.jit
def _copy_cell(
    keys, values, matrices, factors, stage, key_ptr, value_ptr, cell_ptr, num_rows,
    KEY_DIM: gl.constexpr, NUM_KEYS: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """Start to copy a cell, of which `num_rows` rows are there."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    MATRICES: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    # A number each thread: were some threads without, there would be branches between products.
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, 2 * _CELL, gl.SliceLayout(1, KEYS))[:, None]
    d = gl.arange(0, KEY_DIM, gl.SliceLayout(0, KEYS))[None, :]
    at = key_ptr + (i % _CELL * CHANNELS + (1 - i // _CELL) * NUM_KEYS + d)
    cp.async_copy_global_to_shared(keys.index(stage), at, mask=i % _CELL < num_rows)
    i = gl.arange(0, _CELL, gl.SliceLayout(1, VALUES))[:, None]
    c = gl.arange(0, _COLUMNS, gl.SliceLayout(0, VALUES))[None, :]
    at = value_ptr + (i * CHANNELS + c)
    cp.async_copy_global_to_shared(values.index(stage), at, mask=i < num_rows)
    i = gl.arange(0, 4 * _CELL, gl.SliceLayout(1, MATRICES))[:, None]
    j = gl.arange(0, _CELL, gl.SliceLayout(0, MATRICES))[None, :]
    at = cell_ptr.to(gl.pointer_type(gl.bfloat16)) + (i * _CELL + j)
    is_there = num_rows > 0
    cp.async_copy_global_to_shared(matrices.index(stage), at, mask=is_there & (i >= 0))
    i = gl.arange(0, 8, gl.SliceLayout(1, FACTORS))[:, None]
    j = gl.arange(0, _CELL, gl.SliceLayout(0, FACTORS))[None, :]
    at = cell_ptr + (2 * _CELL * _CELL + i * _CELL + j)
    cp.async_copy_global_to_shared(factors.index(stage), at, mask=is_there & (i >= 0))
    cp.commit_group()


@gluon.jit
def _factor(x, ACC: gl.constexpr):
    """x in the registers of those that ACC has the products of."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def _cell_by_cell_kernel(
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
    RING: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    CORRECTS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Each program: _COLUMNS columns of a head's state, through all rows of one sequence."""
    start_next_kernel(DEPENDENT)
    NUM_KEYS: gl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: gl.constexpr = 2 * NUM_KEYS + VALUE_HEADS * VALUE_DIM
    CELL_SIZE: gl.constexpr = VALUE_HEADS * (2 * _CELL + 8) * _CELL
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_DIM, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _CELL, 16])
    MMA_TWO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _CELL, 16])
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    MATRICES: gl.constexpr = gl.NVMMASharedLayout(32, 16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VALUES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    bf16: gl.constexpr = gl.bfloat16
    keys = gl.allocate_shared_memory(bf16, [STAGES, 2 * _CELL, KEY_DIM], KEYS)
    values = gl.allocate_shared_memory(bf16, [STAGES, _CELL, _COLUMNS], VALUES)
    matrices = gl.allocate_shared_memory(bf16, [STAGES, 4 * _CELL, _CELL], MATRICES)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 8, _CELL], PLAIN)

    head, seq = gl.program_id(1), gl.program_id(2)
    begin, slot, first, seq_len = rows_of(seq, slots_ptr, seq_lens_ptr, bounds_ptr)
    wait_for_inputs(DEPENDENT)
    start = gl.load(starts_ptr + seq)
    if start < seq_len:
        num_known = gl.minimum(seq_len, gl.load(num_tokens_ptr + slot))
        # From here on rows are counted from `start`, where a cell begins.
        num_rows = (seq_len - start).to(gl.int32)
        num_kept = ((num_known - start) // _CELL * _CELL).to(gl.int32)
        num_before = (first - start).to(gl.int32)
        first_column = gl.program_id(0) * _COLUMNS
        rows_ptr = convolved_ptr + (begin + seq * RING) * CHANNELS
        key_ptr = rows_ptr + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        value_ptr = rows_ptr + 2 * NUM_KEYS + head * VALUE_DIM + first_column
        cell_ptr = cells_ptr + ((begin // _CELL + seq * EXTRA) * VALUE_HEADS + head) * (
            (2 * _CELL + 8) * _CELL
        )
        for stage in gl.static_range(STAGES - 1):
            _copy_cell(
                keys, values, matrices, factors, stage, key_ptr, value_ptr, cell_ptr,
                num_rows - stage * _CELL, KEY_DIM, NUM_KEYS, CHANNELS,
            )  # fmt: skip
            key_ptr += _CELL * CHANNELS
            value_ptr += _CELL * CHANNELS
            cell_ptr += CELL_SIZE

        c = first_column + gl.arange(0, _COLUMNS, gl.SliceLayout(1, STATE))[:, None]
        d = gl.arange(0, KEY_DIM, gl.SliceLayout(0, STATE))[None, :]
        state_ptr += slot * state_stride + head * (KEY_DIM * VALUE_DIM)
        if start > 0:
            s = gl.load(state_ptr + (d * VALUE_DIM + c))
        else:
            s = gl.zeros([_COLUMNS, KEY_DIM], gl.float32, STATE)
        c = first_column + gl.arange(0, _COLUMNS, gl.SliceLayout(1, MMA))[:, None]
        i = gl.arange(0, _CELL, gl.SliceLayout(0, MMA))[None, :]
        out_ptr += ((begin - num_before) * VALUE_HEADS + head) * VALUE_DIM
        out_at = i * (VALUE_HEADS * VALUE_DIM) + c
        skip = 0.0
        if skip_ptr is not None:
            skip = gl.load(skip_ptr + head)
        nothing = gl.zeros([_COLUMNS, _CELL], gl.float32, MMA)
        nothing_two = gl.zeros([_COLUMNS, 2 * _CELL], gl.float32, MMA_TWO)
        stage = 0
        for low in range(0, num_rows, _CELL):
            cp.wait_group(STAGES - 2)
            hopper.fence_async_shared()
            v = values.index(stage).permute((1, 0)).load(MMA).to(gl.float32)
            factor = factors.index(stage).slice(0, 1).load(MMA)
            of_q = factors.index(stage).slice(1, 1).load(MMA)
            decay = factors.index(stage).slice(2, 1).slice(0, 1, 1).load(STATE)
            key_tile = keys.index(stage)
            high, rest = halves(s)
            high, rest = _factor(high, MMA_TWO), _factor(rest, MMA_TWO)
            both = hopper.warpgroup_mma(
                high, key_tile.permute((1, 0)), nothing_two, use_acc=False, is_async=True
            )
            both = hopper.warpgroup_mma(rest, key_tile.permute((1, 0)), both, is_async=True)
            s *= decay
            both, high, rest = hopper.warpgroup_mma_wait(0, deps=[both, high, rest])
            both = gl.permute(gl.reshape(both, [_COLUMNS, 2, _CELL]), (0, 2, 1))
            of_keys, y = gl.split(both)
            of_keys, y = gl.convert_layout(of_keys, MMA), gl.convert_layout(y, MMA)
            x = v - of_keys * factor if CORRECTS else v
            y *= of_q
            high, rest = halves(x)
            high, rest = _factor(high, MMA), _factor(rest, MMA)
            matrix = matrices.index(stage)
            t, t_low = matrix.slice(0, _CELL), matrix.slice(_CELL, _CELL)
            r, r_low = matrix.slice(2 * _CELL, _CELL), matrix.slice(3 * _CELL, _CELL)
            if CORRECTS:
                u = hopper.warpgroup_mma(
                    high, t.permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                u = hopper.warpgroup_mma(rest, t.permute((1, 0)), u, is_async=True)
                u = hopper.warpgroup_mma(high, t_low.permute((1, 0)), u, is_async=True)
            y = hopper.warpgroup_mma(high, r.permute((1, 0)), y, is_async=True)
            y = hopper.warpgroup_mma(rest, r.permute((1, 0)), y, is_async=True)
            y = hopper.warpgroup_mma(high, r_low.permute((1, 0)), y, is_async=True)
            u = hopper.warpgroup_mma_wait(3, deps=[u]) if CORRECTS else x * factor
            u_high, u_rest = halves(u)
            u_high, u_rest = _factor(u_high, STATE), _factor(u_rest, STATE)
            k = key_tile.slice(0, _CELL)
            s = hopper.warpgroup_mma(u_high, k, s, is_async=True)
            s = hopper.warpgroup_mma(u_rest, k, s, is_async=True)
            # All have read the cell before this one, so another may take its place.
            _copy_cell(
                keys, values, matrices, factors, (stage + STAGES - 1) % STAGES, key_ptr,
                value_ptr, cell_ptr, num_rows - low - (STAGES - 1) * _CELL, KEY_DIM, NUM_KEYS,
                CHANNELS,
            )  # fmt: skip
            y, high, rest = hopper.warpgroup_mma_wait(2, deps=[y, high, rest])
            if skip_ptr is not None:
                y += v * skip
            is_written = (low + i < num_rows) & (low + i >= num_before)
            gl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), mask=is_written & (c >= 0))
            s, u_high, u_rest = hopper.warpgroup_mma_wait(0, deps=[s, u_high, u_rest])
            if low + _CELL == num_kept:
                # Else 64 addresses would be kept in registers all the way.
                column = gl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [first_column], gl.int32, is_pure=False, pack=1
                )
                c_ = column + gl.arange(0, _COLUMNS, gl.SliceLayout(1, STATE))[:, None]
                gl.store(state_ptr + (d * VALUE_DIM + c_), s)
            key_ptr += _CELL * CHANNELS
            value_ptr += _CELL * CHANNELS
            cell_ptr += CELL_SIZE
            out_ptr += _CELL * VALUE_HEADS * VALUE_DIM
            stage = (stage + 1) % STAGES
