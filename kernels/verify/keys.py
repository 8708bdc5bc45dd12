"""Logits as int32 keys that sort like the logits, and the fixed-point weights of keys."""

from ..triton_or_none import tl, triton
from .philox import exp, fixed


# The key -0x80000000 means "no token"; it is below the key of -inf, -0x7F800001.
@triton.jit
def key_of(x):
    """An int32 that sorts like the float; -0 counts as +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def relative_of(key, row_max, inv_t):
    """exp((l - max) / t) for keys; 0 for "no token"."""
    x = tl.where(key > -0x7F800001, value_of(key), -float("inf"))
    return exp((x - row_max) * inv_t)


@triton.jit
def weight_of(key, row_max, inv_t):
    return fixed(relative_of(key, row_max, inv_t))
