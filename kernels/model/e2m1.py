"""Numbers of 4 bits (e2m1) in 16: a sign, two bits of exponent and a digit behind the point.

Eight share a word. They do not stand there one behind the other, but where one shift takes two of
them to their places in two 16-bit numbers, most often sign and all: 13 instructions convert eight
to bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_or_none import tl, triton

# The largest exponent of a scale, 127 too large, that `scaled_from_e2m1` takes.
MOST_EXPONENT = 192
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Of four pairs in a word, each with a number in either half of it: which bits of the numbers are
# rotated to the left, and how far, from the lowest bits of the halves; and the lowest bit of the
# nibble in a word of plain nibbles. The second number is 16 bits further on, in plain nibbles 8.
# For bfloat16 three pairs take one rotation each, and the last one a shift of its lowest bit.
_PAIRS = (
    (((7, 0), (8, 6)), 0),
    (((7, 4), (8, 10)), 16),
    (((7, 10), (8, 16)), 4),
    (((6, 6), (8, 12), (1, 14)), 20),
)
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
# Scales of NVFP4, which are at least 2^-9 and up to 448, are kept as bytes: an exponent, 10 too
# large, and three digits. So they become numbers without a case for the smallest. 0 is none: then
# the numbers are 0. Those of four groups of an output share a word.
_SCALE_BIAS = 10
_FLOAT32_SCALE = tl.constexpr((127 - _SCALE_BIAS) << 23)
# Pairs of exponents that make a factor of a scale, 256 times too small.
_BFLOAT16_SCALES = tl.constexpr((127 + 126 - 8 - _SCALE_BIAS) * 0x00800080)
_FLOAT16_SCALES = tl.constexpr((15 + 14 - 8 - _SCALE_BIAS) * 0x04000400)


def pack(words: Tensor) -> Tensor:
    """Words of eight plain nibbles, int32, as they are kept."""
    packed = torch.zeros_like(words)
    for moves, place in _PAIRS:
        both = words >> place & 0x0F0F
        both = (both | both << 8) & 0x000F000F
        for bits, left in moves:
            packed |= _rotated(both & bits * 0x00010001, left)
    return packed


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`."""
    plain = torch.zeros_like(words)
    for moves, place in _PAIRS:
        both = torch.zeros_like(words)
        for bits, left in moves:
            both |= _rotated(words, -left % 32) & bits * 0x00010001
        plain |= ((both | both >> 8) & 0x0F0F) << place
    return plain


def _rotated(words: Tensor, left: int) -> Tensor:
    return words << left | words >> (32 - left) & (1 << left) - 1 if left else words


def pack_scales(scale: Tensor) -> Tensor:
    """Scales of NVFP4, none of them negative, as they are kept.

    Shape: [groups, N] -> [groups / 4, N] int32
    """
    digits, exponent = scale.float().frexp()  # 0.5 to 1
    packed = (exponent - 1 + _SCALE_BIAS) * 8 + (digits * 16 - 8).int()
    packed = packed.where(digits > 0, 0).to(torch.uint8)
    padded = F.pad(packed, (0, 0, 0, -len(packed) % 4)).unflatten(0, (-1, 4))
    words: Tensor = padded.transpose(1, 2).flatten().view(torch.int32)
    return words.view(len(padded), -1)


