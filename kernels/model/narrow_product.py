"""The kernel of products with a narrow matrix, and how it is launched.

Codes go from memory straight into the registers of the threads that multiply by them. Those of the
next steps are loaded while some are multiplied, and the first before the inputs are there: so
memory is busy from the kernel before to this one.
"""

import torch
from torch import Tensor

from .._dispatch import num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .e2m1 import scaled_by_words
from .narrow_matrix import NarrowMatrix, has_4_bits
from .narrow_numbers import in_order_by_warp, numbers, output_by_warp
from .tiles import counters, tile_of_program

_TILES_TOGETHER = 8  # tiles of rows that share weights in the L2 cache


def _tiling(x: Tensor, matrix: NarrowMatrix, num_splits: int) -> dict[str, int]:
    """Rows and outputs of a tile, warps, and how much is loaded ahead; no sum depends on these."""
    num_rows = len(x)
    block_n, steps, num_warps, num_stages = 64, 1, 4, 3
    if x.element_size() == 4:
        block_m = 16  # more rows of float32 do not fit
    elif num_rows <= 32:
        block_m, steps = 16 if num_rows <= 16 else 32, 2
    elif num_rows <= 128:
        block_m = 64
        if num_splits == 1 and not has_4_bits(matrix.kind):
            num_stages = 4
    else:
        block_m, block_n, num_warps = 128, 128, 8
    if matrix.codes.shape[1] // num_splits % (steps * matrix.half):
        steps = 1
    num_inputs = steps * matrix.half * (2 if has_4_bits(matrix.kind) else 1)
    stage_bytes = block_m * num_inputs * x.element_size()
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STEPS": steps,
        "num_warps": num_warps,
        "num_stages": num_stages_of(num_stages, stage_bytes, x.device),
    }


