"""`scaled_product` of few rows on a Hopper GPU, where blocks of 128 x 128 weights share a scale:

    y[t, n] = sum over groups of 128 inputs of
              scale_x[t, group] * scale_w[group, n // 128] * sum of code_x * code_w

The time is that of reading the weights, so each multiprocessor must have many bytes under way all
the time: see `few_rows_codes.py`. Any number of rows is summed in the same order.
"""

import torch
from torch import Tensor

from .._dispatch import shared_bytes
from ..dependent_launch import start_next_kernel, wait_for_inputs
from ..triton_or_none import gl, gluon, hopper, triton
from .few_rows_codes import BLOCK, OUTS, copy_codes, options_of, share_out, stages_of
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .warpgroups import barriers_of, descriptor_of, tiles_of_program

mbarrier = hopper.mbarrier

FEW_ROWS = 64
_SCALE_OUTS = gl.constexpr(128)  # outputs that share a scale, as do the inputs of a block: a group
_TOGETHER = gl.constexpr(8)  # groups whose rows' scales a warpgroup loads at once
_MOST_WARPGROUPS = 5  # registers hold the sums of so many
_HANDED = 512  # bytes of shared memory, by which warps get what they work with, and a barrier


def block_scaled_few_rows(
    out: Tensor, x: RowCodes, matrix: NarrowMatrix, bias: Tensor | None, *, num_splits: int,
    gated: bool,
) -> None:  # fmt: skip
    """As `scaled_product` of at most 64 rows, by a matrix that `block_scaled_product` is for.

    Shape: out [T, N] or, gated, [T, N / 2], or parts [num_splits, T, N] float32
    """
    num_rows, num_out = out.shape[-2:]
    rows = max(8, triton.next_power_of_2(num_rows))
    x_codes = descriptor_of(x.codes, rows)
    codes = descriptor_of(matrix.codes, OUTS.value // 2 if gated else OUTS.value)
    groups, device = len(matrix.scale) // num_splits, matrix.codes.device
    tiles, programs = share_out(num_out, num_splits, _MOST_WARPGROUPS, device, gated=gated)
    _block_scaled_few_rows_kernel[programs, num_splits](
        out, x_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, matrix.scale.stride(0), NUM_GROUPS=len(matrix.scale), GROUPS=groups,
        ROWS=rows, STAGES=_num_stages(rows, tiles, groups, device), HAS_BIAS=bias is not None,
        GATED=gated, **options_of(tiles, device),
    )  # fmt: skip


def _num_stages(rows: int, tiles: int, groups: int, device: torch.device) -> int:
    """How many groups ahead codes are copied, with so many tiles a program."""
    stage: int = (tiles * OUTS.value + rows) * BLOCK.value + 2 * 8  # bytes, with its barriers
    scales: int = 4 * (2 * tiles * triton.next_power_of_2(groups) + rows * (groups + 7))
    return min(groups, (shared_bytes(device) - scales - _HANDED) // stage)


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
    WHICH: gl.constexpr, pointers, stages, kept, x_kept, met, num_rows, num_out, scale_stride,
    NUM_GROUPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, TILES: gl.constexpr, HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The products and sums of a tile. One warpgroup."""
    x_tiles, _, boxes, has, free = stages
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OUT: gl.constexpr = gl.SliceLayout(1, ACC)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    KEPT: gl.constexpr = kept.shape[1]
    BOX: gl.constexpr = OUTS // BOXES
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    split = gl.program_id(1)
    first, count = tiles_of_program(num_out, BOX)
    first_out = (first + gl.minimum(WHICH, count - 1)) * BOX
    tiles = boxes._reinterpret(gl.float8e4nv, [STAGES * TILES, OUTS, BLOCK], CODES)
    scales = kept._reinterpret(gl.float32, [TILES * BOXES * KEPT, 1], VECTOR)
    x_scales = x_kept._reinterpret(gl.float32, [x_kept.shape[0] * _TOGETHER, ROWS], VECTOR)
    _load_scales(WHICH, scale_ptr, kept, first_out, num_out, scale_stride, GROUPS, BOXES)
    wait_for_inputs(DEPENDENT)
    _load_row_scales(WHICH, x_scale_ptr, x_kept, num_rows, NUM_GROUPS, GROUPS, ROWS, TILES)
    _meet(met, 0)

    none = gl.zeros([OUTS, ROWS], gl.float32, ACC)
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
            scale = gl.where(gl.arange(0, OUTS, OUT)[:, None] < BOX, scale, up)
        both = scale * x_scales.index(group).load(gl.SliceLayout(0, ACC))[None, :]
        part = hopper.warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(free.index(stage), count=1)
        total = gl.fma(part, both, total)

    if HAS_BIAS:
        i = gl.arange(0, OUTS, OUT)
        n = first_out + i % BOX
        bias = gl.load(bias_ptr + n + i // BOX * num_out, mask=n < num_out, other=0.0)
        total += bias.to(gl.float32)[:, None]
    STORED: gl.constexpr = ACC if BOXES == 1 else gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    if BOXES == 2:
        # The gate and `up` of an output are in two warps: they meet where codes were.
        _meet(met, 1)
        boxes._reinterpret(gl.float32, [TILES, OUTS, ROWS], PLAIN).index(WHICH).store(total)
        halves = boxes._reinterpret(gl.float32, [2 * TILES, BOX, ROWS], PLAIN)
        gate, up = halves.index(2 * WHICH).load(STORED), halves.index(2 * WHICH + 1).load(STORED)
        total = silu(gate) * up
    n = first_out + gl.arange(0, BOX, gl.SliceLayout(1, STORED))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, STORED))[None, :]
    out_at = out_ptr + (split * num_rows + m).to(gl.int64) * num_out + n
    is_there = (n < num_out) & (m < num_rows) & (count > WHICH)
    gl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_there)


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
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    stages = stages_of(ROWS, 0, STAGES, TILES, BOXES)
    kept = gl.allocate_shared_memory(gl.float32, [TILES * BOXES, KEPT], VECTOR)
    x_kept = gl.allocate_shared_memory(gl.float32, [PARTS, _TOGETHER, ROWS], PLAIN)
    met = barriers_of(1, TILES)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [  # warpgroups that multiply, and a warp
            (copy_codes, (
                (x_codes, x_codes, codes), stages, num_out, GROUPS, ROWS, 0, STAGES, 0, TILES,
                BOXES, DEPENDENT))
            if which == TILES
            else (_multiply, (
                which, pointers, stages, kept, x_kept, met, num_rows, num_out, scale_stride,
                NUM_GROUPS, GROUPS, ROWS, STAGES, BOXES, TILES, HAS_BIAS, DEPENDENT))
            for which in (0, 1, 2, 3, 4, 5)[: TILES + 1]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
