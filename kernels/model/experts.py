"""A mixture of experts, gated MLPs whose matrices have 4 bits a number (MXFP4):

    y += sum over a row's experts of weight * down(glu(gate_up(x)))
    glu = (up' + 1) * gate' * sigmoid(alpha * gate'),  gate' = min(gate, limit), |up'| <= limit

A program multiplies a tile of rows that share an expert by some outputs of it. Codes and scales
become numbers of x's dtype, which holds them exactly, on their way to the tensor cores; sums are
float32. An output adds up its inputs in one order, whatever the tile, so the bits of a row do not
depend on the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import num_programs, uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .narrow_matrix import NarrowMatrix, dequantise
from .narrow_numbers import in_order_by_warp, numbers, output_by_warp
from .rms_norm import Norm, rms_norm_reference
from .routing import Routing
from .split_product import store_and_normalise

GROUP = 32  # inputs that share a scale
_MOST_PART_PAIRS = 1024  # with more pairs a program adds up the parts of a product itself
_PROGRAMS_PER_SM = 4  # into which the product of one row is split at most
_MIN_STEPS = 12  # of a part


class ExpertMatrix(NamedTuple):
    """The same linear layer of every expert, stacked."""

    matrix: NarrowMatrix  # [E * N, K] fp4, scales e8m0 of 32 inputs, an output's side by side
    bias: Tensor  # [E * N]
    num_experts: int  # E

    @property
    def num_out(self) -> int:
        """N"""
        return self.matrix.shape[0] // self.num_experts

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes + self.bias.nbytes


class Experts(NamedTuple):
    """The gated MLPs."""

    gate_up: ExpertMatrix  # [2 I, H] each: the gate's outputs, then those of `up`
    down: ExpertMatrix  # [H, I] each
    alpha: float
    limit: float


def expert_of(layer: ExpertMatrix, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrix and bias of one expert, dequantised. Shape: [N, K], [N]."""
    part = slice(expert * layer.num_out, (expert + 1) * layer.num_out)
    codes, scale = layer.matrix.codes[part], layer.matrix.scale[:, part]
    return dequantise(layer.matrix._replace(codes=codes, scale=scale), dtype), layer.bias[part]


def add_experts(
    residual: Tensor, x: Tensor, routing: Routing, experts: Experts, norm: Norm | None = None
) -> Tensor | None:
    """Add the output of each row's experts to the residual in place; returns norm(residual), or
    None without a norm.

    Shape: residual [T, H] dense, x [T, H], rows dense -> [T, H]
    """
    if not uses_triton(x):
        add_experts_reference(residual, x, routing, experts)
        return rms_norm_reference(residual, norm) if norm is not None else None
    gated = _product(x, routing, experts.gate_up, experts)
    parts = _product(gated, routing, experts.down, None)
    return _combine(residual, parts, routing, experts.down, norm)