def narrow_product(
    out: Tensor | None,
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None,
    num_splits: int,
    parts: Tensor | None,
    *,
    gated: bool = False,
    adds: bool = False,
) -> None:
    """One program for each split if there are `parts`, [splits, T, N] float32; else one for all.

    With `parts` and `out`, the last program of a tile adds up the parts; without `out`, the parts
    are the result.
    """
    assert x.stride(-1) == 1
    assert x.shape[1] == matrix.num_in
    assert out is None or out.is_contiguous()
    num_rows, width = len(x), matrix.codes.shape[1]
    num_out = matrix.shape[0]
    tiling = _tiling(x, matrix, num_splits)
    share = width // num_splits
    num_tiles = triton.cdiv(num_out, tiling["BLOCK_N"]) * triton.cdiv(num_rows, tiling["BLOCK_M"])
    merges = parts is not None and out is not None
    _narrow_kernel[num_tiles, num_splits if parts is not None else 1](
        out, x, matrix.codes.view(torch.int32), matrix.scale, matrix.zero, matrix.factor, bias,
        parts, counters(x.device, triton.next_power_of_2(num_tiles)) if merges else None, num_rows,
        num_out // 2 if gated else num_out, x.stride(0), matrix.scale.stride(0),
        KIND=matrix.kind, NUM_IN=matrix.num_in, WIDTH=width, SHARE=share, SPLITS=num_splits,
        GROUP=matrix.group, ROWS=matrix.rows, STEP=matrix.half, CHUNK=matrix.chunk,
        WARPS=tiling["num_warps"], GATED=gated, ADDS=adds, TOGETHER=_TILES_TOGETHER,
        IN_PAIRS=x.is_cuda and x.element_size() == 2,
        enable_fp_fusion=False,  # otherwise only some of these kernels would round a scaled sum
        **tiling, **dependent_launch(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _narrow_kernel(
    out_ptr,  # [num_rows, num_out] or None
    x_ptr,  # [num_rows, NUM_IN]
    codes_ptr,  # [num_out or 2 * num_out, WIDTH / 4] words of 4 bytes
    scale_ptr,  # [groups, num_out / ROWS]; nvfp4: [groups / 4, num_out] words
    zero_ptr,  # [groups, num_out] or None
    factor_ptr,  # [num_out or 2 * num_out] or None
    bias_ptr,  # [num_out] or None
    parts_ptr,  # [SPLITS, num_rows, num_out or 2 * num_out] float32, or None
    counters_ptr,  # [tiles], or None
    num_rows,
    num_out,
    x_stride,
    scale_stride,
    KIND: tl.constexpr,
    NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    TOGETHER: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N products with BLOCK_M rows, over one split of the inputs or all of
    them, one after the other; with ADDS on top of what `out` holds.
    """
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile_m, tile_n = tile_of_program(
        tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_out, OUTS), TOGETHER
    )
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    i = tl.arange(0, BLOCK_N)
    n = tile_n * OUTS + i % OUTS
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    num_weight_rows = num_out * (2 if GATED else 1)
    weight_row = n + i // OUTS * num_out
    is_row, is_out = row < num_rows, n < num_out
    read = output_by_warp(i, WARPS)
    is_read = tile_n * OUTS + read % OUTS < num_out
    read_row = tile_n * OUTS + read % OUTS + read // OUTS * num_out
    codes_at = codes_ptr + read_row.to(tl.int64)[:, None] * (WIDTH // 4)
    scale_at, zero_at, factor_at = scale_ptr + weight_row // ROWS, zero_ptr, factor_ptr
    if zero_ptr is not None:
        zero_at = zero_ptr + weight_row
    if factor_ptr is not None:
        scale_at, factor_at = scale_ptr + read_row, factor_ptr + weight_row
    mask = is_row & is_out[:, None]
    split = 0
    if parts_ptr is not None:
        split = tl.program_id(1)
    x_at = x_ptr + row * x_stride
    total = share_of_product(
        x_at, codes_at, scale_at, zero_at, factor_at, is_row, is_out, is_read, scale_stride,
        num_weight_rows, split, KIND, NUM_IN, WIDTH, SHARE, GROUP, STEP, STEPS, CHUNK, IN_PAIRS,
        BLOCK_M, BLOCK_N, WARPS, DEPENDENT,
    )  # fmt: skip
    if parts_ptr is not None:
        part_at = parts_ptr + row * num_weight_rows + weight_row[:, None]
        stride = num_rows.to(tl.int64) * num_weight_rows
        tl.store(part_at + split * stride, total, mask=mask)
        if out_ptr is not None:
            tl.debug_barrier()  # all stores of the program must come before its count
            counter = counters_ptr + tl.program_id(0)
            num_before = tl.atomic_add(counter, 1, sem="acq_rel")
            mask = mask & (num_before == SPLITS - 1)  # only the last program continues
            tl.store(counter, 0, mask=num_before == SPLITS - 1)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for each in tl.static_range(SPLITS):
                # Not from a cache that may have been filled before the others stored.
                total += tl.load(
                    part_at + each * stride, mask=mask, other=0.0, cache_modifier=".cg"
                )
    else:
        if ADDS:
            out_at = out_ptr + row * num_out + n[:, None]
            total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        for each in tl.static_range(1, SPLITS):
            total += share_of_product(
                x_at, codes_at, scale_at, zero_at, factor_at, is_row, is_out, is_read, scale_stride,
                num_weight_rows, each, KIND, NUM_IN, WIDTH, SHARE, GROUP, STEP, STEPS, CHUNK,
                IN_PAIRS, BLOCK_M, BLOCK_N, WARPS, False,
            )  # fmt: skip
    if out_ptr is not None:
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + weight_row, mask=is_out, other=0.0).to(tl.float32)
            total += bias[:, None]
        goes_on = is_row
        if counters_ptr is not None:
            goes_on = is_row & (num_before == SPLITS - 1)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0)))
            y = gate / (1.0 + tl.exp(-gate)) * up
            outs = tile_n * OUTS + tl.arange(0, OUTS)
        else:
            y = total
            outs = n
        tl.store(
            out_ptr + row * num_out + outs[:, None],
            y.to(out_ptr.dtype.element_ty),
            mask=goes_on & (outs < num_out)[:, None],
        )


@triton.jit
def share_of_product(
    x_at, codes_at, scale_at, zero_at, factor_at, is_row, is_out, is_read, scale_stride,
    zero_stride, split,
    KIND: tl.constexpr, NUM_IN: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    GROUP: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
    IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Products over one split of the inputs, scaled; with WAITS the inputs are not there yet.

    Shape: x_at, is_row [1, BLOCK_M], where rows begin; codes_at [BLOCK_N, 1] and is_read [BLOCK_N],
    in the order of `output_by_warp`; scale_at (nvfp4: in that order, too), zero_at, factor_at,
    is_out [BLOCK_N] -> [BLOCK_N, BLOCK_M] float32.
    """
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    HALVES: tl.constexpr = 1 if KIND == "fp8" or KIND == "int8" else 2
    SCALES_NUMBERS: tl.constexpr = KIND == "nvfp4"
    ONE_GROUP: tl.constexpr = GROUP >= NUM_IN and not SCALES_NUMBERS
    CHUNKS: tl.constexpr = STEP // CHUNK
    PARTS: tl.constexpr = STEPS * HALVES
    begin = split * SHARE
    has_scale = is_read if SCALES_NUMBERS else is_out
    is_read = is_read[:, None]
    OF_ONE: tl.constexpr = STEP if SCALES_NUMBERS else GROUP  # inputs of an entry of scales
    codes = codes_of_steps(codes_at, is_read, begin, WIDTH, STEP, STEPS, CHUNK)
    x_at += tl.arange(0, CHUNK)[:, None]
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scales = _of_groups(
        scale_at, scale_stride, has_scale, begin * HALVES, NUM_IN, OF_ONE, STEP, PARTS
    )
    zeros = scales
    if zero_at is not None:
        zeros = _of_groups(zero_at, zero_stride, is_out, begin * HALVES, NUM_IN, GROUP, STEP, PARTS)
    wait_for_inputs(WAITS)
    for start in range(begin, begin + SHARE, STEPS * STEP):
        now, scales_now, zeros_now = codes, scales, zeros
        after = start + STEPS * STEP
        in_share = is_read & (after < begin + SHARE)
        codes = codes_of_steps(codes_at, in_share, after, WIDTH, STEP, STEPS, CHUNK)
        if not ONE_GROUP:
            scales = _of_groups(
                scale_at, scale_stride, has_scale, after * HALVES, NUM_IN, OF_ONE, STEP, PARTS
            )
        if zero_at is not None and not ONE_GROUP:
            zeros = _of_groups(
                zero_at, zero_stride, is_out, after * HALVES, NUM_IN, GROUP, STEP, PARTS
            )
        for i in tl.static_range(PARTS):
            part = y
            if not (ONE_GROUP or SCALES_NUMBERS):
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                words = now[i // HALVES * CHUNKS + chunk]
                if SCALES_NUMBERS:
                    weight = scaled_by_words(words, scales_now[i], i % HALVES == 1, DTYPE, IN_PAIRS)
                else:
                    low, high = numbers(words, zero_at is not None, KIND, DTYPE, IN_PAIRS)
                    weight = low
                    if i % HALVES == 1:
                        weight = high
                weight = in_order_by_warp(weight, BLOCK_N, CHUNK, WARPS)
                if zero_at is not None:
                    zero = zeros_now[i].to(tl.float32)
                    if KIND == "int4" and IN_PAIRS:
                        zero += 128.0 if tl.bfloat16 == DTYPE else 1024.0
                    weight = weight - zero.to(weight.dtype)[:, None]
                k = start * HALVES + i * STEP + chunk * CHUNK
                in_x = is_row
                if NUM_IN % (STEP * HALVES) != 0:
                    in_x = is_row & (k + tl.arange(0, CHUNK) < NUM_IN)[:, None]
                x = tl.load(x_at + k, mask=in_x, other=0.0)
                part = tl.dot(weight, x, part, input_precision="ieee")
            if ONE_GROUP or SCALES_NUMBERS:
                y = part
            else:
                y += part * scales_now[i].to(tl.float32)[:, None]
    if SCALES_NUMBERS:
        y *= tl.load(factor_at, mask=is_out, other=0.0)[:, None] * 256.0
    elif ONE_GROUP:
        y *= scales[0].to(tl.float32)[:, None]
    return y


@triton.jit
def codes_of_steps(
    codes_at, mask, start, WIDTH: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The bytes of some steps: for each chunk [outputs, CHUNK / 4] words."""
    chunks = ()
    for chunk in tl.static_range(STEPS * STEP // CHUNK):
        at = start + chunk * CHUNK
        words_at = codes_at + at // 4 + tl.arange(0, CHUNK // 4)[None, :]
        # A thread reads what it multiplies, a quarter of a chunk.
        words_at = tl.multiple_of(words_at, (1, CHUNK // 4))
        if WIDTH % STEP == 0:
            words = tl.load(words_at, mask=mask)
        else:
            words = tl.load(words_at, mask=mask & (at < WIDTH), other=0)
        chunks = chunks + (words,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _of_groups(
    at, stride, mask, first, NUM_IN: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Scales or zero points of the next PARTS times STEP inputs, each [outputs]."""
    values = ()
    for i in tl.static_range(PARTS):
        group = tl.minimum(first + i * STEP, NUM_IN - 1) // GROUP  # NUM_IN: padding
        value = tl.load(at + group * stride, mask=mask, other=0.0)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return values
