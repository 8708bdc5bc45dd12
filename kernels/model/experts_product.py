"""The kernel of products with experts' matrices, and how it is launched.

A program multiplies a tile of rows that share an expert by some of its outputs. Blocks of a plain
matrix come through shared memory, and so do codes that multiply codes (`scaled_experts.py`). Others
go from memory straight into the registers of the threads that multiply by them, as in
`narrow_product.py` or `mxfp4_experts.py`. On a Hopper GPU, MXFP4 has a kernel of its own for tiles
of few pairs (`mxfp4_few_rows.py`), and so have plain matrices (`few_rows_experts.py`).

A tile of 128 pairs that is at most half full, as an expert's last often is, is multiplied as one of
64.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import is_hopper, num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from . import few_rows_experts, mxfp4_few_rows
from .expert_matrix import MXFP4_GROUP, Activation, ExpertMatrix, Glu, is_mxfp4
from .mxfp4_experts import mxfp4_sums
from .narrow_matrix import STEP, NarrowMatrix, has_4_bits
from .narrow_numbers import output_by_warp
from .narrow_product import share_of_product
from .routing import Routing
from .row_codes import RowCodes, Rows
from .scaled_experts import scaled_sums
from .silu_mul import limited_glu

_STEP_BYTES = 128  # of a plain matrix's row, in a step


class _Numbers(NamedTuple):
    """A matrix as the kernel takes it."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    factor: Tensor | None
    options: dict[str, Any]  # constants, warps, and loops loaded ahead; the tiling changes no sum


