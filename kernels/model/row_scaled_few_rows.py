"""`scaled_product` of some rows on a Hopper GPU, where each row and each output has one scale:

    y[t, n] = scale_x[t] * scale_w[n] * sum of code_x * code_w

Outputs lie along the tensor cores' long side, and a program has all rows, up to 256: each weight is
read once, and 160 rows do not cost what 256 do. A program fills a multiprocessor: it has a
warpgroup for each tile of outputs that one gets, and a warp that copies codes into shared memory
some blocks ahead, the rows' codes once for all warpgroups. It starts with weights, while the kernel
that makes the rows still runs. A row is summed in the same order as by the kernel for any GPU and
among many rows, so its bits are the same.
"""

from torch import Tensor

from .._dispatch import num_programs, shared_bytes
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper, triton
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .warpgroups import barriers_of, registers_of, shared_out, tiles_of_program

mbarrier, tma = hopper.mbarrier, hopper.tma

# Of a tile: each is compiled anew, and a step of 160 or 192 rows is worth it.
ROWS = ((64, 0), (128, 0), (128, 32), (128, 64), (128, 128))
MOST_ROWS = sum(ROWS[-1])
_BLOCK = gl.constexpr(128)  # inputs that are copied at once
_OUTS = gl.constexpr(64)  # rows of the matrix in a tile
_BOX = gl.constexpr(8)  # if gated, each second box of a tile is of `up`: a thread has both halves
_COPY_REGISTERS = 24
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
    layout, device = gl.NVMMASharedLayout(128, 8), matrix.codes.device
    x_codes, more_codes, codes = (
        TensorDescriptor.from_tensor(each, [size, _BLOCK.value], layout)
        for each, size in (
            (x.codes, rows),
            (x.codes, more or rows),
            (matrix.codes, _BOX.value if gated else _OUTS.value),
        )
    )
    outs = _OUTS.value // 2 if gated else _OUTS.value
    num_tiles, num_sms = triton.cdiv(num_out, outs), num_programs(device, 1)
    tiles, programs = shared_out(num_tiles, num_splits, num_sms, _most_warpgroups(rows + more))
    registers, own = registers_of(tiles, _COPY_REGISTERS)
    stage = (tiles * _OUTS.value + rows + more) * _BLOCK.value
    handed = tiles * outs * rows * 2 + _HANDED
    share = x.codes.shape[1] // _BLOCK.value // num_splits
    _row_scaled_few_rows_kernel[programs, num_splits](
        out, x_codes, more_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, share, ROWS=rows, MORE=more,
        STAGES=min(8, (shared_bytes(device) - handed) // stage),
        LAST=last // _BLOCK.value, HAS_BIAS=bias is not None, GATED=gated, TILES=tiles,
        WARPS=(4,) * (tiles - 1) + (1,), REGISTERS=(own,) * (tiles - 1) + (_COPY_REGISTERS,),
        num_warps=4, maxnreg=registers, enable_fp_fusion=False, **dependent_launch(device),
    )  # fmt: skip


def _most_warpgroups(rows: int) -> int:
    """How many have registers for the sums of so many rows."""
    needed = rows // 2 + _OTHER_REGISTERS
    return max(n for n in range(1, 6) if registers_of(n, _COPY_REGISTERS)[1] >= needed)


def rows_of(num_rows: int) -> tuple[int, int]:
    """Rows of a tile, in one or two powers of two."""
    return next(rows for rows in ROWS if num_rows <= sum(rows))


@gluon.jit
def _place(block, share, LAST: gl.constexpr):
    """The first input of a block."""
    return (gl.program_id(1) * share + (block + LAST) % share) * _BLOCK


@gluon.jit
def _copy_weights(
    codes, boxes, has, block, share, num_out, first, count, ALL_ROWS: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr, LAST: gl.constexpr, GATED: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Have the weights of a block copied. The rows must follow: the stage opens with both."""
    stage = block % STAGES
    for i in gl.static_range(TILES):
        if count == i + 1:
            mbarrier.expect(has.index(stage), ((i + 1) * _OUTS + ALL_ROWS) * _BLOCK)
    k = _place(block, share, LAST)
    for i in gl.static_range(TILES * BOXES):
        if i // BOXES < count:
            if GATED:
                row = (first * BOXES + i) // 2 * _BOX + i % 2 * num_out
            else:
                row = (first + i) * _OUTS
            tma.async_copy_global_to_shared(
                codes, [row, k], has.index(stage), boxes.index(TILES * BOXES * stage + i)
            )


@gluon.jit
def _copy_rows(
    x_codes, more_codes, x_tiles, more_tiles, has, block, share, ROWS: gl.constexpr,
    MORE: gl.constexpr, STAGES: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    stage, k = block % STAGES, _place(block, share, LAST)
    tma.async_copy_global_to_shared(x_codes, [0, k], has.index(stage), x_tiles.index(stage))
    if MORE > 0:
        tma.async_copy_global_to_shared(
            more_codes, [ROWS, k], has.index(stage), more_tiles.index(stage)
        )


@gluon.jit
def _copy(
    x_codes, more_codes, codes, x_tiles, more_tiles, boxes, has, free, num_out, share,
    ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr,
    LAST: gl.constexpr, GATED: gl.constexpr, TILES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have the codes of a share copied, block by block. One warp."""
    first, count = tiles_of_program(num_out, _OUTS // 2 if GATED else _OUTS)
    for block in range(gl.minimum(STAGES, share)):
        _copy_weights(
            codes, boxes, has, block, share, num_out, first, count, ROWS + MORE, STAGES, BOXES,
            LAST, GATED, TILES,
        )  # fmt: skip
    wait_for_inputs(DEPENDENT)
    for block in range(gl.minimum(STAGES, share)):
        _copy_rows(
            x_codes, more_codes, x_tiles, more_tiles, has, block, share, ROWS, MORE, STAGES, LAST
        )
    for block in range(STAGES, share):
        mbarrier.wait(free.index(block % STAGES), (block // STAGES & 1) ^ 1)
        _copy_weights(
            codes, boxes, has, block, share, num_out, first, count, ROWS + MORE, STAGES, BOXES,
            LAST, GATED, TILES,
        )  # fmt: skip
        _copy_rows(
            x_codes, more_codes, x_tiles, more_tiles, has, block, share, ROWS, MORE, STAGES, LAST
        )


@gluon.jit
def _start(tile, x_tile, sums, USE: gl.constexpr):
    """The products of a block."""
    return hopper.warpgroup_mma(tile, x_tile.permute((1, 0)), sums, use_acc=USE, is_async=True)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, x_tiles, more_tiles, boxes, has, free, num_rows, num_out, share,
    ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, TILES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The products and sums of a tile. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    MORE_ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or ROWS, 32])
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    PENDING: gl.constexpr = 2 if MORE > 0 else 1  # products of a block
    tiles = boxes._reinterpret(gl.float8e4nv, [STAGES * TILES, _OUTS, _BLOCK], CODES)
    first, count = tiles_of_program(num_out, _OUTS // 2 if GATED else _OUTS)
    sums = gl.zeros([_OUTS, ROWS], gl.float32, ACC)
    more = gl.zeros([_OUTS, MORE or ROWS], gl.float32, MORE_ACC)
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
    OUTS: gl.constexpr = _OUTS // 2 if GATED else _OUTS
    first_out = (first + WHICH) * OUTS
    i = gl.arange(0, _OUTS, gl.SliceLayout(1, ACC))
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
            total = gl.reshape(silu(gate) * up, [OUTS, ROWS])
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [8, 1], [OUTS // 8, 32 // (OUTS // 8)], [1, 4], [0, 1]
        )
        values = gl.convert_layout(total.to(dtype), LAYOUT)
        n = (first_out + gl.arange(0, OUTS, gl.SliceLayout(1, LAYOUT)))[:, None]
        m = (first_row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)))[None, :]
        is_there = (n < num_out) & (m < num_rows) & (count > WHICH)
        gl.store(out_ptr + m.to(gl.int64) * num_out + n, values, mask=is_there)


@gluon.jit
def _work(
    WHICH: gl.constexpr, pointers, x_codes, more_codes, codes, x_tiles, more_tiles, boxes, has,
    free, num_rows, num_out, share, ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, LAST: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    TILES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What a warpgroup does or, behind the last of them, a warp."""
    if WHICH < TILES:
        _multiply(
            WHICH, pointers, x_tiles, more_tiles, boxes, has, free, num_rows, num_out, share, ROWS,
            MORE, STAGES, HAS_BIAS, GATED, TILES, DEPENDENT,
        )  # fmt: skip
    else:
        _copy(
            x_codes, more_codes, codes, x_tiles, more_tiles, boxes, has, free, num_out, share,
            ROWS, MORE, STAGES, BOXES, LAST, GATED, TILES, DEPENDENT,
        )  # fmt: skip


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
    BOXES: gl.constexpr = _OUTS // _BOX if GATED else 1
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    code: gl.constexpr = gl.float8e4nv
    boxes = gl.allocate_shared_memory(code, [STAGES * TILES * BOXES, _OUTS // BOXES, _BLOCK], CODES)
    x_tiles = gl.allocate_shared_memory(code, [STAGES, ROWS, _BLOCK], CODES)
    more_tiles = x_tiles
    if MORE > 0:
        more_tiles = gl.allocate_shared_memory(code, [STAGES, MORE, _BLOCK], CODES)
    has, free = barriers_of(STAGES, 1), barriers_of(STAGES, TILES)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_work, (
                which, pointers, x_codes, more_codes, codes, x_tiles, more_tiles, boxes, has, free,
                num_rows, num_out, share, ROWS, MORE, STAGES, BOXES, LAST, HAS_BIAS, GATED, TILES,
                DEPENDENT))
            for which in (0, 1, 2, 3, 4, 5)[: TILES + 1]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
