"""`scaled_product` of few rows on a Hopper GPU, where blocks of 128 x 128 weights share a scale:

    y[t, n] = sum over groups of 128 inputs of
              scale_x[t, group] * scale_w[group, n // 128] * sum of code_x * code_w

The time is that of reading the weights, so each multiprocessor must have many bytes under way all
the time. All programs are resident at once if they can be. A program has one warpgroup, and a warp
that copies codes into shared memory as many groups ahead as fit there. It starts with weights,
while the kernel that makes the rows still runs. Any number of rows is summed in the same order.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs, shared_bytes
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper, triton
from .narrow_matrix import NarrowMatrix
from .row_codes import RowCodes
from .silu_mul import silu
from .warpgroups import barriers_of

mbarrier, tma = hopper.mbarrier, hopper.tma

FEW_ROWS = 64
_GROUP = gl.constexpr(128)  # inputs that share a scale
_SCALE_OUTS = gl.constexpr(128)  # outputs that share a scale
_OUTS = gl.constexpr(64)  # rows of the matrix in a tile; if gated, the second half is of `up`
_RESERVED = 1024  # bytes of shared memory that a multiprocessor takes itself for each program


def few_rows_product(
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
    grid = triton.cdiv(num_out, outs), num_splits
    groups = len(matrix.scale) // num_splits
    num_sms = num_programs(matrix.codes.device, 1)
    # So many that all are there at once, or as many as registers hold.
    per_sm = min(triton.cdiv(grid[0] * grid[1], num_sms), 5 if rows <= 32 else 3)
    registers = min(64 if rows <= 32 else 96, 256 // per_sm // 8 * 8)
    _few_rows_kernel[grid](
        out, x_codes, x.scale, codes, matrix.scale, out if bias is None else bias,
        num_rows, num_out, matrix.scale.stride(0), NUM_GROUPS=len(matrix.scale), GROUPS=groups,
        ROWS=rows, STAGES=_num_stages(rows, groups, per_sm, matrix.codes.device),
        HAS_BIAS=bias is not None, GATED=gated, num_warps=4, maxnreg=registers,
        enable_fp_fusion=False,  # as of many rows
        **dependent_launch(matrix.codes.device),
    )  # fmt: skip


def _num_stages(rows: int, groups: int, per_sm: int, device: torch.device) -> int:
    """How many groups ahead codes are copied: shared memory is full with `per_sm` programs."""
    # Were there room for more programs, some multiprocessors would get more of them than others.
    room = (shared_bytes(device) + _RESERVED) // per_sm // 128 * 128 - _RESERVED
    stage: int = (_OUTS.value + rows) * _GROUP.value + 2 * 8  # bytes, with its barriers
    scales: int = 2 * 4 * triton.next_power_of_2(groups)
    return min(groups, (room - scales) // stage)


@gluon.jit
def _copy_weights(
    codes, boxes, has, group, num_out, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Have the weights of a group copied. The rows must follow: the stage opens with both."""
    stage, first_out = group % STAGES, gl.program_id(0) * (_OUTS // BOXES)
    mbarrier.expect(has.index(stage), (_OUTS + ROWS) * _GROUP)
    for i in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            codes, [first_out + i * num_out, (gl.program_id(1) * GROUPS + group) * _GROUP],
            has.index(stage), boxes.index(BOXES * stage + i),
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
    STAGES: gl.constexpr, BOXES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have the codes of a share copied, group by group. One warp."""
    for group in range(STAGES):
        _copy_weights(codes, boxes, has, group, num_out, ROWS, GROUPS, STAGES, BOXES)
    wait_for_inputs(DEPENDENT)
    for group in range(STAGES):
        _copy_rows(x_codes, x_tiles, has, group, GROUPS, STAGES)
    for group in range(STAGES, GROUPS):
        mbarrier.wait(free.index(group % STAGES), (group // STAGES & 1) ^ 1)
        _copy_weights(codes, boxes, has, group, num_out, ROWS, GROUPS, STAGES, BOXES)
        _copy_rows(x_codes, x_tiles, has, group, GROUPS, STAGES)


@gluon.jit
def _load_scales(scale_ptr, kept, num_out, scale_stride, GROUPS: gl.constexpr, BOXES: gl.constexpr):
    """The weights' scales of a share, into shared memory."""
    # Each lies in another sector of memory: loaded group by group, a program would wait for each.
    KEPT: gl.constexpr = kept.shape[1]
    g = gl.arange(0, KEPT, gl.BlockedLayout([1], [32], [4], [0]))
    first_out = gl.program_id(0) * (_OUTS // BOXES)
    scale_at = scale_ptr + (gl.program_id(1) * GROUPS + g) * scale_stride
    for i in gl.static_range(BOXES):
        block = (first_out + i * num_out) // _SCALE_OUTS
        scale = gl.load(scale_at + block, mask=g < GROUPS, other=0.0)
        kept.index(i).store(scale.to(gl.float32))


@gluon.jit
def _multiply(
    pointers, x_tiles, boxes, kept, has, free, num_rows, num_out, scale_stride,
    NUM_GROUPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The products and sums of a tile. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    OUT: gl.constexpr = gl.SliceLayout(1, ACC)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    KEPT: gl.constexpr = kept.shape[1]
    BOX: gl.constexpr = _OUTS // BOXES
    out_ptr, x_scale_ptr, scale_ptr, bias_ptr = pointers
    first_out, split = gl.program_id(0) * BOX, gl.program_id(1)
    tiles = boxes._reinterpret(gl.float8e4nv, [STAGES, _OUTS, _GROUP], gl.NVMMASharedLayout(128, 8))
    scales = kept._reinterpret(gl.float32, [BOXES * KEPT, 1], VECTOR)
    _load_scales(scale_ptr, kept, num_out, scale_stride, GROUPS, BOXES)

    wait_for_inputs(DEPENDENT)
    m = gl.arange(0, ROWS, ROW)
    is_row = m < num_rows
    x_scale_at = x_scale_ptr + m * NUM_GROUPS + split * GROUPS
    next_x_scale = gl.load(x_scale_at, mask=is_row, other=0.0)
    none = gl.zeros([_OUTS, ROWS], gl.float32, ACC)
    total = none
    for group in range(GROUPS):
        stage, phase = group % STAGES, group // STAGES & 1
        x_scale = next_x_scale
        next_x_scale = gl.load(
            x_scale_at + gl.minimum(group + 1, GROUPS - 1), mask=is_row, other=0.0
        )
        mbarrier.wait(has.index(stage), phase)
        part = hopper.warpgroup_mma(
            tiles.index(stage), x_tiles.index(stage).permute((1, 0)), none, use_acc=False,
            is_async=True,
        )  # fmt: skip
        scale = scales.index(group).load(OUT)[:, None]
        if BOXES == 2:
            up = scales.index(KEPT + group).load(OUT)[:, None]
            scale = gl.where(gl.arange(0, _OUTS, OUT)[:, None] < BOX, scale, up)
        both = scale * x_scale[None, :]
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
        boxes._reinterpret(gl.float32, [_OUTS, ROWS], PLAIN).store(total)
        halves = boxes._reinterpret(gl.float32, [2, BOX, ROWS], PLAIN)
        total = silu(halves.index(0).load(STORED)) * halves.index(1).load(STORED)
    n = first_out + gl.arange(0, BOX, gl.SliceLayout(1, STORED))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, STORED))[None, :]
    out_at = out_ptr + (split * num_rows + m).to(gl.int64) * num_out + n
    gl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(n < num_out) & (m < num_rows))


