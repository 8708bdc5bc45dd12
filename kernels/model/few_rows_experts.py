"""Products of few rows with plain matrices of experts, of 16 bits, on a Hopper GPU.

The time is that of reading the weights, so each multiprocessor must have many bytes under way all
the time. A warp copies weights into shared memory some stages ahead, with the rows that they
multiply: those of `down` while the first layer is still computed. Sums are those of
`experts_product`.
"""

import torch
from torch import Tensor

from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import TensorDescriptor, gl, gluon, hopper
from .expert_matrix import Activation, ExpertMatrix, Glu
from .routing import Routing
from .silu_mul import limited_glu
from .warpgroups import barriers_of, halves_by_eights, has_warpgroups, registers_of, stages_ahead

mbarrier, tma, cp = hopper.mbarrier, hopper.tma, hopper.async_copy

MOST_ROWS = 128  # more are not faster, measured on an H200
_MOST_PAIRS = 16  # of a tile
_INPUTS = gl.constexpr(64)  # of a stage
_OUTS = gl.constexpr(64)  # rows of the matrix in a tile; if gated, each second eight are of `up`
_COPY_REGISTERS = 48

# Devices on which it does not work; `experts_trial` finds them.
failed: set[torch.device] = set()


def is_for(x: Tensor, layer: ExpertMatrix, routing: Routing, activation: Activation | None) -> bool:
    """Whether it multiplies these rows."""
    matrix = layer.matrix
    return (
        isinstance(matrix, Tensor)
        and has_warpgroups(matrix.device)
        and matrix.device not in failed
        and matrix.element_size() == 2
        and x.dtype == matrix.dtype
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0  # rows are copied 16 bytes at a time
        and len(routing.ids) <= MOST_ROWS
        and routing.tiles.pairs.shape[1] <= _MOST_PAIRS
        and (activation is None or isinstance(activation, Glu))
        and layer.num_out % _OUTS.value == 0
        and matrix.shape[1] % _INPUTS.value == 0
    )


