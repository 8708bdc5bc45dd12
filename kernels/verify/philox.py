"""Philox4x32-10 (Salmon et al., SC 2011), counter-based: a draw is a function of key and counter.

A draw's key is its request's seed. Its counter is (base, offset, purpose, index). For the rules
`token` and `block`, (base, offset) is (anchor, position - anchor), where the anchor is the position
of the step's first draft, and index is 0. For `match`, (base, offset) is (position, 0), and index
is token // 4 or a pair of token groups. Batch row, slot, padding and k are never part of a counter.

Anchors strictly increase, so no counter is used twice within a request. With the position alone, a
token that is rejected in one step would be drawn again from the same noise in the next. `block` is
not lossless over several steps then. `token` alone would be, but not beside a choice that follows
from earlier steps: how many drafts to make, or which of them to verify. That choice has seen the
noise through what was accepted, and a redrawn token must not meet it.
"""

from enum import IntEnum

import numpy as np
import torch

from .._dispatch import INTERPRET
from ..triton_or_none import tl, triton

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW, _HALF = np.uint64(MASK32), np.uint64(32)

_INTERPRET = tl.constexpr(INTERPRET)
_LEAST_NORMAL = tl.constexpr(2.0**-126)
FIXED_BITS = 40  # probabilities are summed as int64 multiples of 2**-40: exact in any order
FIXED_ONE = float(2**FIXED_BITS)


class Purpose(IntEnum):
    """What a draw is for. Part of the counter, so that no two purposes share random numbers."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2
    GROUP = 3  # for `match`: the least variate of a group of tokens


Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_reference(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> Words:
    """Four 32-bit words, held in int64, for int64 tensors that broadcast together."""
    inputs = np.broadcast_arrays(*(x.numpy(force=True) for x in (seed, c0, c1, c2, c3)))
    w0, w1, w2, w3 = torch.from_numpy(_words(*inputs)).to(seed.device).unbind()
    return w0, w1, w2, w3


def _words(key: np.ndarray, *counter: np.ndarray) -> np.ndarray:
    """In numpy, whose operations on few words take a fifth of torch's time."""
    keys = np.stack((key & MASK32, key >> 32 & MASK32)).view(np.uint64)
    even = np.stack(counter[0::2]).view(np.uint64) & _LOW
    odd = np.stack(counter[1::2]).view(np.uint64) & _LOW
    pair = (2,) + (1,) * key.ndim
    multipliers = np.array(_MULTIPLIERS, dtype=np.uint64).reshape(pair)
    weyl = np.array(_WEYL, dtype=np.uint64).reshape(pair)
    for _ in range(10):
        product = even * multipliers
        even = (product >> _HALF)[::-1] ^ odd ^ keys
        odd = (product & _LOW)[::-1]
        keys = (keys + weyl) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1])).view(np.int64)


def uniform_reference(word: torch.Tensor) -> torch.Tensor:
    """(w >> 9 + 1/2) / 2**23: exact in float32, never 0 and never 1."""
    return ((word >> 9).float() + 0.5) * 2.0**-23


def exponential_reference(word: torch.Tensor) -> torch.Tensor:
    """A unit exponential variate; minus its log is a Gumbel variate.

    Uses all 32 bits: the least of many variates decides, and with 23 bits there would be ties.
    """
    v = ((word.float() + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)
    # -log1p(-v), as a series if v is so small that 1 - v would round it away.
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return torch.where(v < 0.1, series, -torch.log(1.0 - v))


def pick_reference(w_high: torch.Tensor, w_low: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(w * total / 2**40) with the 40-bit w = w_high : w_low[31:24]; total < 2**42."""
    w = (w_high << 8) | (w_low >> 24)
    high, low = total >> 20, total & 0xFFFFF
    return (w * high + ((w * low) >> 20)) >> 20


# The interpreter cannot run assembly, so it computes the same by hand (test_arithmetic.py).
@triton.jit
def exp2(x):
    """2**x; subnormal results become 0: keeping them would cost a GPU three instructions."""
    if _INTERPRET:
        y = tl.exp2(x)
        y = tl.where(y < _LEAST_NORMAL, 0.0, y)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return y


@triton.jit
def exp(x):
    return exp2(x * 1.4426950408889634)


@triton.jit
def log(x):
    """Natural logarithm; a subnormal number counts as 0."""
    if _INTERPRET:
        y = tl.log(tl.where((x >= 0) & (x < _LEAST_NORMAL), 0.0, x))
    else:
        y = 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return y


@triton.jit
def fixed(p):
    return (p * 1099511627776.0).to(tl.int64)


@triton.jit
def of_fixed(mass):
    return mass.to(tl.float32) * 9.094947017729282e-13


@triton.jit
def log_of_fixed(mass):
    return log(of_fixed(mass))


@triton.jit
def philox(seed, c0, c1, c2, c3):
    c0, c1, c2, c3 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    m0 = tl.full((), 0xD2511F53, tl.uint32)
    m1 = tl.full((), 0xCD9E8D57, tl.uint32)
    w0 = tl.full((), 0x9E3779B9, tl.uint32)
    w1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in range(10):
        a0, a2 = c0, c2
        c0 = tl.umulhi(a2, m1) ^ c1 ^ k0
        c2 = tl.umulhi(a0, m0) ^ c3 ^ k1
        c1 = a2 * m1
        c3 = a0 * m0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def exponential(word):
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.1, series, -log(1.0 - v))


@triton.jit
def pick(w_high, w_low, total):
    w = (w_high.to(tl.int64) << 8) | (w_low >> 24).to(tl.int64)
    return (w * (total >> 20) + ((w * (total & 0xFFFFF)) >> 20)) >> 20