def _of_plain(layer: ExpertMatrix, x: Tensor, size: int) -> _Numbers:
    """For tiles of `size` pairs.

    The inputs of a step are the same for all sizes, since sums depend on them.
    """
    matrix, step = layer.matrix, _STEP_BYTES // x.element_size()
    assert isinstance(matrix, Tensor)
    assert matrix.is_contiguous()
    assert matrix.dtype == x.dtype
    width = matrix.shape[1]
    is_even = layer.num_out % 256 == 0 and width % step == 0
    if size == 128 and is_even and x.element_size() == 2 and is_hopper(x.device):
        # Faster on an H200, where it reads rows and weights less often; not tried elsewhere.
        tiling = {"BLOCK_N": 256, "num_warps": 8, "num_stages": 4}
    else:
        outs = 128 if size == 128 else 64
        stages = num_stages_of(3, (outs + size) * _STEP_BYTES, x.device)
        tiling = {"BLOCK_N": outs, "num_warps": outs // 16, "num_stages": stages}
    options = {"KIND": "plain", "WIDTH": width, "GROUP": 0, "ROWS": 1, "CHUNK": 0, "STEPS": 1}
    return _Numbers(matrix, None, None, None, options | {"STEP": step} | tiling)


def _of_mxfp4(matrix: NarrowMatrix, x: Tensor, size: int) -> _Numbers:
    """For tiles of `size` pairs."""
    assert matrix.num_in % (2 * MXFP4_GROUP) == 0
    assert x.dtype != torch.float16, "it cannot hold every number of MXFP4"
    width = matrix.codes.shape[1]
    if size == 128:
        # With 128 registers a thread, two programs share a multiprocessor.
        tiling = {"BLOCK_N": 128, "STEPS": 1, "num_warps": 8, "num_stages": 4, "maxnreg": 128}
    else:
        # Several steps in a loop cost fewer instructions.
        most = 5 if size < 64 else 3
        steps = next(n for n in range(most, 0, -1) if width // MXFP4_GROUP % n == 0)
        tiling = {"BLOCK_N": 64, "STEPS": steps, "num_warps": 4, "num_stages": 3}
    numbers = _of_narrow(matrix, x, size)
    options = numbers.options | {"KIND": "mxfp4"} | tiling
    return numbers._replace(scale=matrix.scale.view(torch.uint8), options=options)


def _of_scaled(matrix: NarrowMatrix, x: Tensor, size: int) -> _Numbers:
    """For tiles of `size` pairs."""
    assert (matrix.kind, matrix.group) == ("fp8", STEP)
    outs, num_warps, most = (128, 8, 3) if size == 128 else (64, 4, 5)
    if matrix.num_in <= 8 * STEP:  # soon over: more programs side by side do more than loads ahead
        most = min(most, 4, max(1, matrix.num_in // STEP - 1))
    stages = num_stages_of(most, (outs + size) * STEP, x.device)
    tiling = {"BLOCK_N": outs, "STEPS": 1, "num_warps": num_warps, "num_stages": stages}
    options = {
        "KIND": "scaled", "WIDTH": matrix.codes.shape[1], "GROUP": STEP, "ROWS": matrix.rows,
        "STEP": STEP, "CHUNK": 0,
    }  # fmt: skip
    return _Numbers(matrix.codes, matrix.scale, None, None, options | tiling)


def _of_narrow(matrix: NarrowMatrix, x: Tensor, size: int) -> _Numbers:
    """For tiles of `size` pairs."""
    assert matrix.scale.is_contiguous()
    assert matrix.zero is None or matrix.zero.is_contiguous()
    assert matrix.order is None
    assert not matrix.rounds_inputs
    width, half = matrix.codes.shape[1], matrix.half
    outs, num_warps = (128, 8) if size == 128 else (64, 4)
    steps = 2 if size <= 32 and width % (2 * half) == 0 else 1
    num_inputs = steps * half * (2 if has_4_bits(matrix.kind) else 1)
    stages = num_stages_of(3, size * num_inputs * x.element_size(), x.device)
    tiling = {"BLOCK_N": outs, "STEPS": steps, "num_warps": num_warps, "num_stages": stages}
    options = {
        "KIND": matrix.kind, "WIDTH": width, "GROUP": matrix.group, "ROWS": matrix.rows,
        "STEP": half, "CHUNK": matrix.chunk,
    }  # fmt: skip
    parts = matrix.scale, matrix.zero, matrix.factor
    return _Numbers(matrix.codes.view(torch.int32), *parts, options | tiling)


def experts_product(
    x: Rows,
    routing: Routing,
    layer: ExpertMatrix,
    activation: Activation | None,
    some: range | None = None,
) -> Tensor:
    """With an activation, the activations of each pair; else its outputs times its weight, which
    are the parts of each row's sum: all of them, or `some`, which begin at a multiple of 128. Rows
    are codes if the matrix rounds its inputs.

    Sums are not split over K: that was slower on an H200 from a few rows on.
    Parts are rounded to x's dtype, since a prompt has many. Those of padding rows are not written.
    Shape: x [T, K] or, without an activation, [T * k, K]
        -> [T * k, N / 2 of gated experts, else N] or [k, T, N or len(some)]
    """
    glu = activation if isinstance(activation, Glu) else None
    num_rows, top_k = routing.ids.shape
    num_pairs = num_rows * top_k
    matrix, num_out = layer.matrix, layer.num_out // (2 if glu else 1)
    outs = range(num_out) if some is None else some
    assert outs.start % 128 == 0
    assert outs.stop <= num_out
    rows, x_scale = (x.codes, x.scale) if isinstance(x, RowCodes) else (x, None)
    assert isinstance(x, RowCodes) or matrix.shape[1] == rows.shape[1]
    assert rows.stride(-1) == 1
    num_tiles, size = routing.tiles.pairs.shape
    is_first = activation is not None
    shape = (num_pairs, num_out) if is_first else (top_k, num_rows, len(outs))
    out = torch.empty(shape, dtype=x.dtype, device=rows.device)
    if some is None and mxfp4_few_rows.is_for(rows, layer, routing, activation):
        mxfp4_few_rows.few_rows_of_experts(out, rows, routing, layer, glu)
        return out
    if some is None and few_rows_experts.is_for(rows, layer, routing, activation):
        few_rows_experts.few_rows_of_experts(out, rows, routing, layer, glu)
        return out
    if not isinstance(matrix, NarrowMatrix):
        numbers = _of_plain(layer, rows, size)
    else:
        of_kind = _of_mxfp4 if is_mxfp4(matrix) else _of_narrow
        numbers = (_of_scaled if matrix.rounds_inputs else of_kind)(matrix, rows, size)
    num_tiles *= triton.cdiv(len(outs) * (2 if glu else 1), numbers.options["BLOCK_N"])
    _experts_kernel[(num_tiles,)](
        out,
        rows,
        x_scale,
        routing.weights,
        *routing.tiles,
        numbers.codes,
        numbers.scale,
        numbers.zero,
        numbers.factor,
        layer.bias,
        *(glu or (0.0, 0.0, 0.0)),
        num_rows,
        num_out,
        outs.start,
        len(outs),
        rows.stride(0),
        *((0, 0) if numbers.scale is None else numbers.scale.stride()),
        layer.num_experts,
        TOP_K=top_k,
        NUM_ROWS=matrix.shape[0],
        NUM_IN=matrix.shape[1],
        FIRST=is_first,
        GATED=glu is not None,
        BLOCK_M=size,
        WARPS=numbers.options["num_warps"],
        IN_PAIRS=rows.is_cuda and rows.element_size() == 2,
        enable_fp_fusion=False,  # otherwise only some of these kernels might fuse a sum
        **numbers.options,
        **dependent_launch(rows.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _experts_kernel(
    out_ptr,  # FIRST: [num_rows * TOP_K, width], else [TOP_K, num_rows, width]
    x_ptr,  # FIRST: [num_rows, inputs], else [num_rows * TOP_K, inputs]
    x_scale_ptr,  # of codes: [as x, groups], or None
    weights_ptr,  # [num_rows * TOP_K]
    experts_ptr,  # [tiles]
    pairs_ptr,  # [tiles, BLOCK_M]
    codes_ptr,  # [experts * outputs, WIDTH / 4] words, or the plain matrix, WIDTH = NUM_IN
    scale_ptr,  # [groups, experts * outputs / ROWS], or None; MXFP4: exponents, 127 too large
    zero_ptr,  # [groups, experts * outputs], or None
    factor_ptr,  # [experts * outputs], or None
    bias_ptr,  # [experts * outputs], or None
    alpha,
    limit,
    shift,
    num_rows,
    num_out,  # of the gate or, not GATED, in all
    first_out,
    width,
    x_stride,
    scale_stride,
    scale_step,
    num_experts,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N outputs of one tile of pairs.

    FIRST: of their first layer, gated, or squared where they are more than 0.
    """
    num_tiles_n = tl.cdiv(width, BLOCK_N // 2 if GATED else BLOCK_N)
    tile, tile_n = tl.program_id(0) // num_tiles_n, tl.program_id(0) % num_tiles_n
    # The router in front of the first layer makes tiles and weights. That layer waits for them
    # before it lets the next kernel start, so `down` may read them before it waits, but not from a
    # cache that may be older; also if the first layer's outputs are rounded in between.
    if FIRST:
        wait_for_inputs(DEPENDENT)
    start_next_kernel(DEPENDENT)
    expert = tl.load(experts_ptr + tile, cache_modifier=".cg")
    if expert < num_experts:
        pairs_at = pairs_ptr + tile * BLOCK_M
        is_half = False
        if BLOCK_M == 128:
            is_half = tl.load(pairs_at + 64, cache_modifier=".cg") == num_rows * TOP_K
        if is_half:
            _outputs_of_tile(
                out_ptr, x_ptr, x_scale_ptr, weights_ptr, pairs_at, codes_ptr, scale_ptr, zero_ptr,
                factor_ptr, bias_ptr, alpha, limit, shift, num_rows, num_out, first_out, width,
                x_stride, scale_stride, scale_step, expert, tile_n, KIND, TOP_K, NUM_ROWS, NUM_IN,
                WIDTH, GROUP, ROWS, STEP, CHUNK, STEPS, FIRST, GATED, BLOCK_M // 2, BLOCK_N, WARPS,
                IN_PAIRS, DEPENDENT,
            )  # fmt: skip
        else:
            _outputs_of_tile(
                out_ptr, x_ptr, x_scale_ptr, weights_ptr, pairs_at, codes_ptr, scale_ptr, zero_ptr,
                factor_ptr, bias_ptr, alpha, limit, shift, num_rows, num_out, first_out, width,
                x_stride, scale_stride, scale_step, expert, tile_n, KIND, TOP_K, NUM_ROWS, NUM_IN,
                WIDTH, GROUP, ROWS, STEP, CHUNK, STEPS, FIRST, GATED, BLOCK_M, BLOCK_N, WARPS,
                IN_PAIRS, DEPENDENT,
            )  # fmt: skip
    elif not FIRST:
        wait_for_inputs(DEPENDENT)


@triton.jit
def _outputs_of_tile(
    out_ptr, x_ptr, x_scale_ptr, weights_ptr, pairs_at, codes_ptr, scale_ptr, zero_ptr, factor_ptr,
    bias_ptr, alpha, limit, shift, num_rows, num_out, first_out, width, x_stride, scale_stride,
    scale_step, expert, tile_n, KIND: tl.constexpr, TOP_K: tl.constexpr, NUM_ROWS: tl.constexpr,
    NUM_IN: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    IN_PAIRS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the BLOCK_M pairs at `pairs_at`."""
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    start = first_out + tile_n * OUTS
    i = tl.arange(0, BLOCK_N)
    read = output_by_warp(i, WARPS)
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    n = start + i % OUTS
    is_out, is_read = n < num_out, start + read % OUTS < num_out
    in_expert = tl.minimum(n, num_out - 1) + i // OUTS * num_out
    read_in_expert = tl.minimum(start + read % OUTS, num_out - 1) + read // OUTS * num_out
    num_weight_rows = num_out * (2 if GATED else 1)
    pairs_at += tl.arange(0, BLOCK_M)[None, :]
    pair = tl.load(pairs_at, cache_modifier=".cg")
    is_pair = pair < num_rows * TOP_K
    weight_row = expert * num_weight_rows + in_expert
    # What comes behind the sums is loaded before them, unless it would spill registers.
    KEPT: tl.constexpr = KIND == "scaled" and BLOCK_M <= 32
    if KEPT and not FIRST:
        weight = tl.load(weights_ptr + pair, mask=is_pair, other=0.0, cache_modifier=".cg")
    x_row = pair // TOP_K if FIRST else pair
    x_at = x_ptr + tl.where(is_pair, x_row, 0).to(tl.int64) * x_stride
    if KIND == "scaled":
        row = tl.reshape(tl.where(is_pair, x_row, 0), [BLOCK_M]).to(tl.int64)
        x_scale_at = x_scale_ptr + row * ((NUM_IN + GROUP - 1) // GROUP)
        total = scaled_sums(
            x_ptr + row * x_stride, x_scale_at, codes_ptr + weight_row.to(tl.int64) * WIDTH,
            scale_ptr + weight_row // ROWS * scale_step, scale_stride,
            tl.reshape(is_pair, [BLOCK_M]), NUM_IN, WIDTH, GROUP, BLOCK_M, BLOCK_N,
            DEPENDENT and not FIRST,
        )  # fmt: skip
    elif KIND == "plain":
        weight_at = codes_ptr + weight_row.to(tl.int64)[:, None] * WIDTH
        total = _plain_sums(
            x_at, weight_at, is_pair, is_out[:, None],
            WIDTH, STEP, BLOCK_M, BLOCK_N, DEPENDENT and not FIRST,
        )  # fmt: skip
    else:
        read_row = expert * num_weight_rows + read_in_expert
        codes_at = codes_ptr + read_row.to(tl.int64)[:, None] * (WIDTH // 4)
        if KIND == "mxfp4":
            total = mxfp4_sums(
                x_at, codes_at, scale_ptr + read_row, is_pair, is_read[:, None], NUM_ROWS,
                WIDTH, STEPS, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS, DEPENDENT and not FIRST,
            )  # fmt: skip
        else:
            scale_at, zero_at, factor_at = scale_ptr + weight_row // ROWS, zero_ptr, factor_ptr
            if zero_ptr is not None:
                zero_at = zero_ptr + weight_row
            if factor_ptr is not None:
                scale_at, factor_at = scale_ptr + read_row, factor_ptr + weight_row
            total = share_of_product(
                x_at, codes_at, scale_at, zero_at, factor_at, is_pair, is_out, is_read,
                scale_stride, NUM_ROWS, 0, KIND, NUM_IN, WIDTH, WIDTH, GROUP, STEP, STEPS,
                CHUNK, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS, DEPENDENT and not FIRST,
            )  # fmt: skip
    if not KEPT:
        pair = tl.load(pairs_at, cache_modifier=".cg")
        is_pair = pair < num_rows * TOP_K
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row, mask=is_out, other=0.0).to(tl.float32)
        total += bias[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0)))
        y = limited_glu(gate, up, alpha, limit, shift)
    elif FIRST:
        y = total * tl.where(total < 0.0, 0.0, total)  # keeps what is not a number
    else:
        if not KEPT:
            weight = tl.load(weights_ptr + pair, mask=is_pair, other=0.0)
        y = total * weight
    out_row = pair if FIRST else pair % TOP_K * num_rows + pair // TOP_K
    outs = tile_n * OUTS + tl.arange(0, OUTS)
    tl.store(
        out_ptr + out_row.to(tl.int64) * width + outs[:, None],
        y.to(out_ptr.dtype.element_ty),
        mask=is_pair & (outs < width)[:, None],
    )


@triton.jit
def _plain_sums(
    x_at, weight_at, is_pair, is_out, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """As `mxfp4_sums`, of a plain matrix."""
    k = tl.arange(0, BLOCK_K)
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(WAITS)
    for start in range(0, WIDTH, BLOCK_K):
        if BLOCK_N == 256:  # has whole steps, and what it reads for no pair or output is dropped
            weight = tl.load(weight_at + start + k[None, :])
            x = tl.load(x_at + start + k[:, None])
        else:
            is_in = start + k < WIDTH
            mask = is_out & is_in[None, :]
            weight = tl.load(weight_at + start + k[None, :], mask=mask, other=0.0)
            x = tl.load(x_at + start + k[:, None], mask=is_pair & is_in[:, None], other=0.0)
        y = tl.dot(weight, x, y, input_precision="ieee")
    return y
