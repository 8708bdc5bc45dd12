"""`scaled_product` of many rows on a Hopper GPU, where blocks of 128 x 128 weights share a scale:

    y[t, n] = sum over groups of 128 inputs of
              scale_x[t, group] * scale_w[group, n // 128] * sum of code_x * code_w

A program has two warpgroups of 64 rows each, and a warp that copies codes into shared memory some
groups ahead. While a group's sums are scaled and added up, the next group is multiplied: tensor
cores would wait otherwise. A row is summed in the same order as among few rows, so its bits are the
same.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..triton_or_none import gl, gluon, hopper, triton
from .many_rows_tiles import BLOCK_ROWS, ROWS, copy_tiles, in_halves, tiles_of
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .tiles import tile_of_program
from .warpgroups import descriptor_of, has_warpgroups

mbarrier = hopper.mbarrier

_GROUP = gl.constexpr(128)  # inputs that share a scale
_OUTS = gl.constexpr(128)  # outputs that share a scale: the rows of the matrix in a tile
_HALF = gl.constexpr(64)  # of them, which are copied at once; if gated, the others are of `up`
_TOGETHER = gl.constexpr(8)  # blocks of rows whose programs run together and share the matrix

# Devices on which it does not work; `scaled_trial` finds them out.
failed: set[torch.device] = set()


def is_for(matrix: NarrowMatrix, *, num_splits: int = 1, gated: bool = False) -> bool:
    """Whether it multiplies rows with such a matrix."""
    num_out, width = matrix.codes.shape
    return (
        matrix.codes.dtype == torch.float8_e4m3fn
        and (matrix.group, matrix.rows) == (_GROUP.value, _OUTS.value)
        and width % (2 * _GROUP.value * num_splits) == 0
        and (not gated or num_out % _OUTS.value == 0)
        and has_warpgroups(matrix.codes.device)
        and matrix.codes.device not in failed
    )


def block_scaled_product(
    out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None, *, num_splits: int,
    gated: bool, adds: bool,
) -> None:  # fmt: skip
    """As `scaled_product`, by a matrix that it `is_for`. Shape: out [T, N] or, gated, [T, N / 2]"""
    num_rows, num_out = out.shape
    x_codes, codes = (descriptor_of(each, _HALF.value) for each in (x.codes, matrix.codes))
    outs = _HALF.value if gated else _OUTS.value
    num_tiles = triton.cdiv(num_rows, BLOCK_ROWS) * triton.cdiv(num_out, outs)
    _block_scaled_kernel[(min(num_programs(matrix.codes.device, 1), num_tiles),)](
        out, x_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, len(matrix.scale), matrix.scale.stride(0),
        STAGES=6 if num_splits == 1 else 4, SPLITS=num_splits, HAS_BIAS=bias is not None,
        GATED=gated, ADDS=adds, num_warps=4, enable_fp_fusion=False,  # as of few rows
    )  # fmt: skip


@gluon.jit
def _start(WHICH: gl.constexpr, step, tiles, has, STAGES: gl.constexpr, ACC: gl.constexpr):
    """Have a group multiplied once it is there."""
    x_tiles, w_tiles = tiles
    stage, phase = step % STAGES, step // STAGES & 1
    none = gl.zeros([ROWS, _OUTS], gl.float32, ACC)
    mbarrier.wait(has.index(stage), phase)
    return hopper.warpgroup_mma(
        x_tiles.index(2 * stage + WHICH), w_tiles.index(stage).permute((1, 0)), none,
        use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _scales(scales_at, group, scale_stride, is_row, GATED: gl.constexpr):
    """Those of a group: of its rows, of the matrix and, if gated, of `up`."""
    x_scale_at, scale_at, up_at = scales_at
    x_scale = gl.load(x_scale_at + group, mask=is_row, other=0.0)
    scale = gl.load(scale_at + group * scale_stride).to(gl.float32)
    up = scale
    if GATED:
        up = gl.load(up_at + group * scale_stride).to(gl.float32)
    return x_scale, scale, up


@gluon.jit
def _add(total, sums, scales, GATED: gl.constexpr, ACC: gl.constexpr):
    """A group's sums, scaled, to those before."""
    x_scale, scale, up = scales
    scale = (x_scale * scale)[:, None]
    if GATED:
        up = (x_scale * up)[:, None]
        i = gl.arange(0, _OUTS, gl.SliceLayout(0, ACC))[None, :]
        scale = gl.where(i < _HALF, scale, up)
    return gl.fma(sums, scale, total)


