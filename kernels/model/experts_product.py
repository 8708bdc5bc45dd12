"""The kernel of products with experts' matrices, and how it is launched.

A program multiplies a tile of rows that share an expert by some of its outputs. Blocks of a plain
matrix come through shared memory. As in `narrow_product.py`, codes go from memory straight into the
registers of the threads that multiply by them, those of the next steps while some are multiplied. A
scale is a power of two, so it goes into the number that a code becomes, which stays exact.
"""

import torch
from torch import Tensor

from .._dispatch import num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .e2m1 import scaled_from_e2m1, unscaled
from .expert_matrix import GROUP, ExpertMatrix, Glu
from .narrow_matrix import NarrowMatrix
from .narrow_numbers import in_order_by_warp, output_by_warp
from .narrow_product import codes_of_steps
from .routing import Routing

_STEP_BYTES = 128  # of a plain matrix's row, in a step


def _tiling(size: int, num_steps: int) -> dict[str, int]:
    """Outputs of a tile of `size` pairs, steps of a loop, warps, and loops loaded ahead.

    No sum depends on these.
    """
    if size == 128:
        # With 128 registers a thread, two programs share a multiprocessor.
        return {"BLOCK_N": 128, "STEPS": 1, "num_warps": 8, "num_stages": 4, "maxnreg": 128}
    # Several steps in a loop cost fewer instructions.
    most = 5 if size < 64 else 3
    steps = next(n for n in range(most, 0, -1) if num_steps % n == 0)
    return {"BLOCK_N": 64, "STEPS": steps, "num_warps": 4, "num_stages": 3}


