"""FP8 (e4m3): 4 bits of exponent, 3 of mantissa, numbers up to 448."""

import torch
from torch import Tensor

from .._dispatch import INTERPRET
from ..triton_or_none import tl, triton

MAX_E4M3 = 448.0
_MAX = tl.constexpr(MAX_E4M3)
_INTERPRET = tl.constexpr(INTERPRET)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to the nearest; what is too large becomes the largest."""
    return x.float().clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)


def as_bytes(x: Tensor) -> Tensor:
    """An FP8 tensor as bytes, which every operator and kernel accepts; others unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@triton.jit
def e4m3(x):
    """Float32 rounded to the nearest; what is too large becomes the largest."""
    if _INTERPRET:  # whose conversion does not stop at the largest, and turns 31.9 into 16
        x = tl.minimum(tl.maximum(x, -_MAX), _MAX)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000
        normal = bits.to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def e4m3_bytes(x):
    """As `e4m3`, as bytes."""
    return e4m3(x).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(bytes_, DTYPE: tl.constexpr):
    """The numbers in these bytes, exact in DTYPE."""
    x = bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if tl.float16 != DTYPE:  # the instruction directly to bfloat16 has a quarter of the rate
        x = x.to(tl.float32).to(DTYPE)
    return x
