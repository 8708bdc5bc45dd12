"""Linear layers whose matrix has 4 or 8 bits a number, and whose inputs have 16:

    y = epilogue(rmsnorm(x) W^T + b)

A program converts the codes of its outputs to numbers of x's dtype, which holds them exactly, and
multiplies on tensor cores, with sums in float32. Scales multiply sums, not weights. So nothing is
rounded beyond what the format rounds, and activations are not quantised.

The matrix alone decides the order of summation, so the bits of a row do not depend on the batch.
For many rows the library is much faster; then the matrix is unpacked for it, one layer at a time,
unless the bits must be the same.
"""

import functools

import torch
from torch import Tensor

from .._dispatch import num_programs, uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .linear import add_linear, linear, linear_reference
from .narrow_matrix import STEP, NarrowMatrix, dequantise, has_4_bits
from .narrow_numbers import in_order_by_warp, numbers, output_by_warp, unpack
from .rms_norm import Norm, rms_norm
from .split_product import add_parts

# Measured on an H200.
_MAX_ROWS = 256  # beyond this the library is faster, although the matrix must be unpacked
_MAX_SPLITS = 8
_PROGRAMS_PER_SM = 5  # into which a product is split at most
_GATED_PROGRAMS_PER_SM = {8: 3, 4: 6}  # by the bits of a number
_MANY_OUTPUTS = 1 << 14
_MIN_STEPS = 2  # of a split
_MAX_SPLIT_ROWS = 256
_AHEAD_BYTES = 1 << 24  # of weights that are prefetched while the kernel before still runs
_TILES_TOGETHER = 8  # tiles of rows that share weights in the L2 cache
_BLOCK_N = 64


