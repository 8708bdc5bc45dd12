"""Products of few rows with experts' matrices in MXFP4 on a Hopper GPU.

The time is that of reading the weights, so each multiprocessor must have many bytes under way all
the time. Codes and scales of 256 inputs at a time are copied into shared memory some stages ahead,
with the rows that they multiply. From there each thread takes the codes that it multiplies by, and
converts those of 64 inputs while 64 others are multiplied. Sums are those of `mxfp4_sums`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper, triton
from .e2m1 import scaled_from_e2m1, unscaled
from .expert_matrix import Activation, ExpertMatrix, Glu, is_mxfp4
from .few_rows_experts import store_outputs
from .narrow_matrix import NarrowMatrix
from .narrow_numbers import in_order_by_warp
from .routing import Routing
from .warpgroups import barriers_of, has_warpgroups, registers_of, stages_ahead

mbarrier, tma, cp = hopper.mbarrier, hopper.tma, hopper.async_copy

MOST_ROWS = 64  # of a tile
_INPUTS = gl.constexpr(256)  # of a stage
_STEP = gl.constexpr(64)  # inputs that are converted at a time
_WORDS = gl.constexpr(32)  # of a stage
_GROUPS = gl.constexpr(8)  # of a stage, which share a scale
_OUTS = gl.constexpr(64)  # of a warpgroup
_HALF = gl.constexpr(32)  # of a warpgroup; if gated, the second half is of `up`
_COPY_REGISTERS = 48


class _Tiling(NamedTuple):
    """No sum depends on it."""

    tiles: int  # of 64 outputs in a program, each of a warpgroup
    programs: int  # that share a multiprocessor


def _tiling(rows: int, num_tiles: int, num_out: int, device: torch.device) -> _Tiling:
    """For so many rows of a tile; `num_tiles` is an upper bound. Measured on an H200."""
    if rows == 64:
        return _Tiling(2, 2)
    # As many programs as registers allow; if there are few, each loads further ahead.
    num_all = num_tiles * triton.cdiv(num_out, _OUTS.value)
    return _Tiling(1, 3 if rows == 8 and num_all <= num_programs(device, 3) else 4)


# Devices on which it does not work; `experts_trial` finds them.
failed: set[torch.device] = set()


def is_for(x: Tensor, layer: ExpertMatrix, routing: Routing, activation: Activation | None) -> bool:
    """Whether it multiplies these rows."""
    matrix = layer.matrix
    return (
        isinstance(matrix, NarrowMatrix)
        and is_mxfp4(matrix)
        and x.dtype == torch.bfloat16
        and x.stride(0) % 16 == 0
        and x.data_ptr() % 16 == 0  # rows are copied 16 bytes at a time
        and routing.tiles.pairs.shape[1] <= MOST_ROWS
        and (activation is None or isinstance(activation, Glu))
        and layer.num_out % _OUTS.value == 0
        and matrix.num_in % _STEP.value == 0
        and has_warpgroups(matrix.codes.device)
        and matrix.codes.device not in failed
    )


def few_rows_of_experts(
    out: Tensor, x: Tensor, routing: Routing, layer: ExpertMatrix, glu: Glu | None
) -> None:
    """As `experts_product`, of tiles of at most 64 pairs: gated activations or, without `glu`,
    parts.
    """
    matrix, device = layer.matrix, x.device
    assert isinstance(matrix, NarrowMatrix)
    num_rows, top_k = routing.ids.shape
    num_out = layer.num_out // (2 if glu else 1)
    num_tiles, size = routing.tiles.pairs.shape
    rows = 8 if num_rows <= 8 else size  # that may be pairs of one expert
    tiling, half = _tiling(rows, num_tiles, layer.num_out, device), _HALF.value
    tiles = tiling.tiles
    # The second half of a warpgroup's outputs is `up` or, without a gate, the next ones.
    halves = (2 * layer.num_experts, num_out) if glu else (matrix.shape[0] // half, half)
    codes = TensorDescriptor.from_tensor(
        matrix.codes.view(torch.int32).view(*halves, -1), [2, half, _WORDS.value],
        gl.NVMMASharedLayout(128, 32, 3),
    )  # fmt: skip
    scale = TensorDescriptor.from_tensor(
        matrix.scale.view(torch.uint8).view(-1, *halves), [_GROUPS.value, 2, half],
        gl.NVMMASharedLayout(half, 8, 3),
    )  # fmt: skip
    registers, own = registers_of(tiles, _COPY_REGISTERS, tiling.programs)
    num_stages = triton.cdiv(matrix.num_in, _INPUTS.value)
    stage_bytes = tiles * _OUTS.value * (4 * _WORDS.value + _GROUPS.value)
    stage_bytes += 2 * _INPUTS.value * rows
    _few_rows_of_experts_kernel[(num_tiles * triton.cdiv(layer.num_out, tiles * _OUTS.value),)](
        out, x, routing.weights, *routing.tiles, codes, scale, layer.bias,
        *(glu or (0.0, 0.0, 0.0)), num_rows, num_out, x.stride(0), layer.num_experts, num_stages,
        TOP_K=top_k, NUM_IN=matrix.num_in, GATED=glu is not None, SIZE=size, ROWS=rows,
        TILES=tiles, STAGES=stages_ahead(num_stages, stage_bytes, tiling.programs, device),
        WARPS=(4,) * (tiles - 1) + (max(1, rows // 16),),
        REGISTERS=(own,) * (tiles - 1) + (_COPY_REGISTERS,), num_warps=4, maxnreg=registers,
        enable_fp_fusion=False,  # as of many rows
        **dependent_launch(device),
    )  # fmt: skip


@gluon.jit
def _copy(
    pointers, codes, scales, boxes, exponents, x_stages, has, free, sizes,
    TOP_K: gl.constexpr, NUM_IN: gl.constexpr, GATED: gl.constexpr, SIZE: gl.constexpr,
    ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have codes, scales and rows copied, stage by stage. The last of WARPS."""
    x_ptr, experts_ptr, pairs_ptr = pointers[0], pointers[3], pointers[4]
    num_rows, num_out, x_stride, num_experts, num_stages = sizes
    # Always STAGES, but not as a constant: with the loop over them unrolled, registers spill.
    ahead = gl.minimum(num_stages, STAGES)
    if GATED:
        wait_for_inputs(DEPENDENT)
    tile, block = _place(num_out, GATED, TILES)
    expert = gl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        first = block * (TILES * _HALF)
        half = 2 * expert
        if not GATED:
            half, first = expert * (num_out // _HALF) + 2 * TILES * block, 0
        for stage in range(ahead):
            _copy_weights(
                stage, codes, scales, boxes, exponents, has, half, first, GATED, STAGES, TILES
            )
        COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS[TILES - 1], 1], [1, 0])
        m = gl.arange(0, ROWS, gl.SliceLayout(1, COPIED))
        pair = gl.load(pairs_ptr + tile * SIZE + m, cache_modifier=".cg")
        is_pair = pair < num_rows * TOP_K
        x_row = gl.where(is_pair, pair // TOP_K if GATED else pair, 0)
        k = gl.arange(0, _INPUTS, gl.SliceLayout(0, COPIED))[None, :]
        x_at = x_row[:, None] * x_stride + k
        if not GATED:
            wait_for_inputs(DEPENDENT)
        for stage in range(num_stages):
            slot = stage % STAGES
            if stage >= ahead:
                mbarrier.wait(free.index(slot), (stage // STAGES & 1) ^ 1)
                _copy_weights(
                    stage, codes, scales, boxes, exponents, has, half, first, GATED, STAGES, TILES
                )
            start = stage * _INPUTS
            mask = is_pair[:, None] & (start + k < NUM_IN)
            cp.async_copy_global_to_shared(x_stages.index(slot), x_ptr + start + x_at, mask=mask)
            cp.mbarrier_arrive(has.index(slot), increment_count=False)
    elif not GATED:
        wait_for_inputs(DEPENDENT)


@gluon.jit
def _place(num_out, GATED: gl.constexpr, TILES: gl.constexpr):
    """A program's tile of pairs and block of outputs."""
    STEP: gl.constexpr = TILES * (_HALF if GATED else _OUTS)
    num_blocks = (num_out + STEP - 1) // STEP
    return gl.program_id(0) // num_blocks, gl.program_id(0) % num_blocks


@gluon.jit
def _copy_weights(
    stage, codes, scales, boxes, exponents, has, half, first, GATED: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Have codes and scales of a stage copied."""
    slot = stage % STAGES
    mbarrier.expect(has.index(slot), TILES * _OUTS * (4 * _WORDS + _GROUPS))
    for i in gl.static_range(TILES):
        at, out = half, first + i * _HALF
        if not GATED:
            at, out = half + 2 * i, 0
        tma.async_copy_global_to_shared(
            codes, [at, out, stage * _WORDS], has.index(slot), boxes.index(TILES * slot + i)
        )
        tma.async_copy_global_to_shared(
            scales, [stage * _GROUPS, at, out], has.index(slot),
            exponents.index(TILES * slot + i),
        )  # fmt: skip


@gluon.jit
def _four(x):
    """The four parts of the last two axes."""
    even, odd = gl.split(x)
    a, b = gl.split(even)
    c, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def _weights(words, low, high, FACTOR: gl.constexpr):
    """Those of 64 inputs; the exponents are those of the first 32 and the others."""
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [_HALF, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
        [_OUTS, 8],
    )  # fmt: skip
    OUT: gl.constexpr = gl.SliceLayout(1, WORDS)
    words = gl.convert_layout(words, WORDS, assert_trivial=True)
    low = gl.convert_layout(low.to(gl.int32), OUT, assert_trivial=True)
    high = gl.convert_layout(high.to(gl.int32), OUT, assert_trivial=True)
    low = scaled_from_e2m1(words, low, False, gl.bfloat16, True)
    high = scaled_from_e2m1(words, high, True, gl.bfloat16, True)
    both = gl.join(in_order_by_warp(low, _OUTS, 32, 4), in_order_by_warp(high, _OUTS, 32, 4))
    weights = gl.reshape(gl.permute(both, (0, 2, 1)), [_OUTS, _STEP])
    return gl.convert_layout(weights, FACTOR, assert_trivial=True)


@gluon.jit
def _sums_of_stage(
    y, tile, slot, tiles, exponents, x_parts, STEPS: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """The sums with the products of a stage."""
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # As in `output_by_warp`, a warp has 8 outputs of each half.
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [_HALF, 0], [0, 8], [0, 16]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [_OUTS, _WORDS],
    )  # fmt: skip
    BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0, 0], [2, 0, 0], [4, 0, 0], [0, 1, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 8], [0, 0, 16]], [],
        [_GROUPS, 2, _HALF],
    )  # fmt: skip
    words = gl.reshape(tiles.index(tile).load(WORDS), [_OUTS, 2, 2, 8])
    words = _four(gl.permute(words, (0, 3, 2, 1)))
    exponent = gl.permute(exponents.index(tile).load(BYTES), (1, 2, 0))
    exponent = gl.reshape(exponent, [_OUTS, 2, 2, 2])
    low, high = gl.split(gl.permute(exponent, (0, 2, 1, 3)))
    low, high = _four(low), _four(high)
    weight = gl.zeros([_OUTS, _STEP], gl.bfloat16, FACTOR)
    product = y
    for step in gl.static_range(STEPS):
        # These are made while those before them are multiplied.
        next_weight = _weights(words[step], low[step], high[step], FACTOR)
        if step > 0:
            y, weight = hopper.warpgroup_mma_wait(0, deps=[product, weight])
        weight = next_weight
        x = x_parts.index(_INPUTS // _STEP * slot + step).permute((1, 0))
        product = hopper.warpgroup_mma(weight, x, y, is_async=True)
    y, weight = hopper.warpgroup_mma_wait(0, deps=[product, weight])
    return y


@gluon.jit
def _multiply(
    WHICH: gl.constexpr, pointers, tiles, exponents, x_parts, has, free, glu, sizes,
    TOP_K: gl.constexpr, NUM_IN: gl.constexpr, GATED: gl.constexpr, SIZE: gl.constexpr,
    ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs. One warpgroup."""
    FULL: gl.constexpr = NUM_IN // _INPUTS
    REST: gl.constexpr = NUM_IN % _INPUTS // _STEP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    _x_ptr, out_ptr, weights_ptr, experts_ptr, pairs_ptr, bias_ptr = pointers
    num_rows, num_out, _x_stride, num_experts, _num_stages = sizes
    if GATED:
        # The router makes tiles and weights: as in `experts_product`, `down` may read these early.
        wait_for_inputs(DEPENDENT)
        start_next_kernel(DEPENDENT)
    tile, block = _place(num_out, GATED, TILES)
    expert = gl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        y = gl.zeros([_OUTS, ROWS], gl.float32, ACC)
        for stage in range(FULL):
            slot = stage % STAGES
            mbarrier.wait(has.index(slot), stage // STAGES & 1)
            hopper.fence_async_shared()  # the rows were copied by a warp
            y = _sums_of_stage(
                y, TILES * slot + WHICH, slot, tiles, exponents, x_parts, _INPUTS // _STEP, ACC
            )
            mbarrier.arrive(free.index(slot), count=1)
        if REST > 0:
            slot = FULL % STAGES
            mbarrier.wait(has.index(slot), FULL // STAGES & 1)
            hopper.fence_async_shared()
            y = _sums_of_stage(y, TILES * slot + WHICH, slot, tiles, exponents, x_parts, REST, ACC)
        total = unscaled(y)
        i = gl.arange(0, _OUTS, gl.SliceLayout(1, ACC))
        n = (block * TILES + WHICH) * (_HALF if GATED else _OUTS) + i // 16 * 8 + i % 8
        in_expert = n + i // 8 % 2 * (num_out if GATED else _HALF)
        if not GATED:
            n = in_expert
        is_out = n < num_out
        if bias_ptr is not None:
            bias_at = bias_ptr + expert * num_out * (2 if GATED else 1) + in_expert
            total += gl.load(bias_at, mask=is_out, other=0.0).to(gl.float32)[:, None]
        m = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
        pair = gl.load(pairs_ptr + tile * SIZE + m, cache_modifier=".cg")
        is_pair = pair < num_rows * TOP_K
        weight = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, ACC))
        if not GATED:
            weight = gl.load(weights_ptr + pair, mask=is_pair, other=0.0)
        store_outputs(
            out_ptr, total, pair, is_pair, weight, n, is_out, glu, num_rows, num_out, TOP_K, GATED
        )


@gluon.jit(do_not_specialize=["num_rows", "num_stages"])
def _few_rows_of_experts_kernel(
    out_ptr,  # GATED: [num_rows * TOP_K, num_out], else [TOP_K, num_rows, num_out]
    x_ptr,  # GATED: [num_rows, NUM_IN], else [num_rows * TOP_K, NUM_IN]
    weights_ptr,  # [num_rows * TOP_K]
    experts_ptr,  # [tiles]
    pairs_ptr,  # [tiles, SIZE]
    codes,  # [experts * outputs, NUM_IN / 8] words: a descriptor
    scales,  # [groups, experts * outputs], exponents, 127 too large: a descriptor
    bias_ptr,  # [experts * outputs], or None
    alpha, limit, shift, num_rows,
    num_out,  # of the gate or, not GATED, in all
    x_stride, num_experts, num_stages, TOP_K: gl.constexpr, NUM_IN: gl.constexpr,
    GATED: gl.constexpr, SIZE: gl.constexpr,
    ROWS: gl.constexpr,  # of a tile that may be pairs
    TILES: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,  # of each part of a program after the first
    REGISTERS: gl.constexpr,  # of their threads
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Each program: TILES times 64 outputs of one tile of pairs."""
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    NUM: gl.constexpr = STAGES * TILES
    boxes = gl.allocate_shared_memory(
        gl.int32, [NUM, 2, _HALF, _WORDS], gl.NVMMASharedLayout(128, 32, 3)
    )
    tiles = boxes._reinterpret(gl.int32, [NUM, _OUTS, _WORDS], gl.NVMMASharedLayout(128, 32))
    exponents = gl.allocate_shared_memory(
        gl.uint8, [NUM, _GROUPS, 2, _HALF], gl.NVMMASharedLayout(_HALF, 8, 3)
    )
    x_parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (_INPUTS // _STEP), ROWS, _STEP], X)
    x_stages = x_parts._reinterpret(gl.bfloat16, [STAGES, ROWS, _INPUTS], X)
    has, free = barriers_of(STAGES, 1 + 32 * WARPS[TILES - 1]), barriers_of(STAGES, TILES)
    hopper.fence_async_shared()
    if not GATED:
        start_next_kernel(DEPENDENT)
    pointers = (x_ptr, out_ptr, weights_ptr, experts_ptr, pairs_ptr, bias_ptr)
    glu = (alpha, limit, shift)
    sizes = (num_rows, num_out, x_stride, num_experts, num_stages)
    gl.warp_specialize(
        [  # warpgroups that multiply, and warps that copy
            (_copy, (
                pointers, codes, scales, boxes, exponents, x_stages, has, free, sizes, TOP_K,
                NUM_IN, GATED, SIZE, ROWS, TILES, STAGES, WARPS, DEPENDENT))
            if which == TILES
            else (_multiply, (
                which, pointers, tiles, exponents, x_parts, has, free, glu, sizes, TOP_K, NUM_IN,
                GATED, SIZE, ROWS, TILES, STAGES, DEPENDENT))
            for which in (0, 1, 2)[: TILES + 1]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
