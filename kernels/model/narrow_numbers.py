"""Converts codes of 4 and 8 bits to numbers: a block within a kernel, or a whole matrix."""

import torch
from torch import Tensor

from ..triton_or_none import tl, triton
from .e2m1 import bytes_of, from_e2m1, scale_of
from .fp8 import from_e4m3
from .narrow_matrix import NarrowMatrix

_BLOCK_N = 64
_NIBBLES = """{
    .reg .b32 t;
    and.b32 t, $4, 0x0f0f0f0f;
    prmt.b32 $0, t, HIGH, 0x4140;
    prmt.b32 $1, t, HIGH, 0x4342;
    shr.b32 t, $4, 4;
    and.b32 t, t, 0x0f0f0f0f;
    prmt.b32 $2, t, HIGH, 0x4140;
    prmt.b32 $3, t, HIGH, 0x4342;
    }"""
# The high byte of a number: with a nibble as low byte, it is 128 (or 1024) plus the nibble.
_BFLOAT16_NIBBLES = tl.constexpr(_NIBBLES.replace("HIGH", "0x43434343"))
_FLOAT16_NIBBLES = tl.constexpr(_NIBBLES.replace("HIGH", "0x64646464"))
_FLOAT16_E4M3 = tl.constexpr("""{
    .reg .b16 l, h;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 $0, l;
    cvt.rn.f16x2.e4m3x2 $1, h;
    }""")
# By way of float32, because the instruction directly to bfloat16 has a quarter of the rate.
_BFLOAT16_E4M3 = tl.constexpr("""{
    .reg .b16 l, h;
    .reg .b32 pair;
    .reg .f16 p, q;
    .reg .f32 f, g;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 pair, l;
    mov.b32 {p, q}, pair;
    cvt.f32.f16 f, p;
    cvt.f32.f16 g, q;
    cvt.rn.bf16x2.f32 $0, g, f;
    cvt.rn.f16x2.e4m3x2 pair, h;
    mov.b32 {p, q}, pair;
    cvt.f32.f16 f, p;
    cvt.f32.f16 g, q;
    cvt.rn.bf16x2.f32 $1, g, f;
    }""")