def unpack_scales(words: Tensor, num_groups: int) -> Tensor:
    """The inverse of `pack_scales`, float32."""
    bytes_ = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    packed = bytes_.transpose(1, 2).flatten(0, 1)[:num_groups]
    digits, exponent = (8 + packed % 8).float() / 8, (packed // 8).int() - _SCALE_BIAS
    return torch.ldexp(digits, exponent).where(packed > 0, 0)


def _asm(magnitude_at: int, fma: str, high: bool) -> str:
    """The low or the high two pairs of the word $4, times $5.

    Exponents count from another number in the wider format; the factor makes up for that, exactly,
    also for 0.5 and 0. It does so in an fma because sm_80 has no mul of bfloat16.
    """
    lines = [".reg .b32 s, u, z;", "mov.b32 z, 0x80008000;"]  # -0 keeps the sign of a product
    for i, (moves, _) in enumerate(_PAIRS[2:] if high else _PAIRS[:2]):
        masks: dict[int, int] = {}  # by how far their bits are to the left of them
        for bits, left in moves:
            at = 12 if bits == 8 else magnitude_at
            masks[left - at] = masks.get(left - at, 0) | (bits << at) * 0x00010001
        for each, (right, mask) in enumerate(sorted(masks.items(), key=lambda item: item[0] != 0)):
            if right == 0:
                source = "$4"
            else:
                lines.append(_shifted(right, mask))
                source = "s"
            lines.append(f"and.b32 {'s' if each else 'u'}, {source}, {mask:#x};")
            if each:
                lines.append("or.b32 u, u, s;")
        lines.append(f"{fma} u, u, $5, z;")
        lines.append(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, u;")
    return "{" + " ".join(lines) + "}"


def _shifted(right: int, mask: int) -> str:
    """Takes to this mask what is so far to the left of it in $4, or to the right if negative."""
    if right < 0:
        assert mask >> -right << -right == mask  # nothing comes from the other end
        return f"shl.b32 s, $4, {-right};"
    if mask << right < 1 << 32:
        return f"shr.b32 s, $4, {right};"
    return f"shf.r.wrap.b32 s, $4, $4, {right};"


_BFLOAT16_LOW = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=False))
_BFLOAT16_HIGH = tl.constexpr(_asm(6, "fma.rn.bf16x2", high=True))
_FLOAT16_LOW = tl.constexpr(_asm(9, "fma.rn.f16x2", high=False))
_FLOAT16_HIGH = tl.constexpr(_asm(9, "fma.rn.f16x2", high=True))


@triton.jit
def _plain_nibbles(words):
    """`unpack` in a kernel."""
    first = _moved(words, 7, 0) | _moved(words, 8, 6)
    second = _moved(words, 7, 4) | _moved(words, 8, 10)
    third = _moved(words, 7, 10) | _moved(words, 8, 16)
    fourth = _moved(words, 6, 6) | _moved(words, 8, 12) | _moved(words, 1, 14)
    return _pair(first) | _pair(second) << 16 | _pair(third) << 4 | _pair(fourth) << 20


@triton.jit
def _moved(words, BITS: tl.constexpr, LEFT: tl.constexpr):
    """A part of a pair's numbers, rotated back."""
    if LEFT > 0:
        words = ((words >> LEFT) & ((1 << (32 - LEFT)) - 1)) | (words << (32 - LEFT))
    return words & (BITS * 0x00010001)


@triton.jit
def _pair(both):
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
def scale_of(words, place):
    """The scale in this place of each word, 0 to 3, float32."""
    return ((_scale_byte(words, place) << 20) + _FLOAT32_SCALE).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(words, place):
    return (words >> (8 * place)) & 255


@triton.jit
def scaled_by_words(words, scales, HIGH: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The numbers of the low or the high nibbles of a chunk's words, each times its group's scale,
    and 256 times too small. They are exact in every DTYPE.

    Each of four threads has a word of each of four groups.
    Shape: words [N, 16], scales [N] -> [N, 64]
    """
    place = (tl.arange(0, 16) % 4)[None, :]
    if IN_PAIRS:
        byte = _scale_byte(scales[:, None], place)
        if tl.bfloat16 == DTYPE:
            factor = byte * 0x00100010 + _BFLOAT16_SCALES
        else:
            factor = byte * 0x00800080 + _FLOAT16_SCALES
        scaled = _pairs(words, factor, HIGH, DTYPE)
    else:
        codes = bytes_of(_plain_nibbles(words))
        number = _plain(codes >> 4 if HIGH else codes & 15)
        factor = scale_of(scales[:, None], place) / 256.0
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
