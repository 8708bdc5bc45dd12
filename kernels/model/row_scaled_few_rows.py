"""`scaled_product` of some rows on a Hopper GPU, where each row and each output has one scale:

    y[t, n] = scale_x[t] * scale_w[n] * sum of code_x * code_w

Up to 256 rows have tiles of several sizes, so that 160 rows do not cost what 256 do. How codes come
is in `few_rows_codes.py`. A row is summed in the same order as by the kernel for any GPU and among
many rows, so its bits are the same.
"""

from torch import Tensor

from .._dispatch import shared_bytes
from ..dependent_launch import start_next_kernel, wait_for_inputs
from ..triton_or_none import gl, gluon, hopper
from .few_rows_codes import (
    BLOCK,
    OUTS,
    copy_codes,
    options_of,
    registers_for_sums,
    share_out,
    stages_of,
)
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .warpgroups import descriptor_of, tiles_of_program

mbarrier = hopper.mbarrier

# Of a tile: each is compiled anew, and a step of 160 or 192 rows is worth it.
ROWS = ((64, 0), (128, 0), (128, 32), (128, 64), (128, 128))
MOST_ROWS = sum(ROWS[-1])
_BOX = gl.constexpr(8)  # if gated, each second box of a tile is of `up`: a thread has both halves
_OTHER_REGISTERS = 32  # of a thread, beside its sums
_HANDED = 1024  # bytes of shared memory, beside outputs, by which warps get what they work with


