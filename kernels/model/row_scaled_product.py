"""`scaled_product` of many rows on a Hopper GPU, where each row and each output has one scale:

    y[t, n] = scale_x[t] * scale_w[n] * sum of code_x * code_w

A program has two warpgroups of 64 rows each, and a warp that copies codes into shared memory some
blocks ahead. A block's product starts while that of the block before is under way. Where a sum is
of several shares, tiles have half as many outputs: registers hold a share's sums beside the total.
A row is summed in the same order as among few rows, so its bits are the same.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import gl, gluon, hopper, triton
from .many_rows_tiles import BLOCK_ROWS, ROWS, copy_tiles, in_halves, sums_of_share, tiles_of
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .tiles import tile_of_program
from .warpgroups import descriptor_of, has_warpgroups

_BLOCK = gl.constexpr(128)  # inputs that are copied at once
_STORED = gl.constexpr(128)  # outputs that are stored at once
_WIDE, _NARROW = 256, 128  # rows of the matrix in a tile
_MORE_COPIES = 1.1  # by how much narrow tiles are slower, measured on an H200
_TOGETHER = gl.constexpr(16)  # blocks of rows whose programs run together and share the matrix

# Devices on which it does not work; `scaled_trial` finds them out.
failed: set[torch.device] = set()


def is_for(matrix: NarrowMatrix, *, num_splits: int = 1) -> bool:
    """Whether it multiplies rows with such a matrix."""
    _, width = matrix.codes.shape
    return (
        matrix.codes.dtype == torch.float8_e4m3fn
        and len(matrix.scale) == matrix.rows == 1
        and width % (_BLOCK.value * num_splits) == 0
        and has_warpgroups(matrix.codes.device)
        and matrix.codes.device not in failed
    )


def row_scaled_product(
    out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None, *, num_splits: int,
    last: int, gated: bool, adds: bool,
) -> None:  # fmt: skip
    """As `scaled_product`, by a matrix that it `is_for`. Of a share's first inputs `last` are
    summed last, as among few rows. Shape: out [T, N] or, gated, [T, N / 2]
    """
    num_rows, num_out = out.shape
    most_programs = num_programs(matrix.codes.device, 1)
    outs = _outs(num_rows, num_out, most_programs, num_splits, gated)
    num_tiles = _num_tiles(num_rows, num_out, outs // 2 if gated else outs)
    x_codes, codes = descriptor_of(x.codes, ROWS.value), descriptor_of(matrix.codes, outs // 2)
    _row_scaled_kernel[(min(most_programs, num_tiles),)](
        out, x_codes, x.scale, codes, matrix.scale, out if bias is None else bias, num_rows,
        num_out, x.codes.shape[1] // _BLOCK.value // num_splits,
        STAGES=4 if outs == _WIDE else 6, OUTS=outs, LAST=last // _BLOCK.value, SPLITS=num_splits,
        HAS_BIAS=bias is not None, GATED=gated, ADDS=adds, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _outs(num_rows: int, num_out: int, most_programs: int, num_splits: int, gated: bool) -> int:
    """How many rows of the matrix a tile has: as few turns of all programs as there can be."""
    if gated or num_splits > 1:
        return _WIDE if gated else _NARROW

    def cost(outs: int) -> float:
        turns: int = triton.cdiv(_num_tiles(num_rows, num_out, outs), most_programs)
        return turns * outs * (1 if outs == _WIDE else _MORE_COPIES)

    return min(_WIDE, _NARROW, key=cost)


def _num_tiles(num_rows: int, num_out: int, outs: int) -> int:
    num_tiles: int = triton.cdiv(num_rows, BLOCK_ROWS) * triton.cdiv(num_out, outs)
    return num_tiles


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, tiles, num_rows, num_out, share,
    STAGES: gl.constexpr, OUTS: gl.constexpr, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """The first or second 64 rows of all tiles. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTS, 32])
    STORED: gl.constexpr = OUTS // 2 if GATED else OUTS
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    num_m, num_n = gl.cdiv(num_rows, 2 * ROWS), gl.cdiv(num_out, STORED)
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        row_block, block = tile_of_program(tile, num_m, num_n, _TOGETHER)
        first_row, first_out = (2 * row_block + WHICH) * ROWS, block * STORED
        m = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
        i = gl.arange(0, OUTS, gl.SliceLayout(0, ACC))
        is_out = first_out + i % STORED < num_out
        weight_row = first_out + i % STORED + i // STORED * num_out
        x_scale = gl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)[:, None]
        sums, step = sums_of_share(WHICH, step, share, tiles, STAGES, OUTS, ACC)
        scale = gl.load(scale_ptr + weight_row, mask=is_out, other=0.0).to(gl.float32)[None, :]
        total = sums * scale * x_scale
        if ADDS:
            at = out_ptr + m.to(gl.int64)[:, None] * num_out + (first_out + i)[None, :]
            inside = (m < num_rows)[:, None] & is_out[None, :]
            total += gl.load(at, mask=inside, other=0.0).to(gl.float32)
        for _ in gl.static_range(1, SPLITS):
            sums, step = sums_of_share(WHICH, step, share, tiles, STAGES, OUTS, ACC)
            total += sums * scale * x_scale
        if HAS_BIAS:
            bias = gl.load(bias_ptr + weight_row, mask=is_out, other=0.0)
            total += bias.to(gl.float32)[None, :]
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        if GATED:
            gate, up = in_halves(total, OUTS)
            _store((silu(gate) * up).to(dtype), out_ptr, first_row, first_out, num_rows, num_out)
        elif OUTS == _STORED:
            _store(total.to(dtype), out_ptr, first_row, first_out, num_rows, num_out)
        else:
            left, right = in_halves(total.to(dtype), OUTS)
            _store(left, out_ptr, first_row, first_out, num_rows, num_out)
            _store(right, out_ptr, first_row, first_out + _STORED, num_rows, num_out)


