"""Logits as int32 keys in their own order, and the fixed-point weights that keys stand for."""

from ..triton_or_none import tl, triton
from .philox import exp, fixed


# -0x80000000 is the key of no token, below the key of -inf, which is -0x7F800001.
@triton.jit
def key_of(x):
    """int32 in the order of the floats; -0 is +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def relative_of(key, row_max, inv_t):
    """exp((l - max) / t) of keys; 0 for the key of no token."""
    x = tl.where(key > -0x7F800001, value_of(key), -float("inf"))
    return exp((x - row_max) * inv_t)


@triton.jit
def weight_of(key, row_max, inv_t):
    return fixed(relative_of(key, row_max, inv_t))