def _plain_tiling(size: int, x: Tensor) -> dict[str, int]:
    """Outputs of a tile of `size` pairs, inputs of a step, warps, and steps loaded ahead.

    The inputs of a step are the same for all sizes, since sums depend on them.
    """
    outs, step = (128 if size == 128 else 64), _STEP_BYTES // x.element_size()
    stages = num_stages_of(3, (outs + size) * _STEP_BYTES, x.device)
    return {"BLOCK_N": outs, "STEPS": step, "num_warps": outs // 16, "num_stages": stages}


def experts_product(x: Tensor, routing: Routing, layer: ExpertMatrix, glu: Glu | None) -> Tensor:
    """With `glu`, the gated outputs of each pair; else its outputs times its weight, which are the
    parts of each row's sum.

    Sums are not split over K: that was slower on an H200 from a few rows on.
    Parts are rounded to x's dtype, since a prompt has many. Those of padding rows are not written.
    Shape: x [T, K] or, without a gate, [T * k, K] -> [T * k, N / 2] or [k, T, N]
    """
    num_rows, top_k = routing.ids.shape
    num_pairs = num_rows * top_k
    matrix, num_out = layer.matrix, layer.num_out
    assert matrix.shape[1] == x.shape[1]
    assert x.stride(-1) == 1
    num_tiles, size = routing.tiles.pairs.shape
    if isinstance(matrix, NarrowMatrix):
        assert matrix.kind == "fp4"
        assert matrix.group == GROUP
        assert matrix.num_in % (2 * GROUP) == 0
        assert matrix.scale.is_contiguous()
        assert x.dtype != torch.float16, "it cannot hold every number of MXFP4"
        codes, scale = matrix.codes.view(torch.int32), matrix.scale.view(torch.uint8)
        width = matrix.codes.shape[1]
        tiling = _tiling(size, width // GROUP)
    else:
        assert matrix.is_contiguous()
        assert matrix.dtype == x.dtype
        codes, scale, width = matrix, None, matrix.shape[1]
        tiling = _plain_tiling(size, x)
    num_tiles *= triton.cdiv(num_out, tiling["BLOCK_N"])
    shape = (num_pairs, num_out // 2) if glu else (top_k, num_rows, num_out)
    out = x.new_empty(shape)
    _experts_kernel[(num_tiles,)](
        out,
        x,
        routing.weights,
        *routing.tiles,
        codes,
        scale,
        layer.bias,
        *(glu or (0.0, 0.0, 0.0)),
        num_rows,
        num_out // 2 if glu else num_out,
        x.stride(0),
        layer.num_experts,
        TOP_K=top_k,
        NUM_ROWS=matrix.shape[0],
        WIDTH=width,
        GATED=glu is not None,
        BLOCK_M=size,
        WARPS=tiling["num_warps"],
        IN_PAIRS=x.is_cuda and x.element_size() == 2,
        enable_fp_fusion=False,  # otherwise only some of these kernels might fuse a sum
        **tiling,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _experts_kernel(
    out_ptr,  # [num_rows * TOP_K, num_out] or, not GATED, [TOP_K, num_rows, num_out]
    x_ptr,  # [num_rows, inputs] or, not GATED, [num_rows * TOP_K, inputs]
    weights_ptr,  # [num_rows * TOP_K]
    experts_ptr,  # [tiles]
    pairs_ptr,  # [tiles, BLOCK_M]
    codes_ptr,  # [experts * outputs, WIDTH / 4] words; outputs: num_out or, GATED, 2 * num_out
    scale_ptr,  # [groups, experts * outputs] exponents, 127 too large; None: codes are numbers
    bias_ptr,  # [experts * outputs], or None
    alpha,
    limit,
    shift,
    num_rows,
    num_out,
    x_stride,
    num_experts,
    TOP_K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N outputs of one tile of pairs."""
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_tiles_n = tl.cdiv(num_out, OUTS)
    tile, tile_n = tl.program_id(0) // num_tiles_n, tl.program_id(0) % num_tiles_n
    i = tl.arange(0, BLOCK_N)
    read = output_by_warp(i, WARPS)
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    n = tile_n * OUTS + i % OUTS
    is_out, is_read = n < num_out, (tile_n * OUTS + read % OUTS < num_out)[:, None]
    in_expert = tl.minimum(n, num_out - 1) + i // OUTS * num_out
    read_in_expert = tl.minimum(tile_n * OUTS + read % OUTS, num_out - 1) + read // OUTS * num_out
    num_weight_rows = num_out * (2 if GATED else 1)
    # The router in front of the gate makes the tiles. The gate waits for them before it lets `down`
    # start, so `down` may read them, but not from a cache that may be older, before it waits.
    if GATED:
        wait_for_inputs(DEPENDENT)
    start_next_kernel(DEPENDENT)
    expert = tl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        pairs_at = pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        pair = tl.load(pairs_at, cache_modifier=".cg")
        is_pair = pair < num_rows * TOP_K
        weight_row = expert * num_weight_rows + in_expert
        x_row = pair // TOP_K if GATED else pair
        x_at = x_ptr + tl.where(is_pair, x_row, 0).to(tl.int64) * x_stride
        if scale_ptr is None:
            weight_at = codes_ptr + weight_row.to(tl.int64)[:, None] * WIDTH
            total = _plain_sums(
                x_at, weight_at, is_pair, is_out[:, None],
                WIDTH, STEPS, BLOCK_M, BLOCK_N, DEPENDENT and not GATED,
            )  # fmt: skip
        else:
            read_row = expert * num_weight_rows + read_in_expert
            codes_at = codes_ptr + read_row.to(tl.int64)[:, None] * (WIDTH // 4)
            scale_at = scale_ptr + read_row
            total = _sums(
                x_at, codes_at, scale_at, is_pair, is_read,
                NUM_ROWS, WIDTH, STEPS, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS, DEPENDENT and not GATED,
            )  # fmt: skip
        pair = tl.load(pairs_at, cache_modifier=".cg")  # again: kept, it would spill registers
        is_pair = pair < num_rows * TOP_K
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + weight_row, mask=is_out, other=0.0).to(tl.float32)
            total += bias[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0)))
            # Comparisons keep what is not a number, which tl.minimum would not.
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            y = (up + shift) * (gate / (1.0 + tl.exp(-alpha * gate)))
        else:
            y = total * tl.load(weights_ptr + pair, mask=is_pair, other=0.0)
        out_row = pair if GATED else pair % TOP_K * num_rows + pair // TOP_K
        outs = tile_n * OUTS + tl.arange(0, OUTS)
        tl.store(
            out_ptr + out_row.to(tl.int64) * num_out + outs[:, None],
            y.to(out_ptr.dtype.element_ty),
            mask=is_pair & (outs < num_out)[:, None],
        )
    elif not GATED:
        wait_for_inputs(DEPENDENT)


@triton.jit
def _plain_sums(
    x_at, weight_at, is_pair, is_out, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """`_sums` of a plain matrix."""
    k = tl.arange(0, BLOCK_K)
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(WAITS)
    for start in range(0, WIDTH, BLOCK_K):
        is_in = start + k < WIDTH
        weight = tl.load(weight_at + start + k[None, :], mask=is_out & is_in[None, :], other=0.0)
        x = tl.load(x_at + start + k[:, None], mask=is_pair & is_in[:, None], other=0.0)
        y = tl.dot(weight, x, y, input_precision="ieee")
    return y


@triton.jit
def _sums(
    x_at, codes_at, scale_at, is_pair, is_read, NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Products over all inputs; with WAITS these are not there yet.

    Shape: [BLOCK_N, BLOCK_M] float32.
    """
    STEP: tl.constexpr = 32  # bytes, and inputs of a group
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    codes = codes_of_steps(codes_at, is_read, 0, WIDTH, STEP, STEPS, STEP)
    scales = _exponents(scale_at, 0, NUM_ROWS, 2 * STEPS)
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(WAITS)
    last = WIDTH - STEPS * STEP
    for start in range(0, WIDTH, STEPS * STEP):
        now, scales_now = codes, scales
        after = start + STEPS * STEP
        codes = codes_of_steps(codes_at, is_read & (after < WIDTH), after, WIDTH, STEP, STEPS, STEP)
        scales = _exponents(scale_at, tl.minimum(after, last) // STEP * 2, NUM_ROWS, 2 * STEPS)
        for step in tl.static_range(STEPS):
            low = scaled_from_e2m1(now[step], scales_now[2 * step], False, DTYPE, IN_PAIRS)
            low = in_order_by_warp(low, BLOCK_N, STEP, WARPS)
            at = x_at + 2 * (start + step * STEP)
            if STEPS > 1:
                high = scaled_from_e2m1(now[step], scales_now[2 * step + 1], True, DTYPE, IN_PAIRS)
                high = in_order_by_warp(high, BLOCK_N, STEP, WARPS)
                both = tl.permute(tl.join(low, high), (0, 2, 1))
                weight = tl.reshape(both, [BLOCK_N, 2 * STEP])
                x = tl.load(at + tl.arange(0, 2 * STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(weight, x, y, input_precision="ieee")
            else:
                # Triton lets a turn's last product run on into the next turn, with weights in
                # registers. If these are converted before a wait, ptxas overwrites them in the next
                # turn before they are multiplied (seen as NaN with Triton 3.6; 3.7 does it as
                # well). So there must be two products, and the second converts after the first.
                x = tl.load(at + tl.arange(0, STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(low, x, y, input_precision="ieee")
                high = scaled_from_e2m1(now[step], scales_now[2 * step + 1], True, DTYPE, IN_PAIRS)
                high = in_order_by_warp(high, BLOCK_N, STEP, WARPS)
                x = tl.load(at + STEP + tl.arange(0, STEP)[:, None], mask=is_pair, other=0.0)
                y = tl.dot(high, x, y, input_precision="ieee")
    return unscaled(y)


@triton.jit
def _exponents(at, first, NUM_ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The scales of COUNT groups, each [outputs]."""
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(at + first * NUM_ROWS + i * NUM_ROWS)
        values = values + (value.to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return values