def few_rows_of_experts(
    out: Tensor, x: Tensor, routing: Routing, layer: ExpertMatrix, glu: Glu | None
) -> None:
    """As `experts_product`, of tiles of at most 16 pairs: gated activations or, without `glu`,
    parts.
    """
    matrix, device = layer.matrix, x.device
    assert isinstance(matrix, Tensor)
    assert matrix.is_contiguous()
    num_rows, top_k = routing.ids.shape
    num_out, num_in = layer.num_out // (2 if glu else 1), matrix.shape[1]
    num_tiles, size = routing.tiles.pairs.shape
    rows = 8 if num_rows <= 8 else size  # that may be pairs of one expert
    # Eights of a tile's outputs; if gated, each is of the gate, then of `up`.
    shape, strides = (len(matrix) // 16, 2, 8, num_in), (16 * num_in, 8 * num_in, num_in, 1)
    if glu:
        shape = num_out // 8, 2 * layer.num_experts, 8, num_in
        strides = 8 * num_in, num_out * num_in, num_in, 1
    weights = TensorDescriptor(
        matrix, [*shape], [*strides], [_OUTS.value // 16, 2, 8, _INPUTS.value],
        gl.NVMMASharedLayout(128, 16, 4),
    )  # fmt: skip
    # That share a multiprocessor. More or longer loads ahead keep the next kernel out: measured on
    # an H200.
    programs = 3 if glu and rows == 8 else 4
    at_start, _ = registers_of(1, _COPY_REGISTERS, programs)
    num_stages, stage_bytes = num_in // _INPUTS.value, 2 * _INPUTS.value * (_OUTS.value + rows)
    _few_rows_of_plain_experts_kernel[(num_tiles * (layer.num_out // _OUTS.value),)](
        out, x, routing.weights, *routing.tiles, weights, layer.bias,
        *(glu or (0.0, 0.0, 0.0)), num_rows, num_out, x.stride(0), layer.num_experts, num_stages,
        TOP_K=top_k, GATED=glu is not None, SIZE=size, ROWS=rows,
        STAGES=stages_ahead(num_stages, stage_bytes, programs, device), WARPS=(1,),
        REGISTERS=(_COPY_REGISTERS,), num_warps=4, maxnreg=at_start,
        enable_fp_fusion=False,  # as of many rows
        **dependent_launch(device),
    )  # fmt: skip


@gluon.jit
def _place(num_out, GATED: gl.constexpr):
    """A program's tile of pairs and block of outputs."""
    num_blocks = num_out // (_OUTS // 2 if GATED else _OUTS)
    return gl.program_id(0) // num_blocks, gl.program_id(0) % num_blocks


@gluon.jit
def _copy_weights(stage, weights, boxes, has, first, half, STAGES: gl.constexpr):
    """Have the weights of a stage copied."""
    slot = stage % STAGES
    mbarrier.expect(has.index(slot), 2 * _OUTS * _INPUTS)
    at = [first, half, 0, stage * _INPUTS]
    tma.async_copy_global_to_shared(weights, at, has.index(slot), boxes.index(slot))


@gluon.jit
def _copy(
    pointers, weights, boxes, x_tiles, has, free, sizes, TOP_K: gl.constexpr, GATED: gl.constexpr,
    SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Have weights and rows copied, stage by stage. One warp."""
    x_ptr, experts_ptr, pairs_ptr = pointers[0], pointers[3], pointers[4]
    num_rows, num_out, x_stride, num_experts, num_stages = sizes
    # Always STAGES, but not as a constant: with the loop over them unrolled, registers spill.
    ahead = gl.minimum(num_stages, STAGES)
    if GATED:
        wait_for_inputs(DEPENDENT)
    tile, block = _place(num_out, GATED)
    expert = gl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        first, half = block * (_OUTS // 16), 2 * expert
        if not GATED:
            first, half = expert * (num_out // 16) + first, 0
        for stage in range(ahead):
            _copy_weights(stage, weights, boxes, has, first, half, STAGES)
        COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
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
                _copy_weights(stage, weights, boxes, has, first, half, STAGES)
            start = stage * _INPUTS
            cp.async_copy_global_to_shared(
                x_tiles.index(slot), x_ptr + start + x_at, mask=is_pair[:, None]
            )
            cp.mbarrier_arrive(has.index(slot), increment_count=False)
    elif not GATED:
        wait_for_inputs(DEPENDENT)


@gluon.jit
def _multiply(
    pointers, tiles, x_tiles, has, free, glu, sizes, TOP_K: gl.constexpr, GATED: gl.constexpr,
    SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """64 outputs of a tile of pairs. One warpgroup."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    _x_ptr, out_ptr, weights_ptr, experts_ptr, pairs_ptr, bias_ptr = pointers
    num_rows, num_out, _x_stride, num_experts, num_stages = sizes
    if GATED:
        # The router makes tiles and weights: as in `experts_product`, `down` may read these early.
        wait_for_inputs(DEPENDENT)
        start_next_kernel(DEPENDENT)
    tile, block = _place(num_out, GATED)
    expert = gl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        m = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
        pair = gl.load(pairs_ptr + tile * SIZE + m, cache_modifier=".cg")
        is_pair = pair < num_rows * TOP_K
        weight = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, ACC))
        if not GATED:
            weight = gl.load(weights_ptr + pair, mask=is_pair, other=0.0, cache_modifier=".cg")
        y = gl.zeros([_OUTS, ROWS], gl.float32, ACC)
        slot = 0
        mbarrier.wait(has.index(0), 0)
        hopper.fence_async_shared()  # the rows were copied by a warp
        y = hopper.warpgroup_mma(
            tiles.index(0), x_tiles.index(0).permute((1, 0)), y, use_acc=False, is_async=True
        )
        y = hopper.warpgroup_mma_wait(1, deps=[y])
        for stage in range(1, num_stages):
            before, slot = slot, stage % STAGES
            mbarrier.wait(has.index(slot), stage // STAGES & 1)
            hopper.fence_async_shared()
            x = x_tiles.index(slot).permute((1, 0))
            y = hopper.warpgroup_mma(tiles.index(slot), x, y, is_async=True)
            y = hopper.warpgroup_mma_wait(1, deps=[y])
            mbarrier.arrive(free.index(before), count=1)
        y = hopper.warpgroup_mma_wait(0, deps=[y])
        i = gl.arange(0, _OUTS, gl.SliceLayout(1, ACC))
        n, in_expert = block * _OUTS + i, block * _OUTS + i
        if GATED:
            n = block * (_OUTS // 2) + i // 16 * 8 + i % 8
            in_expert = n + i // 8 % 2 * num_out
        if bias_ptr is not None:
            bias_at = bias_ptr + expert * num_out * (2 if GATED else 1) + in_expert
            y += gl.load(bias_at).to(gl.float32)[:, None]
        store_outputs(
            out_ptr, y, pair, is_pair, weight, n, n < num_out, glu, num_rows, num_out, TOP_K, GATED
        )


@gluon.jit
def store_outputs(
    out_ptr, y, pair, is_pair, weight, n, is_out, glu, num_rows, num_out, TOP_K: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Gate the outputs of a tile of pairs, each second eight of which are of `up`, or weigh parts,
    and store them.

    Shape: y [64, ROWS]; pair, is_pair, weight [ROWS]; n, is_out [64].
    """
    if GATED:
        gate, up = halves_by_eights(y)
        alpha, limit, shift = glu
        y = limited_glu(gate, up, alpha, limit, shift)
        at = halves_by_eights(pair.to(gl.int64)[None, :] * num_out + n[:, None])[0]
        is_stored = halves_by_eights(is_pair[None, :] & is_out[:, None])[0]
    else:
        y = y * weight[None, :]
        out_row = pair % TOP_K * num_rows + pair // TOP_K
        at = out_row.to(gl.int64)[None, :] * num_out + n[:, None]
        is_stored = is_pair[None, :] & is_out[:, None]
    gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_stored)


@gluon.jit(do_not_specialize=["num_rows", "num_stages"])
def _few_rows_of_plain_experts_kernel(
    out_ptr,  # GATED: [num_rows * TOP_K, num_out], else [TOP_K, num_rows, num_out]
    x_ptr,  # GATED: [num_rows, inputs], else [num_rows * TOP_K, inputs]
    weights_ptr,  # [num_rows * TOP_K]
    experts_ptr,  # [tiles]
    pairs_ptr,  # [tiles, SIZE]
    weights,  # of experts, by eights of outputs: a descriptor
    bias_ptr,  # [experts * outputs], or None
    alpha, limit, shift, num_rows,
    num_out,  # of the gate or, not GATED, in all
    x_stride, num_experts, num_stages, TOP_K: gl.constexpr, GATED: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,  # of a tile that may be pairs
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,  # that copy
    REGISTERS: gl.constexpr,  # of their threads
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Each program: 64 outputs of one tile of pairs or, GATED, 32."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    boxes = gl.allocate_shared_memory(
        dtype, [STAGES, _OUTS // 16, 2, 8, _INPUTS], gl.NVMMASharedLayout(128, 16, 4)
    )
    tiles = boxes._reinterpret(dtype, [STAGES, _OUTS, _INPUTS], SHARED)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, _INPUTS], SHARED)
    has, free = barriers_of(STAGES, 1 + 32), barriers_of(STAGES, 1)
    hopper.fence_async_shared()
    if not GATED:
        start_next_kernel(DEPENDENT)
    pointers = (x_ptr, out_ptr, weights_ptr, experts_ptr, pairs_ptr, bias_ptr)
    glu = (alpha, limit, shift)
    sizes = (num_rows, num_out, x_stride, num_experts, num_stages)
    gl.warp_specialize(
        [  # a warpgroup that multiplies, and a warp that copies
            (_multiply, (
                pointers, tiles, x_tiles, has, free, glu, sizes, TOP_K, GATED, SIZE, ROWS,
                STAGES, DEPENDENT)),
            (_copy, (
                pointers, weights, boxes, x_tiles, has, free, sizes, TOP_K, GATED, SIZE, ROWS,
                STAGES, DEPENDENT)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
