"""`scaled_product` of few rows on a Hopper GPU, where blocks of 128 x 128 weights share a scale:

    y[t, n] = sum over groups of 128 inputs of
              scale_x[t, group] * scale_w[group, n // 128] * sum of code_x * code_w

The time is that of reading the weights, so each multiprocessor must have many bytes under way all
the time. A program fills a multiprocessor: it has a warpgroup for each tile of outputs that one
gets, and a warp that copies codes into shared memory as many groups ahead as fit there, the rows'
codes once for all warpgroups. It starts with weights, while the kernel that makes the rows still
runs. Any number of rows is summed in the same order.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs, shared_bytes
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper, triton
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .warpgroups import barriers_of, registers_of, shared_out, tiles_of_program

mbarrier, tma = hopper.mbarrier, hopper.tma

FEW_ROWS = 64
_GROUP = gl.constexpr(128)  # inputs that share a scale
_SCALE_OUTS = gl.constexpr(128)  # outputs that share a scale
_OUTS = gl.constexpr(64)  # rows of the matrix in a tile; if gated, the second half is of `up`
_TOGETHER = gl.constexpr(8)  # groups whose rows' scales a warpgroup loads at once
_MOST_WARPGROUPS = 5  # registers hold the sums of so many
_HANDED = 512  # bytes of shared memory, by which warps get what they work with, and a barrier
_COPY_REGISTERS = 24


def block_scaled_few_rows(
    out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None, *, num_splits: int,
    gated: bool,
) -> None:  # fmt: skip
    """As `scaled_product` of at most 64 rows, by a matrix that `block_scaled_product` is for.

    Shape: out [T, N] or, gated, [T, N / 2], or parts [num_splits, T, N] float32
    """
    num_rows, num_out = out.shape[-2:]
    rows = max(8, triton.next_power_of_2(num_rows))
    outs = _OUTS.value // 2 if gated else _OUTS.value
    layout = gl.NVMMASharedLayout(128, 8)
    x_codes = TensorDescriptor.from_tensor(x.codes, [rows, _GROUP.value], layout)
    codes = TensorDescriptor.from_tensor(matrix.codes, [outs, _GROUP.value], layout)
    groups, device = len(matrix.scale) // num_splits, matrix.codes.device
    num_tiles, num_sms = triton.cdiv(num_out, outs), num_programs(device, 1)
    tiles, programs = shared_out(num_tiles, num_splits, num_sms, _MOST_WARPGROUPS)
    registers, own = registers_of(tiles, _COPY_REGISTERS)
    _block_scaled_few_rows_kernel[programs, num_splits](
        out, x_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, matrix.scale.stride(0), NUM_GROUPS=len(matrix.scale), GROUPS=groups,
        ROWS=rows, STAGES=_num_stages(rows, tiles, groups, device), HAS_BIAS=bias is not None,
        GATED=gated, TILES=tiles, WARPS=(4,) * (tiles - 1) + (1,),
        REGISTERS=(own,) * (tiles - 1) + (_COPY_REGISTERS,), num_warps=4, maxnreg=registers,
        enable_fp_fusion=False,  # as of many rows
        **dependent_launch(device),
    )  # fmt: skip


def _num_stages(rows: int, tiles: int, groups: int, device: torch.device) -> int:
    """How many groups ahead codes are copied, with so many tiles a program."""
    stage: int = (tiles * _OUTS.value + rows) * _GROUP.value + 2 * 8  # bytes, with its barriers
    scales: int = 4 * (2 * tiles * triton.next_power_of_2(groups) + rows * (groups + 7))
    return min(groups, (shared_bytes(device) - scales - _HANDED) // stage)


@gluon.jit
def _copy_weights(
    codes, boxes, has, group, num_out, first, count, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Have the weights of a group copied. The rows must follow: the stage opens with both."""
    stage = group % STAGES
    for i in gl.static_range(TILES):
        if count == i + 1:
            mbarrier.expect(has.index(stage), ((i + 1) * _OUTS + ROWS) * _GROUP)
    for i in gl.static_range(TILES * BOXES):
        if i // BOXES < count:
            first_out = (first + i // BOXES) * (_OUTS // BOXES) + i % BOXES * num_out
            tma.async_copy_global_to_shared(
                codes, [first_out, (gl.program_id(1) * GROUPS + group) * _GROUP],
                has.index(stage), boxes.index(TILES * BOXES * stage + i),
            )  # fmt: skip


@gluon.jit
def _copy_rows(x_codes, x_tiles, has, group, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    stage = group % STAGES
    tma.async_copy_global_to_shared(
        x_codes, [0, (gl.program_id(1) * GROUPS + group) * _GROUP], has.index(stage),
        x_tiles.index(stage),
    )  # fmt: skip


@gluon.jit
def _copy(
    x_codes, codes, x_tiles, boxes, has, free, num_out, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr, TILES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have the codes of a share copied, group by group. One warp."""
    first, count = tiles_of_program(num_out, _OUTS // BOXES)
    for group in range(STAGES):
        _copy_weights(
            codes, boxes, has, group, num_out, first, count, ROWS, GROUPS, STAGES, BOXES, TILES
        )
    wait_for_inputs(DEPENDENT)
    for group in range(STAGES):
        _copy_rows(x_codes, x_tiles, has, group, GROUPS, STAGES)
    for group in range(STAGES, GROUPS):
        mbarrier.wait(free.index(group % STAGES), (group // STAGES & 1) ^ 1)
        _copy_weights(
            codes, boxes, has, group, num_out, first, count, ROWS, GROUPS, STAGES, BOXES, TILES
        )
        _copy_rows(x_codes, x_tiles, has, group, GROUPS, STAGES)


@gluon.jit
def _load_scales(
    WHICH: gl.constexpr, scale_ptr, kept, first_out, num_out, scale_stride, GROUPS: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """The weights' scales of a tile and share, into shared memory."""
    # Each lies in another sector of memory: loaded group by group, a program would wait for each.
    KEPT: gl.constexpr = kept.shape[1]
    g = gl.arange(0, KEPT, gl.BlockedLayout([1], [32], [4], [0]))
    scale_at = scale_ptr + (gl.program_id(1) * GROUPS + g) * scale_stride
    for i in gl.static_range(BOXES):
        block = (first_out + i * num_out) // _SCALE_OUTS
        scale = gl.load(scale_at + block, mask=g < GROUPS, other=0.0)
        kept.index(WHICH * BOXES + i).store(scale.to(gl.float32))


@gluon.jit
def _load_row_scales(
    WHICH: gl.constexpr, x_scale_ptr, x_kept, num_rows, NUM_GROUPS: gl.constexpr,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part of the rows' scales of a share, into shared memory."""
    PARTS: gl.constexpr = x_kept.shape[0]
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, 4], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(0, LOADED))[None, :]
    for part in gl.static_range(WHICH, PARTS, TILES):
        g = part * _TOGETHER + gl.arange(0, _TOGETHER, gl.SliceLayout(1, LOADED))[:, None]
        at = x_scale_ptr + m * NUM_GROUPS + gl.program_id(1) * GROUPS + g
        scale = gl.load(at, mask=(g < GROUPS) & (m < num_rows), other=0.0)
        x_kept.index(part).store(scale)


@gluon.jit
def _meet(met, phase):
    """Wait until all warpgroups are here."""
    mbarrier.arrive(met.index(0), count=1)
    mbarrier.wait(met.index(0), phase)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, x_tiles, boxes, kept, x_kept, has, free, met, num_rows, num_out,
    scale_stride, NUM_GROUPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr, TILES: gl.constexpr, HAS_BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The products and sums of a tile. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OUT: gl.constexpr = gl.SliceLayout(1, ACC)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    KEPT: gl.constexpr = kept.shape[1]
    BOX: gl.constexpr = _OUTS // BOXES
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    split = gl.program_id(1)
    first, count = tiles_of_program(num_out, BOX)
    first_out = (first + gl.minimum(WHICH, count - 1)) * BOX
    tiles = boxes._reinterpret(gl.float8e4nv, [STAGES * TILES, _OUTS, _GROUP], CODES)
    scales = kept._reinterpret(gl.float32, [TILES * BOXES * KEPT, 1], VECTOR)
    x_scales = x_kept._reinterpret(gl.float32, [x_kept.shape[0] * _TOGETHER, ROWS], VECTOR)
    _load_scales(WHICH, scale_ptr, kept, first_out, num_out, scale_stride, GROUPS, BOXES)
    wait_for_inputs(DEPENDENT)
    _load_row_scales(WHICH, x_scale_ptr, x_kept, num_rows, NUM_GROUPS, GROUPS, ROWS, TILES)
    _meet(met, 0)

    none = gl.zeros([_OUTS, ROWS], gl.float32, ACC)
    total = none
    # A warpgroup without a tile goes along, with whatever is in its place.
    for group in range(GROUPS):
        stage, phase = group % STAGES, group // STAGES & 1
        mbarrier.wait(has.index(stage), phase)
        part = hopper.warpgroup_mma(
            tiles.index(TILES * stage + WHICH), x_tiles.index(stage).permute((1, 0)), none,
            use_acc=False, is_async=True,
        )  # fmt: skip
        scale = scales.index(WHICH * BOXES * KEPT + group).load(OUT)[:, None]
        if BOXES == 2:
            up = scales.index((WHICH * BOXES + 1) * KEPT + group).load(OUT)[:, None]
            scale = gl.where(gl.arange(0, _OUTS, OUT)[:, None] < BOX, scale, up)
        both = scale * x_scales.index(group).load(gl.SliceLayout(0, ACC))[None, :]
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(free.index(stage), count=1)
        total = gl.fma(part, both, total)

    if HAS_BIAS:
        i = gl.arange(0, _OUTS, OUT)
        n = first_out + i % BOX
        bias = gl.load(bias_ptr + n + i // BOX * num_out, mask=n < num_out, other=0.0)
        total += bias.to(gl.float32)[:, None]
    STORED: gl.constexpr = ACC if BOXES == 1 else gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    if BOXES == 2:
        # The gate and `up` of an output are in two warps: they meet where codes were.
        _meet(met, 1)
        boxes._reinterpret(gl.float32, [TILES, _OUTS, ROWS], PLAIN).index(WHICH).store(total)
        halves = boxes._reinterpret(gl.float32, [2 * TILES, BOX, ROWS], PLAIN)
        gate, up = halves.index(2 * WHICH).load(STORED), halves.index(2 * WHICH + 1).load(STORED)
        total = silu(gate) * up
    n = first_out + gl.arange(0, BOX, gl.SliceLayout(1, STORED))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, STORED))[None, :]
    out_at = out_ptr + (split * num_rows + m).to(gl.int64) * num_out + n
    is_there = (n < num_out) & (m < num_rows) & (count > WHICH)
    gl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_there)