@gluon.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
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
    DEPENDENT: gl.constexpr,
):
    """Each program: 64 outputs or, gated, 32 of all rows, over one share of the inputs."""
    start_next_kernel(DEPENDENT)
    BOXES: gl.constexpr = 2 if GATED else 1
    KEPT: gl.constexpr = triton.next_power_of_2(GROUPS)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    code: gl.constexpr = gl.float8e4nv
    boxes = gl.allocate_shared_memory(code, [STAGES * BOXES, _OUTS // BOXES, _GROUP], CODES)
    x_tiles = gl.allocate_shared_memory(code, [STAGES, ROWS, _GROUP], CODES)
    kept = gl.allocate_shared_memory(gl.float32, [BOXES, KEPT], VECTOR)
    has, free = barriers_of(STAGES, 1), barriers_of(STAGES, 1)
    hopper.fence_async_shared()
    pointers = (out_ptr, x_scale_ptr, scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                pointers, x_tiles, boxes, kept, has, free, num_rows, num_out, scale_stride,
                NUM_GROUPS, GROUPS, ROWS, STAGES, BOXES, HAS_BIAS, DEPENDENT)),
            (_copy, (
                x_codes, codes, x_tiles, boxes, has, free, num_out, ROWS, GROUPS, STAGES, BOXES,
                DEPENDENT)),
        ],
        [1],
        [24],
    )  # fmt: skip
