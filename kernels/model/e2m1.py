"""Numbers of 4 bits (e2m1) in 16: a sign, two bits of exponent and a digit behind the point.

Eight share a word. They do not stand there one behind the other, but where one shift takes two of
them to their places in two 16-bit numbers, most often sign and all: 15 instructions convert eight.
"""

import torch
from torch import Tensor

from ..triton_or_none import tl, triton
from .fp8 import small_from_e4m3

# The largest exponent of a scale, 127 too large, that `scaled_from_e2m1` takes.
MOST_EXPONENT = 192
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Of four pairs in a word, each with a number in either half of it: the bit of the sign, the lowest
# bit of exponent and digit, and the lowest bit of the nibble in a word of plain nibbles. The second
# number is 16 bits further on, in plain nibbles 8.
_PAIRS = ((15, 6, 0), (12, 3, 16), (14, 0, 4), (13, 9, 20))
# Scaled numbers are kept this many powers of two too small, so that scales up to 2^65 fit. They are
# exact from scales of 2^-68 on.
_SHIFT = 64
_UNSCALED = tl.constexpr(2.0**_SHIFT)
_SCALED = tl.constexpr(2.0**-_SHIFT)
# Factors are pairs of numbers. e2m1 and bfloat16 count their exponents 126 apart, float16 14.
_ONE_STEP = tl.constexpr(0x00800080)  # of the exponents of two bfloat16
_FIRST_FACTOR = tl.constexpr((126 - _SHIFT) * 0x00800080)  # for a scale's exponent of 0
_BFLOAT16_FACTOR = tl.constexpr(0x7E807E80)  # 2^126
_FLOAT16_FACTOR = tl.constexpr(0x74007400)  # 2^14
_BFLOAT16_STEP, _FLOAT16_STEP = tl.constexpr(2.0**126), tl.constexpr(2.0**14)