def unpack(matrix: NarrowMatrix, dtype: torch.dtype) -> Tensor:
    """The plain matrix, with columns in the order of the codes. Shape: [N, K]."""
    num_out, num_in = matrix.shape
    out = torch.empty(num_out, num_in, dtype=dtype, device=matrix.codes.device)
    width = matrix.codes.shape[1]
    _unpack_kernel[triton.cdiv(num_out, _BLOCK_N), triton.cdiv(width, matrix.half)](
        out, matrix.codes.view(torch.int32), matrix.scale, matrix.zero, matrix.factor, num_out,
        matrix.scale.stride(0),
        KIND=matrix.kind, NUM_IN=num_in, WIDTH=width, GROUP=matrix.group, ROWS=matrix.rows,
        STEP=matrix.half, CHUNK=matrix.chunk, BLOCK_N=_BLOCK_N, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def numbers(
    words, HAS_ZERO: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr
):
    """A block of codes, in words of 4 bytes, as numbers that are exact in DTYPE: for 4 bits two
    blocks, otherwise one, twice. Their order is that of the bytes.

    IN_PAIRS, int4 numbers with zero points are too large (see `_nibbles`); the zero point
    compensates for that.
    Shape: words [N, K / 4] -> [N, K] each
    """
    codes = bytes_of(words)
    if KIND == "fp4" or KIND == "nvfp4":
        low, high = from_e2m1(words, DTYPE, IN_PAIRS)
    elif KIND == "fp8":
        low = _e4m3(codes, DTYPE) if IN_PAIRS else from_e4m3(codes, DTYPE)
        high = low
    elif KIND == "int8":
        low = codes.to(tl.int8, bitcast=True).to(DTYPE)
        high = low
    elif IN_PAIRS:
        low, high = _nibbles(codes, DTYPE)
        if not HAS_ZERO:
            EIGHT: tl.constexpr = 136.0 if tl.bfloat16 == DTYPE else 1032.0
            low -= EIGHT
            high -= EIGHT
    else:
        offset = 0 if HAS_ZERO else 8
        low = ((codes & 15).to(tl.int16) - offset).to(DTYPE)
        high = ((codes >> 4).to(tl.int16) - offset).to(DTYPE)
    return low, high


@triton.jit
def in_order(codes, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """A block of a matrix's bytes in the order of the inputs. Shape: [BLOCK_N, WIDTH]."""
    codes = tl.reshape(codes, [BLOCK_N, WIDTH // CHUNK, 4, CHUNK // 16, 2, 2])
    return tl.reshape(tl.permute(codes, (0, 1, 3, 4, 2, 5)), [BLOCK_N, WIDTH])


@triton.jit
def in_order_by_warp(codes, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, WARPS: tl.constexpr):
    """Like `in_order`, for a block whose row `i` is output `output_by_warp(i)`; the result has the
    outputs in order. No number moves between threads: each has read what it multiplies.

    Shape: [BLOCK_N, CHUNK].
    """
    shape: tl.constexpr = [BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, CHUNK // 16, 2, 2]
    codes = tl.permute(tl.reshape(codes, shape), (0, 2, 1, 3, 5, 6, 4, 7))
    return tl.reshape(codes, [BLOCK_N, CHUNK])


@triton.jit
def output_by_warp(i, WARPS: tl.constexpr):
    """The output in row i: loads give a warp 8 rows at a time, tensor cores 16."""
    first = i // (16 * WARPS) * (16 * WARPS)
    return first + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def _e4m3(codes, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        x = tl.inline_asm_elementwise(
            _BFLOAT16_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        x = tl.inline_asm_elementwise(
            _FLOAT16_E4M3, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    return x


@triton.jit
def _nibbles(codes, DTYPE: tl.constexpr):
    """The low and the high nibbles, each 128 too large in bfloat16, and 1024 in float16."""
    if tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16_NIBBLES,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _FLOAT16_NIBBLES,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _unpack_kernel(
    out_ptr,  # [num_out, NUM_IN]
    codes_ptr,  # [num_out, WIDTH / 4] words of 4 bytes
    scale_ptr,  # [groups, num_out / ROWS]; nvfp4: [groups / 4, num_out] words
    zero_ptr,  # [groups, num_out] or None
    factor_ptr,  # [num_out] or None
    num_out,
    scale_stride,
    KIND: tl.constexpr,
    NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each program: one step of BLOCK_N outputs."""
    HALVES: tl.constexpr = 1 if KIND == "fp8" or KIND == "int8" else 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, STEP)
    start = tl.program_id(1) * STEP
    is_out = n < num_out
    word = start // 4 + tl.arange(0, STEP // 4)
    inside = is_out[:, None] & (word < WIDTH // 4)[None, :]
    words_at = codes_ptr + n.to(tl.int64)[:, None] * (WIDTH // 4) + word[None, :]
    words = tl.load(words_at, mask=inside, other=0)
    low, high = numbers(words, zero_ptr is not None, KIND, tl.float32, False)
    for half in tl.static_range(HALVES):
        first = start * HALVES + half * STEP
        weight = low
        if half == 1:
            weight = high
        weight = in_order(weight, BLOCK_N, STEP, CHUNK)
        out_at = out_ptr + n.to(tl.int64)[:, None] * NUM_IN + first + k[None, :]
        inside = is_out[:, None] & (first + k < NUM_IN)[None, :]
        if KIND == "nvfp4":
            group = (first + k)[None, :] // GROUP
            four = tl.load(scale_ptr + group // 4 * scale_stride + n[:, None], mask=inside, other=0)
            scale = scale_of(four, group % 4)
            factor = tl.load(factor_ptr + n, mask=is_out, other=0.0)
            weight *= scale * factor[:, None]
        else:
            group = tl.minimum(first, NUM_IN - 1) // GROUP
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + group * num_out + n, mask=is_out, other=0)
                weight = weight - zero.to(tl.float32)[:, None]
            scale = tl.load(scale_ptr + group * scale_stride + n // ROWS, mask=is_out, other=0.0)
            weight *= scale.to(tl.float32)[:, None]
        tl.store(out_at, weight.to(out_ptr.dtype.element_ty), mask=inside)
