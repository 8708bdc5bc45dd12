"""Numbers of 4 bits (e2m1) in 16: a sign, two bits of exponent and a digit behind the point.

Eight share a word. They do not stand there one behind the other, but where one shift takes two of
them to their places in two 16-bit numbers, most often sign and all: 15 instructions convert eight.
"""

import torch
from torch import Tensor

from ..triton_or_none import tl, triton

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
    """The low or the high two pairs of the word $2, times $3.

    Exponents count from another number in the wider format; the factor makes up for that, exactly,
    also for 0.5 and 0. It does so in an fma because sm_80 has no mul of bfloat16.
    """
    signs, magnitudes = 0x80008000, 0x00070007 << magnitude_at
    lines = [".reg .b32 s, u, z;", f"mov.b32 z, {signs:#x};"]  # -0 keeps the sign of a product
    for i, (sign, magnitude, _) in enumerate(_PAIRS[2:] if high else _PAIRS[:2]):
        left = magnitude_at - magnitude
        lines.append(f"{'shl' if left >= 0 else 'shr'}.b32 u, $2, {abs(left)};")
        if left == 15 - sign:
            lines.append(f"and.b32 u, u, {signs | magnitudes:#x};")
        else:
            lines.append(f"and.b32 u, u, {magnitudes:#x};")
            lines.append(f"shl.b32 s, $2, {15 - sign};")
            lines.append(f"and.b32 s, s, {signs:#x};")
            lines.append("or.b32 u, u, s;")
        lines.append(f"{fma} ${i}, u, $3, z;")
    return "{" + " ".join(lines) + "}"


_BFLOAT16_LOW = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=False))
_BFLOAT16_HIGH = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=True))
_FLOAT16_LOW = tl.constexpr(_asm(9, "fma.rn.f16x2", high=False))
_FLOAT16_HIGH = tl.constexpr(_asm(9, "fma.rn.f16x2", high=True))


@triton.jit
def plain_nibbles(words):
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
def from_e2m1(codes, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The numbers of the low and of the high nibbles; IN_PAIRS the bytes are those of packed words.

    Shape: as codes
    """
    if IN_PAIRS:
        FACTOR: tl.constexpr = _BFLOAT16_FACTOR if tl.bfloat16 == DTYPE else _FLOAT16_FACTOR
        factor = tl.full(codes.shape, FACTOR, tl.int32)
        low, high = _pairs(codes, factor, False, DTYPE), _pairs(codes, factor, True, DTYPE)
    else:
        low, high = _plain(codes & 15).to(DTYPE), _plain(codes >> 4).to(DTYPE)
    return low, high


@triton.jit
def scaled_from_e2m1(
    codes, exponent, HIGH: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr
):
    """The numbers of the low or the high nibbles, each times a row's scale and too small by a
    factor that `unscaled` takes back from sums. DTYPE is not float16.

    Shape: codes [N, K], exponent [N] int32, 127 too large -> [N, K]
    """
    if IN_PAIRS:
        factor = (exponent * _ONE_STEP + _FIRST_FACTOR)[:, None]
        scaled = _pairs(codes, factor.broadcast_to(codes.shape), HIGH, DTYPE)
    else:
        number = _plain(codes >> 4 if HIGH else codes & 15)
        scaled = (number * _power(exponent)[:, None]).to(DTYPE)
    return scaled


@triton.jit
def unscaled(sums):
    """Sums over numbers of `scaled_from_e2m1`."""
    return sums * _UNSCALED


@triton.jit
def _pairs(codes, factor, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        x = tl.inline_asm_elementwise(
            _BFLOAT16_HIGH if HIGH else _BFLOAT16_LOW,
            "=r,=r,r,r,r,r,r",
            [codes, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        x = tl.inline_asm_elementwise(
            _FLOAT16_HIGH if HIGH else _FLOAT16_LOW,
            "=r,=r,r,r,r,r,r",
            [codes, factor],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return x


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