def pack(words: Tensor) -> Tensor:
    """Words of eight plain nibbles, int32, as they are kept."""
    packed = torch.zeros_like(words)
    for sign, magnitude, place in _PAIRS:
        both = words >> place & 0x0F0F
        both = (both | both << 8) & 0x000F000F
        packed |= (both & 0x00070007) << magnitude | (both >> 3 & 0x00010001) << sign
    return packed


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`."""
    plain = torch.zeros_like(words)
    for sign, magnitude, place in _PAIRS:
        both = words >> magnitude & 0x00070007 | (words >> sign & 0x00010001) << 3
        plain |= ((both | both >> 8) & 0x0F0F) << place
    return plain


def _asm(magnitude_at: int, fma: str, high: bool) -> str:
    """The low or the high two pairs of the word $4, times $5.

    Exponents count from another number in the wider format; the factor makes up for that, exactly,
    also for 0.5 and 0. It does so in an fma because sm_80 has no mul of bfloat16.
    """
    signs, magnitudes = 0x80008000, 0x00070007 << magnitude_at
    lines = [".reg .b32 s, u, z;", f"mov.b32 z, {signs:#x};"]  # -0 keeps the sign of a product
    for i, (sign, magnitude, _) in enumerate(_PAIRS[2:] if high else _PAIRS[:2]):
        left = magnitude_at - magnitude
        lines.append(f"{'shl' if left >= 0 else 'shr'}.b32 u, $4, {abs(left)};")
        if left == 15 - sign:
            lines.append(f"and.b32 u, u, {signs | magnitudes:#x};")
        else:
            lines.append(f"and.b32 u, u, {magnitudes:#x};")
            lines.append(f"shl.b32 s, $4, {15 - sign};")
            lines.append(f"and.b32 s, s, {signs:#x};")
            lines.append("or.b32 u, u, s;")
        lines.append(f"{fma} u, u, $5, z;")
        lines.append(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, u;")
    return "{" + " ".join(lines) + "}"


_BFLOAT16_LOW = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=False))
_BFLOAT16_HIGH = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=True))
_FLOAT16_LOW = tl.constexpr(_asm(9, "fma.rn.f16x2", high=False))
_FLOAT16_HIGH = tl.constexpr(_asm(9, "fma.rn.f16x2", high=True))


@triton.jit
def _plain_nibbles(words):
    """`unpack` in a kernel."""
    return (
        _plain_pair(words, 15, 6) | _plain_pair(words, 12, 3) << 16
        | _plain_pair(words, 14, 0) << 4 | _plain_pair(words, 13, 9) << 20
    )  # fmt: skip


@triton.jit
def _plain_pair(words, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    both = ((words >> MAGNITUDE) & 0x00070007) | (((words >> SIGN) & 0x00010001) << 3)
    return (both | (both >> 8)) & 0x0F0F


@triton.jit
def from_e2m1(words, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The numbers of the low and of the high nibbles of packed words.

    Shape: words [N, K / 4] -> [N, K] each
    """
    if IN_PAIRS:
        FACTOR: tl.constexpr = _BFLOAT16_FACTOR if tl.bfloat16 == DTYPE else _FLOAT16_FACTOR
        factor = tl.full(words.shape, FACTOR, tl.int32)
        low, high = _pairs(words, factor, False, DTYPE), _pairs(words, factor, True, DTYPE)
    else:
        codes = bytes_of(_plain_nibbles(words))
        low, high = _plain(codes & 15).to(DTYPE), _plain(codes >> 4).to(DTYPE)
    return low, high


@triton.jit
def scaled_from_e2m1(
    words, exponent, HIGH: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr
):
    """The numbers of the low or the high nibbles of packed words, each times its row's scale, and
    too small by a factor that `unscaled` takes back from sums. DTYPE is not float16.

    Shape: words [N, K / 4], exponent [N] int32, 127 too large -> [N, K]
    """
    if IN_PAIRS:
        factor = (exponent * _ONE_STEP + _FIRST_FACTOR)[:, None]
        scaled = _pairs(words, factor.broadcast_to(words.shape), HIGH, DTYPE)
    else:
        codes = bytes_of(_plain_nibbles(words))
        number = _plain(codes >> 4 if HIGH else codes & 15)
        scaled = (number * _power(exponent)[:, None]).to(DTYPE)
    return scaled


@triton.jit
def unscaled(sums):
    """Sums over numbers of `scaled_from_e2m1`."""
    return sums * _UNSCALED


@triton.jit
def scaled_by_e4m3(words, scales, HIGH: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The numbers of the low or the high nibbles of packed words, each times its word's scale, and
    256 times too small. They are exact in every DTYPE.

    Shape: words [N, K / 4], scales [N, K / 4] uint8 -> [N, K]
    """
    small = small_from_e4m3(scales)
    if IN_PAIRS:
        if tl.bfloat16 == DTYPE:
            factor = (small.to(tl.float32) * _BFLOAT16_STEP).to(tl.bfloat16)
        else:
            factor = small * _FLOAT16_STEP
        bits = factor.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        scaled = _pairs(words, bits | (bits << 16), HIGH, DTYPE)
    else:
        codes = bytes_of(_plain_nibbles(words))
        number = _plain(codes >> 4 if HIGH else codes & 15)
        factor = small.to(tl.float32)
        scaled = (number * _in_turn(factor, factor, factor, factor)).to(DTYPE)
    return scaled


@triton.jit
def _pairs(words, factor, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    # Word by word: of bytes, nothing says that the four which an instruction is given share a word.
    if tl.bfloat16 == DTYPE:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _BFLOAT16_HIGH if HIGH else _BFLOAT16_LOW,
            "=h,=h,=h,=h,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _FLOAT16_HIGH if HIGH else _FLOAT16_LOW,
            "=h,=h,=h,=h,r,r",
            [words, factor],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return _in_turn(first, second, third, fourth)


@triton.jit
def bytes_of(words):
    """The bytes of words. Shape: [N, K / 4] -> [N, K]."""
    return _in_turn(
        (words & 255).to(tl.uint8),
        ((words >> 8) & 255).to(tl.uint8),
        ((words >> 16) & 255).to(tl.uint8),
        ((words >> 24) & 255).to(tl.uint8),
    )


@triton.jit
def _in_turn(first, second, third, fourth):
    """Shape: [N, K / 4] each -> [N, K]"""
    four = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(four, [first.shape[0], 4 * first.shape[1]])


@triton.jit
def _plain(nibble):
    # Doubled: 0, 1, 2, 3, 4, 6, 8, 12.
    digit, exponent = (nibble & 1).to(tl.int16), ((nibble >> 1) & 3).to(tl.int16)
    doubled = tl.where(exponent == 0, digit, (digit + 2) << tl.maximum(exponent - 1, 0))
    return tl.where(nibble >= 8, -doubled, doubled).to(tl.float32) * 0.5


@triton.jit
def _power(exponent):
    """The factor of a scale, in float32."""
    return (exponent << 23).to(tl.float32, bitcast=True) * _SCALED