@gluon.jit
def _work(
    WHICH: gl.constexpr, pointers, x_codes, codes, x_tiles, boxes, kept, x_kept, has, free, met,
    num_rows, num_out, scale_stride, NUM_GROUPS: gl.constexpr, GROUPS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BOXES: gl.constexpr, TILES: gl.constexpr,
    HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """What a warpgroup does or, behind the last of them, a warp."""
    if WHICH < TILES:
        _multiply(
            WHICH, pointers, x_tiles, boxes, kept, x_kept, has, free, met, num_rows, num_out,
            scale_stride, NUM_GROUPS, GROUPS, ROWS, STAGES, BOXES, TILES, HAS_BIAS, DEPENDENT,
        )  # fmt: skip
    else:
        _copy(
            x_codes, codes, x_tiles, boxes, has, free, num_out, ROWS, GROUPS, STAGES, BOXES,
            TILES, DEPENDENT,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _block_scaled_few_rows_kernel(
    out_ptr,  # [num_rows, num_out], or parts [splits, num_rows, num_out] float32
    x_codes,  # [num_rows, NUM_GROUPS * 128]: a descriptor
    x_scale_ptr,  # [num_rows, NUM_GROUPS]
    codes,  # [num_out or 2 * num_out, NUM_GROUPS * 128]: a descriptor
    scale_ptr,  # [NUM_GROUPS, num_out / 128]
    bias_ptr,  # [num_out or 2 * num_out], if HAS_BIAS
    num_rows,
    num_out,
    scale_stride,
    NUM_GROUPS: gl.constexpr,
    GROUPS: gl.constexpr,  # of a share of the inputs
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    TILES: gl.constexpr,  # of a program
    WARPS: gl.constexpr,  # of each part of a program after the first
    REGISTERS: gl.constexpr,  # of their threads
    DEPENDENT: gl.constexpr,
):
    """Each program: some tiles of 64 outputs or, gated, 32 of all rows, over a share of inputs."""
    start_next_kernel(DEPENDENT)
    BOXES: gl.constexpr = 2 if GATED else 1
    KEPT: gl.constexpr = triton.next_power_of_2(GROUPS)
    PARTS: gl.constexpr = (GROUPS + _TOGETHER - 1) // _TOGETHER
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    code: gl.constexpr = gl.float8e4nv
    boxes = gl.allocate_shared_memory(code, [STAGES * TILES * BOXES, _OUTS // BOXES, _GROUP], CODES)
    x_tiles = gl.allocate_shared_memory(code, [STAGES, ROWS, _GROUP], CODES)
    kept = gl.allocate_shared_memory(gl.float32, [TILES * BOXES, KEPT], VECTOR)
    x_kept = gl.allocate_shared_memory(gl.float32, [PARTS, _TOGETHER, ROWS], PLAIN)
    has, free, met = barriers_of(STAGES, 1), barriers_of(STAGES, TILES), barriers_of(1, TILES)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_work, (
                which, pointers, x_codes, codes, x_tiles, boxes, kept, x_kept, has, free, met,
                num_rows, num_out, scale_stride, NUM_GROUPS, GROUPS, ROWS, STAGES, BOXES, TILES,
                HAS_BIAS, DEPENDENT))
            for which in (0, 1, 2, 3, 4, 5)[: TILES + 1]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