@gluon.jit
def _store(values, out_ptr, first_row, first_out, num_rows, num_out):
    """Store [64, 128] outputs."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    m = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    n = (first_out + gl.arange(0, _STORED, gl.SliceLayout(0, LAYOUT)))[None, :]
    at = out_ptr + m.to(gl.int64) * num_out + n
    gl.store(at, gl.convert_layout(values, LAYOUT), mask=(m < num_rows) & (n < num_out))


@gluon.jit(do_not_specialize=["num_rows", "share"])
def _row_scaled_kernel(
    out_ptr,  # [num_rows, num_out]
    x_codes,  # [num_rows, SPLITS * share * 128]: a descriptor
    x_scale_ptr,  # [num_rows]
    codes,  # [num_out or 2 * num_out, SPLITS * share * 128]: a descriptor
    scale_ptr,  # [num_out or 2 * num_out]
    bias_ptr,  # [num_out or 2 * num_out], if HAS_BIAS
    num_rows,
    num_out,
    share,  # blocks of inputs that one sum is of
    STAGES: gl.constexpr,
    OUTS: gl.constexpr,  # rows of the matrix in a tile
    LAST: gl.constexpr,  # of a share's first blocks, how many are summed last
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADDS: gl.constexpr,
):
    """Each program strides over the tiles, all its warps in step."""
    tiles = tiles_of(gl.float8e4nv, _BLOCK, STAGES, OUTS)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                0, pointers, tiles, num_rows, num_out, share, STAGES, OUTS, SPLITS, HAS_BIAS,
                GATED, ADDS)),
            (_multiply, (
                1, pointers, tiles, num_rows, num_out, share, STAGES, OUTS, SPLITS, HAS_BIAS,
                GATED, ADDS)),
            (copy_tiles, (
                (x_codes, codes), tiles, num_rows, num_out, SPLITS * share, share, _BLOCK, STAGES,
                OUTS, LAST, GATED, _TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