def add_experts_reference(residual: Tensor, x: Tensor, routing: Routing, experts: Experts) -> None:
    """Unpacks one expert at a time, and only those that some row has."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for expert in routing.ids.unique().tolist():
        row, choice = (routing.ids == expert).nonzero(as_tuple=True)
        gate_up, bias = expert_of(experts.gate_up, expert, x.dtype)
        gate, up = F.linear(x[row], gate_up, bias).float().chunk(2, 1)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        gated = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
        down, bias = expert_of(experts.down, expert, x.dtype)
        y = F.linear(gated.to(x.dtype), down, bias).float()
        total.index_add_(0, row, routing.weights[row, choice, None] * y)
    residual.add_(total.to(residual.dtype))


def _num_splits(layer: ExpertMatrix) -> int:
    """How many parts the sums of a layer are split into; depends on the layer alone."""
    num_tiles = triton.cdiv(layer.num_out, 64)
    steps = layer.matrix.num_in // (2 * GROUP)
    most = num_programs(layer.bias.device, _PROGRAMS_PER_SM) // num_tiles
    fitting = (n for n in (8, 6, 5, 4, 3, 2) if n <= most and steps % n == 0)
    return next((n for n in fitting if steps // n >= _MIN_STEPS), 1)


def _tiling(size: int, num_steps: int) -> dict[str, int]:
    """Outputs of a tile of `size` pairs, steps of a loop, warps, and loops loaded ahead.

    No sum depends on these.
    """
    if size == 128:
        return {"BLOCK_N": 128, "STEPS": 1, "num_warps": 8, "num_stages": 4}
    # Several steps in a loop cost fewer instructions.
    steps = next(n for n in (3, 2, 1) if num_steps % n == 0) if size < 64 else 1
    return {"BLOCK_N": 64, "STEPS": steps, "num_warps": 4, "num_stages": 4}


def _product(x: Tensor, routing: Routing, layer: ExpertMatrix, gate: Experts | None) -> Tensor:
    """With a gate, the gated outputs of each pair; else the parts of its outputs, to be added up.

    Shape: x [T, K] or, without a gate, [T * k, K] -> [T * k, N / 2] or [parts, T * k, N] float32
    """
    num_pairs = routing.ids.numel()
    matrix, num_out = layer.matrix, layer.num_out
    assert matrix.kind == "fp4"
    assert matrix.group == GROUP
    assert matrix.num_in % (2 * GROUP) == 0
    assert matrix.scale.t().is_contiguous()
    assert matrix.num_in == x.shape[1]
    assert x.stride(-1) == 1
    assert x.dtype != torch.float16, "it cannot hold every number of MXFP4"
    num_tiles, size = routing.tiles.pairs.shape
    splits = 1 if gate else _num_splits(layer)
    share = matrix.num_in // 2 // splits  # bytes
    tiling = _tiling(size, share // GROUP)
    in_parts = splits > 1 and num_pairs <= _MOST_PART_PAIRS
    if gate:
        out = x.new_empty(num_pairs, num_out // 2)
    else:
        num_parts = splits if in_parts else 1
        out = x.new_empty(num_parts, num_pairs, num_out, dtype=torch.float32)
    _experts_kernel[
        num_tiles * triton.cdiv(num_out, tiling["BLOCK_N"]), splits if in_parts else 1
    ](
        out,
        x,
        *routing.tiles,
        matrix.codes,
        matrix.scale.view(torch.uint8),
        layer.bias,
        gate.alpha if gate else 0.0,
        gate.limit if gate else 0.0,
        num_pairs,
        num_out // 2 if gate else num_out,
        x.stride(0),
        layer.num_experts,
        PAIRS_PER_ROW=num_pairs // len(x),
        NUM_IN=matrix.num_in,
        SHARE=share,
        SPLITS=1 if in_parts else splits,
        GATED=gate is not None,
        BLOCK_M=size,
        WARPS=tiling["num_warps"],
        IN_PAIRS=x.is_cuda and x.element_size() == 2,
        **tiling,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _combine(
    residual: Tensor, parts: Tensor, routing: Routing, layer: ExpertMatrix, norm: Norm | None
) -> Tensor | None:
    num_rows, width = residual.shape
    assert residual.is_contiguous()
    out = torch.empty_like(residual) if norm is not None else None
    block = triton.next_power_of_2(width)
    _combine_kernel[(num_rows,)](
        residual,
        out,
        parts,
        routing.ids,
        routing.weights,
        layer.bias,
        norm.weight if norm is not None else None,
        norm.eps if norm is not None else 0.0,
        num_rows,
        width,
        TOP_K=routing.ids.shape[1],
        PARTS=len(parts),
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        enable_fp_fusion=False,
        **dependent_launch(residual.device),
    )
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    out_ptr,  # [num_pairs, num_out] or, not GATED, [parts, num_pairs, num_out] float32
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, NUM_IN]
    experts_ptr,  # [tiles]
    pairs_ptr,  # [tiles, BLOCK_M]
    codes_ptr,  # [experts * outputs, NUM_IN / 2]; outputs: num_out or, GATED, 2 * num_out
    scale_ptr,  # [experts * outputs, NUM_IN / 32] exponents, 127 too large
    bias_ptr,  # [experts * outputs]
    alpha,
    limit,
    num_pairs,
    num_out,
    x_stride,
    num_experts,
    PAIRS_PER_ROW: tl.constexpr,
    NUM_IN: tl.constexpr,
    SHARE: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N outputs of one tile of pairs, over one share of the inputs or SPLITS of
    them, one after the other.
    """
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_tiles_n = tl.cdiv(num_out, OUTS)
    tile, tile_n = tl.program_id(0) // num_tiles_n, tl.program_id(0) % num_tiles_n
    i = tl.arange(0, BLOCK_N)
    read = output_by_warp(i, WARPS)
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    n = tile_n * OUTS + i % OUTS
    is_out, is_read = n < num_out, tile_n * OUTS + read % OUTS < num_out
    in_expert = n + i // OUTS * num_out
    read_in_expert = tile_n * OUTS + read % OUTS + read // OUTS * num_out
    num_weight_rows = num_out * (2 if GATED else 1)
    wait_for_inputs(DEPENDENT)
    expert = tl.load(experts_ptr + tile)
    if expert < num_experts:
        weight_row = expert * num_weight_rows + in_expert
        read_row = expert * num_weight_rows + read_in_expert
        pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pair < num_pairs
        pair = tl.where(is_pair, pair, 0).to(tl.int64)
        x_at = x_ptr + (pair // PAIRS_PER_ROW)[None, :] * x_stride
        first = tl.program_id(1) * SHARE
        total = _share(
            x_at, codes_ptr, scale_ptr, weight_row, read_row, is_pair, is_out, is_read, first,
            NUM_IN, SHARE, STEPS, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS,
        )  # fmt: skip
        for each in tl.static_range(1, SPLITS):
            total += _share(
                x_at, codes_ptr, scale_ptr, weight_row, read_row, is_pair, is_out, is_read,
                each * SHARE, NUM_IN, SHARE, STEPS, IN_PAIRS, BLOCK_M, BLOCK_N, WARPS,
            )  # fmt: skip
        if GATED:
            bias = tl.load(bias_ptr + weight_row, mask=is_out, other=0.0).to(tl.float32)
            total += bias[:, None]
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0)))
            # Comparisons keep what is not a number, which tl.minimum would not.
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            total = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        outs = tile_n * OUTS + tl.arange(0, OUTS)
        part_at = tl.program_id(1).to(tl.int64) * num_pairs * num_out
        tl.store(
            out_ptr + part_at + pair[None, :] * num_out + outs[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=is_pair[None, :] & (outs < num_out)[:, None],
        )


@triton.jit
def _share(
    x_at, codes_ptr, scale_ptr, weight_row, read_row, is_pair, is_out, is_read, first,
    NUM_IN: tl.constexpr, SHARE: tl.constexpr, STEPS: tl.constexpr, IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Products over SHARE bytes of codes. Shape: [BLOCK_N, BLOCK_M] float32."""
    STEP: tl.constexpr = 32  # bytes, and inputs of a group
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    k = tl.arange(0, STEP)
    codes_at = codes_ptr + read_row.to(tl.int64)[:, None] * (NUM_IN // 2) + k[None, :]
    scale_at = scale_ptr + weight_row * (NUM_IN // STEP)
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, first + SHARE, STEPS * STEP):
        for step in tl.static_range(STEPS):
            at = start + step * STEP
            # With this hint a thread reads the 8 bytes that it multiplies. Otherwise it would read
            # 16, and have to pass half of them on to another thread.
            codes_here = tl.multiple_of(codes_at + at, (1, 8))
            codes = tl.load(codes_here, mask=is_read[:, None], other=0)
            codes = in_order_by_warp(codes, BLOCK_N, STEP, WARPS)
            low, high = numbers(codes, False, "fp4", DTYPE, IN_PAIRS)
            scale = tl.load(scale_at + at // STEP * 2, mask=is_out, other=0)
            low *= _power(scale, DTYPE)[:, None]
            x = tl.load(x_at + (2 * at + k)[:, None], mask=is_pair[None, :], other=0.0)
            y = tl.dot(low, x, y, input_precision="ieee")
            scale = tl.load(scale_at + at // STEP * 2 + 1, mask=is_out, other=0)
            high *= _power(scale, DTYPE)[:, None]
            x = tl.load(x_at + (2 * at + STEP + k)[:, None], mask=is_pair[None, :], other=0.0)
            y = tl.dot(high, x, y, input_precision="ieee")
    return y


@triton.jit
def _power(exponent, DTYPE: tl.constexpr):
    """2^(exponent - 127), exact in bfloat16 and float32."""
    bits = tl.where(exponent == 0, 0x40, exponent.to(tl.int16) << 7)  # 2^-127 is subnormal
    if tl.bfloat16 == DTYPE:
        power = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        power = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return power


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    residual_ptr,  # [num_rows, width]
    out_ptr,  # as residual, or None
    parts_ptr,  # [PARTS, num_rows, TOP_K, width] float32
    ids_ptr,  # [num_rows, TOP_K]
    weights_ptr,  # [num_rows, TOP_K]
    bias_ptr,  # [experts, width]
    norm_ptr,  # [width] or None
    eps,
    num_rows,
    width,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < width
    norm = None
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + n, mask=mask, other=0.0).to(tl.float32)
    at = row * width + n
    wait_for_inputs(DEPENDENT)
    y = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    stride = num_rows.to(tl.int64) * TOP_K * width
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + row * TOP_K + c)
        part_at = parts_ptr + (row * TOP_K + c) * width + n
        out = tl.load(part_at, mask=mask, other=0.0)
        for part in tl.static_range(1, PARTS):
            out += tl.load(part_at + part * stride, mask=mask, other=0.0)
        out += tl.load(bias_ptr + expert * width + n, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * TOP_K + c) * out
    normed = store_and_normalise(residual_ptr, y + total, at, mask, norm, eps, width)
    if out_ptr is not None:
        tl.store(out_ptr + at, normed, mask=mask)