def narrow_linear(
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    same_bits: bool = False,
) -> Tensor:
    """Like `linear`: rmsnorm(x) W^T + b; with `gated`, silu(first half) * second half of that.

    With `same_bits`, the bits of a row do not depend on the batch.
    Shape: x [T, K], rows dense, matrix [N, K] or, gated, [2 N, K], out [T, N] dense -> [T, N]
    """
    if not uses_triton(x):
        plain = dequantise(matrix, x.dtype)
        y = linear_reference(x, plain, bias, norm=norm, gated=gated)
        return y if out is None else out.copy_(y)
    if len(x) > _MAX_ROWS and not same_bits:
        y = linear(_ordered(x, matrix, norm), unpack(matrix, x.dtype), bias, gated=gated)
        return y if out is None else out.copy_(y)
    if out is None:
        num_out = matrix.shape[0]
        out = x.new_empty(len(x), num_out // 2 if gated else num_out)
    x = _ordered(x, matrix, norm)
    num_splits = _num_splits(matrix, gated=gated)
    parts = None
    if num_splits > 1 and len(x) <= _MAX_SPLIT_ROWS:
        parts = x.new_empty(num_splits, len(x), matrix.shape[0], dtype=torch.float32)
    _launch(out, x, matrix, bias, num_splits, parts, gated=gated)
    return out


def add_narrow_linear(
    residual: Tensor,
    x: Tensor,
    matrix: NarrowMatrix,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    same_bits: bool = False,
) -> Tensor | None:
    """Like `add_linear`: add x W^T + b to the residual in place.

    Returns norm(residual) if that comes cheaply; otherwise None, and the next layer must apply it.
    Shape: residual [T, N] dense, x [T, K], matrix [N, K] -> [T, N]
    """
    if not uses_triton(x):
        plain = dequantise(matrix, x.dtype)
        linear_reference(x, plain, bias, residual=residual)
        return None
    if len(x) > _MAX_ROWS and not same_bits:
        x = _ordered(x, matrix)
        return add_linear(residual, x, unpack(matrix, x.dtype), bias, norm=norm)
    x = _ordered(x, matrix)
    num_splits = _num_splits(matrix)
    if bias is None and len(x) <= _MAX_SPLIT_ROWS:
        parts = x.new_empty(num_splits, *residual.shape, dtype=torch.float32)
        _launch(None, x, matrix, None, num_splits, parts)
        return add_parts(residual, parts, norm)
    _launch(residual, x, matrix, bias, num_splits, None, adds=True)
    return None


def _ordered(x: Tensor, matrix: NarrowMatrix, norm: Norm | None = None) -> Tensor:
    """The inputs in the order of the codes' columns, normalised if there is a norm."""
    if norm is not None:
        x = rms_norm(x, norm)
    return x if matrix.order is None else x.index_select(1, matrix.order)


def _num_splits(matrix: NarrowMatrix, *, gated: bool = False) -> int:
    """How many partial sums an output is split into, so that few outputs keep a GPU busy."""
    bits = 4 if has_4_bits(matrix.kind) else 8
    per_sm = _GATED_PROGRAMS_PER_SM[bits] if gated else _PROGRAMS_PER_SM
    num_tiles = triton.cdiv(matrix.shape[0], _BLOCK_N)
    most = min(_MAX_SPLITS, num_programs(matrix.codes.device, per_sm) // num_tiles)
    splits, share = 1, matrix.codes.shape[1]
    while 2 * splits <= most and share % (2 * matrix.half) == 0:
        if share // 2 < _MIN_STEPS * matrix.half:
            break
        splits, share = 2 * splits, share // 2
    return splits


def _tiling(num_rows: int, matrix: NarrowMatrix, num_splits: int) -> dict[str, int]:
    """Rows and outputs of a tile, warps, and steps loaded ahead; no sum depends on these."""
    if num_rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    block_n, num_stages = 64, 3
    if matrix.half == STEP:
        has_few_rows = block_m == 16
        if has_4_bits(matrix.kind):
            block_n = 128 if has_few_rows and matrix.shape[0] >= _MANY_OUTPUTS else 64
            num_stages = 4 if has_few_rows and block_n == 64 else 3
        elif has_few_rows:
            num_stages = 5
        elif num_splits >= _MAX_SPLITS:
            block_n = 128
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": num_stages}


def _launch(
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
    tiling = _tiling(num_rows, matrix, num_splits)
    share = width // num_splits
    num_tiles = triton.cdiv(num_out, tiling["BLOCK_N"]) * triton.cdiv(num_rows, tiling["BLOCK_M"])
    merges = parts is not None and out is not None
    _narrow_kernel[num_tiles, num_splits if parts is not None else 1](
        out,
        x,
        matrix.codes.view(torch.uint8),
        matrix.scale,
        matrix.zero,
        bias,
        parts,
        _counters(x.device, triton.next_power_of_2(num_tiles)) if merges else None,
        num_rows,
        num_out // 2 if gated else num_out,
        x.stride(0),
        matrix.scale.stride(0),
        KIND=matrix.kind,
        NUM_IN=matrix.num_in,
        WIDTH=width,
        SHARE=share,
        SPLITS=num_splits,
        GROUP=matrix.group,
        ROWS=matrix.rows,
        STEP=matrix.half,
        CHUNK=matrix.chunk,
        WARPS=tiling["num_warps"],
        GATED=gated,
        ADDS=adds,
        TOGETHER=_TILES_TOGETHER,
        AHEAD=min(share, _AHEAD_BYTES // num_out // 16 * 16),
        IN_PAIRS=x.is_cuda and x.element_size() == 2,
        enable_fp_fusion=False,  # otherwise only some of these kernels would round a scaled sum
        **tiling,
        **dependent_launch(x.device),
    )


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    """For each tile, how many splits are done; every launch leaves zeros."""
    return torch.zeros(size, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _narrow_kernel(
    out_ptr,  # [num_rows, num_out] or None
    x_ptr,  # [num_rows, NUM_IN]
    codes_ptr,  # [num_out or 2 * num_out, WIDTH] bytes
    scale_ptr,  # [groups, num_out / ROWS]
    zero_ptr,  # [groups, num_out] or None
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
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr,
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
    tile_m, tile_n = _tile(num_rows, tl.cdiv(num_out, OUTS), BLOCK_M, TOGETHER)
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
    split = tl.program_id(1)
    if DEPENDENT:
        first_code = tl.minimum(weight_row, num_weight_rows - 1).to(tl.int64) * WIDTH
        _ask_for(codes_ptr + first_code + split * SHARE, AHEAD)
    mask = is_row & is_out[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_inputs(DEPENDENT)
    if parts_ptr is not None:
        part = _share(
            x_ptr, codes_ptr, scale_ptr, zero_ptr, row, weight_row, read_row, is_row, is_out,
            is_read, x_stride, scale_stride, num_weight_rows, split, KIND, NUM_IN, WIDTH, SHARE,
            GROUP, ROWS, STEP, CHUNK, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS,
        )  # fmt: skip
        part_at = parts_ptr + row * num_weight_rows + weight_row[:, None]
        stride = num_rows.to(tl.int64) * num_weight_rows
        tl.store(part_at + split * stride, part, mask=mask)
        if out_ptr is not None:
            tl.debug_barrier()  # all stores of the program must come before its count
            counter = counters_ptr + tl.program_id(0)
            num_before = tl.atomic_add(counter, 1, sem="acq_rel")
            mask = mask & (num_before == SPLITS - 1)  # only the last program continues
            tl.store(counter, 0, mask=num_before == SPLITS - 1)
            for each in tl.static_range(SPLITS):
                # Not from a cache that may have been filled before the others stored.
                total += tl.load(
                    part_at + each * stride, mask=mask, other=0.0, cache_modifier=".cg"
                )
    else:
        if ADDS:
            out_at = out_ptr + row * num_out + n[:, None]
            total = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        for each in tl.static_range(SPLITS):
            total += _share(
                x_ptr, codes_ptr, scale_ptr, zero_ptr, row, weight_row, read_row, is_row, is_out,
                is_read, x_stride, scale_stride, num_weight_rows, each, KIND, NUM_IN, WIDTH, SHARE,
                GROUP, ROWS, STEP, CHUNK, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS,
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
def _share(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, row, weight_row, read_row, is_row, is_out, is_read,
    x_stride, scale_stride, zero_stride, split, KIND: tl.constexpr, NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Products over one split of the inputs, scaled. Shape: [BLOCK_N, BLOCK_M] float32."""
    HALVES: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    ONE_GROUP: tl.constexpr = GROUP >= NUM_IN
    k = tl.arange(0, CHUNK)
    codes_at = codes_ptr + read_row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    x_at = x_ptr + row * x_stride + k[:, None]
    scale_at = scale_ptr + weight_row // ROWS
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(split * SHARE, (split + 1) * SHARE, STEP):
        for half in tl.static_range(HALVES):
            group = tl.minimum(start * HALVES + half * STEP, NUM_IN - 1) // GROUP  # NUM_IN: padding
            part = y
            if not ONE_GROUP:
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for chunk in tl.static_range(STEP // CHUNK):
                in_codes = is_read[:, None]
                if WIDTH % STEP != 0:
                    in_codes = is_read[:, None] & (start + chunk * CHUNK < WIDTH)
                codes = tl.load(codes_at + start + chunk * CHUNK, mask=in_codes, other=0)
                codes = in_order_by_warp(codes, BLOCK_N, CHUNK, WARPS)
                low, high = numbers(
                    codes, zero_ptr is not None, KIND, x_ptr.dtype.element_ty, IN_PAIRS
                )
                weight = low
                if half == 1:
                    weight = high
                if zero_ptr is not None:
                    zero_at = zero_ptr + group * zero_stride + weight_row
                    zero = tl.load(zero_at, mask=is_out, other=0).to(tl.float32)
                    if KIND == "int4" and IN_PAIRS:
                        zero += 128.0 if x_ptr.dtype.element_ty == tl.bfloat16 else 1024.0
                    weight = weight - zero.to(weight.dtype)[:, None]
                first = start * HALVES + half * STEP + chunk * CHUNK
                in_x = is_row
                if NUM_IN % (STEP * HALVES) != 0:
                    in_x = is_row & (first + k < NUM_IN)[:, None]
                x = tl.load(x_at + first, mask=in_x, other=0.0)
                part = tl.dot(weight, x, part, input_precision="ieee")
            if ONE_GROUP:
                y = part
            else:
                scale = tl.load(scale_at + group * scale_stride, mask=is_out, other=0.0)
                y += part * scale.to(tl.float32)[:, None]
    if ONE_GROUP:
        y *= tl.load(scale_at, mask=is_out, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def _tile(num_rows, num_tiles_n, BLOCK_M: tl.constexpr, TOGETHER: tl.constexpr):
    """The rows and outputs of this program; neighbouring programs share weights."""
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    first = program // (TOGETHER * num_tiles_n) * TOGETHER
    together = tl.minimum(num_tiles_m - first, TOGETHER)
    program = program % (TOGETHER * num_tiles_n)
    return first + program % together, program // together


@triton.jit
def _ask_for(rows, BYTES: tl.constexpr):
    """Prefetch this many bytes from each of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