def row_scaled_few_rows(
    out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None, *, num_splits: int,
    last: int, gated: bool,
) -> None:  # fmt: skip
    """As `scaled_product` of at most 256 rows, by a matrix that `row_scaled_product` is for.

    Of a share's first inputs `last` are summed last.
    Shape: out [T, N] or, gated, [T, N / 2], or parts [num_splits, T, N] float32
    """
    num_rows, num_out = out.shape[-2:]
    rows, more = rows_of(num_rows)
    block, device = BLOCK.value, matrix.codes.device
    x_codes, more_codes = (descriptor_of(x.codes, size) for size in (rows, more or rows))
    codes = descriptor_of(matrix.codes, _BOX.value if gated else OUTS.value)
    most = _most_warpgroups(rows + more)
    tiles, programs = share_out(num_out, num_splits, most, device, gated=gated)
    stage = (tiles * OUTS.value + rows + more) * block
    handed = tiles * (OUTS.value // 2 if gated else OUTS.value) * rows * 2 + _HANDED
    _row_scaled_few_rows_kernel[programs, num_splits](
        out, x_codes, more_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, x.codes.shape[1] // block // num_splits, ROWS=rows, MORE=more,
        STAGES=min(8, (shared_bytes(device) - handed) // stage), LAST=last // block,
        HAS_BIAS=bias is not None, GATED=gated, **options_of(tiles, device),
    )  # fmt: skip


def _most_warpgroups(rows: int) -> int:
    """How many have registers for the sums of so many rows."""
    needed = rows // 2 + _OTHER_REGISTERS
    return max(n for n in range(1, 6) if registers_for_sums(n) >= needed)


def rows_of(num_rows: int) -> tuple[int, int]:
    """Rows of a tile, in one or two powers of two."""
    return next(rows for rows in ROWS if num_rows <= sum(rows))


@gluon.jit
def _start(tile, x_tile, sums, USE: gl.constexpr):
    """The products of a block."""
    return hopper.warpgroup_mma(tile, x_tile.permute((1, 0)), sums, use_acc=USE, is_async=True)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, stages, num_rows, num_out, share, ROWS: gl.constexpr,
    MORE: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    TILES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The products and sums of a tile. One warpgroup."""
    x_tiles, more_tiles, boxes, has, free = stages
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    MORE_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or ROWS, 32])
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    PENDING: gl.constexpr = 2 if MORE > 0 else 1  # products of a block
    tiles = boxes._reinterpret(gl.float8e4nv, [STAGES * TILES, OUTS, BLOCK], CODES)
    first, count = tiles_of_program(num_out, OUTS // 2 if GATED else OUTS)
    sums = gl.zeros([OUTS, ROWS], gl.float32, ACC)
    more = gl.zeros([OUTS, MORE or ROWS], gl.float32, MORE_ACC)
    # A warpgroup without a tile goes along, with whatever is in its place.
    stage = 0
    mbarrier.wait(has.index(0), 0)
    sums = _start(tiles.index(WHICH), x_tiles.index(0), sums, False)
    if MORE > 0:
        more = _start(tiles.index(WHICH), more_tiles.index(0), more, False)
        sums, more = hopper.warpgroup_mma_wait(PENDING, deps=[sums, more])
    else:
        sums = hopper.warpgroup_mma_wait(PENDING, deps=[sums])
    for block in range(1, share):
        before, stage = stage, block % STAGES
        mbarrier.wait(has.index(stage), block // STAGES & 1)
        sums = _start(tiles.index(TILES * stage + WHICH), x_tiles.index(stage), sums, True)
        if MORE > 0:
            more = _start(tiles.index(TILES * stage + WHICH), more_tiles.index(stage), more, True)
            sums, more = hopper.warpgroup_mma_wait(PENDING, deps=[sums, more])
        else:
            sums = hopper.warpgroup_mma_wait(PENDING, deps=[sums])
        mbarrier.arrive(free.index(before), count=1)
    if MORE > 0:
        sums, more = hopper.warpgroup_mma_wait(0, deps=[sums, more])
    else:
        sums = hopper.warpgroup_mma_wait(0, deps=[sums])
    wait_for_inputs(DEPENDENT)
    _finish(WHICH, pointers, sums, 0, first, count, num_rows, num_out, ROWS, HAS_BIAS, GATED)
    if MORE > 0:
        _finish(WHICH, pointers, more, ROWS, first, count, num_rows, num_out, MORE, HAS_BIAS, GATED)


@gluon.jit
def _finish(
    WHICH: gl.constexpr, pointers, sums, first_row, first, count, num_rows, num_out,
    ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Scale the sums of a tile, and store its outputs."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    STORED: gl.constexpr = OUTS // 2 if GATED else OUTS
    first_out = (first + WHICH) * STORED
    i = gl.arange(0, OUTS, gl.SliceLayout(1, ACC))
    if GATED:
        n = first_out + i // (2 * _BOX) * _BOX + i % _BOX
        weight_row = n + i // _BOX % 2 * num_out
    else:
        n = first_out + i
        weight_row = n
    is_out = (n < num_out) & (count > WHICH)
    m = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    scale = gl.load(scale_ptr + weight_row, mask=is_out, other=0.0).to(gl.float32)[:, None]
    x_scale = gl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)[None, :]
    total = sums * scale * x_scale
    if HAS_BIAS:
        bias = gl.load(bias_ptr + weight_row, mask=is_out, other=0.0)
        total += bias.to(gl.float32)[:, None]
    if dtype == gl.float32:  # parts: eight in a row are stored at once
        at = out_ptr + (gl.program_id(1) * num_rows + m).to(gl.int64)[None, :] * num_out
        gl.store(at + n[:, None], total, mask=(m < num_rows)[None, :] & is_out[:, None])
    else:
        if GATED:
            halves = gl.permute(gl.reshape(total, [4, 2, _BOX, ROWS]), (0, 2, 3, 1))
            gate, up = gl.split(halves)
            total = gl.reshape(silu(gate) * up, [STORED, ROWS])
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [8, 1], [STORED // 8, 32 // (STORED // 8)], [1, 4], [0, 1]
        )
        values = gl.convert_layout(total.to(dtype), LAYOUT)
        n = (first_out + gl.arange(0, STORED, gl.SliceLayout(1, LAYOUT)))[:, None]
        m = (first_row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)))[None, :]
        is_there = (n < num_out) & (m < num_rows) & (count > WHICH)
        gl.store(out_ptr + m.to(gl.int64) * num_out + n, values, mask=is_there)


@gluon.jit(do_not_specialize=["num_rows", "share"])
def _row_scaled_few_rows_kernel(
    out_ptr,  # [num_rows, num_out], or parts [splits, num_rows, num_out] float32
    x_codes,  # [num_rows, splits * share * 128]: a descriptor, whose boxes have ROWS rows
    more_codes,  # the same, with MORE rows
    x_scale_ptr,  # [num_rows]
    codes,  # [num_out or 2 * num_out, splits * share * 128]: a descriptor
    scale_ptr,  # [num_out or 2 * num_out]
    bias_ptr,  # [num_out or 2 * num_out], if HAS_BIAS
    num_rows,
    num_out,
    share,  # blocks of inputs that one sum is of
    ROWS: gl.constexpr,
    MORE: gl.constexpr,  # rows of a tile behind those, or 0
    STAGES: gl.constexpr,
    LAST: gl.constexpr,  # of a share's first blocks, how many are summed last
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    TILES: gl.constexpr,  # of a program
    WARPS: gl.constexpr,  # of each part of a program after the first
    REGISTERS: gl.constexpr,  # of their threads
    DEPENDENT: gl.constexpr,
):
    """Each program: some tiles of 64 outputs or, gated, 32 of all rows, over a share of inputs."""
    start_next_kernel(DEPENDENT)
    BOXES: gl.constexpr = OUTS // _BOX if GATED else 1
    stages = stages_of(ROWS, MORE, STAGES, TILES, BOXES)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [  # warpgroups that multiply, and a warp
            (copy_codes, (
                (x_codes, more_codes, codes), stages, num_out, share, ROWS, MORE, STAGES, LAST,
                TILES, BOXES, DEPENDENT))
            if which == TILES
            else (_multiply, (
                which, pointers, stages, num_rows, num_out, share, ROWS, MORE, STAGES, HAS_BIAS,
                GATED, TILES, DEPENDENT))
            for which in (0, 1, 2, 3, 4, 5)[: TILES + 1]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