@gluon.jit
def sums_of_share(
    WHICH: gl.constexpr, step, first, num_groups, tiles, has, free, scales_at, scale_stride, is_row,
    STAGES: gl.constexpr, GATED: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Products over the groups from `first` on: one is under way while that before is scaled."""
    total = gl.zeros([ROWS, _OUTS], gl.float32, ACC)
    for group in range(first, first + num_groups, 2):
        # They are multiplied after the products begin: a warp would wait for them before, and
        # nothing be under way.
        scales_a = _scales(scales_at, group, scale_stride, is_row, GATED)
        scales_b = _scales(scales_at, group + 1, scale_stride, is_row, GATED)
        a = _start(WHICH, step, tiles, has, STAGES, ACC)
        b = _start(WHICH, step + 1, tiles, has, STAGES, ACC)
        a = hopper.warpgroup_mma_wait(1, deps=[a])
        mbarrier.arrive(free.index(step % STAGES), count=1)
        total = _add(total, a, scales_a, GATED, ACC)
        b, total = hopper.warpgroup_mma_wait(0, deps=[b, total])
        mbarrier.arrive(free.index((step + 1) % STAGES), count=1)
        total = _add(total, b, scales_b, GATED, ACC)
        step += 2
    return total, step


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, tiles, has, free, sums, num_rows, num_out, num_groups,
    scale_stride, STAGES: gl.constexpr, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """The first or second 64 rows of all tiles. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTS, 32])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    # A thread of ACC has a gate's sums and those of its `up`, and keeps its sums between shares.
    WHOLE: gl.constexpr = ACC if GATED or SPLITS > 1 else STORED
    OUTS: gl.constexpr = _HALF if GATED else _OUTS
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    num_m, num_n = gl.cdiv(num_rows, 2 * ROWS), gl.cdiv(num_out, OUTS)
    share = num_groups // SPLITS
    step = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        row_block, block = tile_of_program(tile, num_m, num_n, _TOGETHER)
        first_row, first_out = (2 * row_block + WHICH) * ROWS, block * OUTS
        m = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
        is_row = m < num_rows
        scales_at = (
            x_scale_ptr + m * num_groups, scale_ptr + first_out // _OUTS,
            scale_ptr + (first_out + num_out) // _OUTS,
        )  # fmt: skip
        total, step = sums_of_share(
            WHICH, step, 0, share, tiles, has, free, scales_at, scale_stride, is_row, STAGES,
            GATED, ACC,
        )  # fmt: skip
        total = gl.convert_layout(total, WHOLE)

        m = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, STORED)))[:, None]
        n = (first_out + gl.arange(0, OUTS, gl.SliceLayout(0, STORED)))[None, :]
        out_at = out_ptr + m.to(gl.int64) * num_out + n
        mask = (m < num_rows) & (n < num_out)
        if ADDS and SPLITS == 1:
            total += gl.load(out_at, mask=mask, other=0.0).to(gl.float32)
        for each in gl.static_range(1, SPLITS):
            sums.index(WHICH).store(total)  # registers hold no second sum beside two products
            more, step = sums_of_share(
                WHICH, step, each * share, share, tiles, has, free, scales_at, scale_stride, is_row,
                STAGES, GATED, ACC,
            )  # fmt: skip
            total = sums.index(WHICH).load(WHOLE)
            if ADDS and each == 1:  # to the first share, as few rows do
                residual = gl.load(out_at, mask=mask, other=0.0)
                total += gl.convert_layout(residual, WHOLE).to(gl.float32)
            total += more
        if HAS_BIAS:
            i = gl.arange(0, _OUTS, gl.SliceLayout(0, WHOLE))
            weight_row = first_out + i % OUTS + i // OUTS * num_out
            bias = gl.load(bias_ptr + weight_row, mask=first_out + i % OUTS < num_out, other=0.0)
            total += bias.to(gl.float32)[None, :]
        if GATED:
            gate, up = in_halves(total, _OUTS)
            total = silu(gate) * up
        total = gl.convert_layout(total.to(out_ptr.dtype.element_ty), STORED)
        gl.store(out_at, total, mask=mask)


@gluon.jit(do_not_specialize=["num_rows"])
def _block_scaled_kernel(
    out_ptr,  # [num_rows, num_out]
    x_codes,  # [num_rows, num_groups * 128]: a descriptor
    x_scale_ptr,  # [num_rows, num_groups]
    codes,  # [num_out or 2 * num_out, num_groups * 128]: a descriptor
    scale_ptr,  # [num_groups, num_out / 128]
    bias_ptr,  # [num_out or 2 * num_out], if HAS_BIAS
    num_rows,
    num_out,
    num_groups,
    scale_stride,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADDS: gl.constexpr,
):
    """Each program strides over the tiles, all its warps in step."""
    copied = tiles_of(gl.float8e4nv, _GROUP, STAGES, _OUTS)
    x_tiles, _, w_tiles, has, free = copied
    tiles = (x_tiles, w_tiles)
    sums = x_tiles  # not used
    if SPLITS > 1:
        sums = gl.allocate_shared_memory(
            gl.float32, [2, ROWS, _OUTS], gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
        )
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                0, pointers, tiles, has, free, sums, num_rows, num_out, num_groups, scale_stride,
                STAGES, SPLITS, HAS_BIAS, GATED, ADDS)),
            (_multiply, (
                1, pointers, tiles, has, free, sums, num_rows, num_out, num_groups, scale_stride,
                STAGES, SPLITS, HAS_BIAS, GATED, ADDS)),
            (copy_tiles, (
                (x_codes, codes), copied, num_rows, num_out, num_groups, 0, _GROUP, STAGES, _OUTS,
                0, GATED, _TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
