"""Products of a few rows, whose time is that of reading the weights once:

    y = x W^T,     or silu(gate) * up of its two halves,     or its parts, sums over shares of K

Outputs lie along the tensor cores' long side. Few outputs alone would leave multiprocessors idle:
such a product is split over K, and what adds the parts (`split_product`) does more on the way.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs
from ..dependent_launch import (
    dependent_launch,
    start_next_kernel,
    wait_for_inputs,
)
from ..triton_or_none import tl, triton

# Measured on an H200.
_MAX_ROWS = 32
_BLOCK_N, _BLOCK_K = 64, 128
_AT_ONCE = (64, 128, 256)  # inputs of a program that asks for all its weights before x is there


def is_ahead(x: Tensor, weight: Tensor) -> bool:
    """Whether this is faster than the library's product."""
    return len(x) <= _MAX_ROWS and weight.element_size() == 2


def product(x: Tensor, weight: Tensor, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
    """Shape: x [T, K], rows dense, weight [N, K] or, gated, [2 N, K], of 16 bits -> [T, N]."""
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2 if gated else len(weight))
    assert out.is_contiguous()
    return _launch(out, x, weight, 1, gated)


def product_parts(x: Tensor, weight: Tensor, num_splits: int) -> Tensor:
    """Shape: x [T, K], K a multiple of num_splits -> [num_splits, T, N] float32, to be added."""
    out = x.new_empty(num_splits, len(x), len(weight), dtype=torch.float32)
    return _launch(out, x, weight, num_splits, False)


def num_splits_of(weight: Tensor) -> int:
    """Into how many parts a product is split: as many as have a multiprocessor for each program."""
    num_out, num_in = weight.shape
    most = num_programs(weight.device, 1) // triton.cdiv(num_out, _BLOCK_N)
    splits, share = 1, num_in
    while 2 * splits <= most and share % 16 == 0 and share >= 2 * _BLOCK_K:
        splits, share = 2 * splits, share // 2
    return splits


def _launch(out: Tensor, x: Tensor, weight: Tensor, num_splits: int, gated: bool) -> Tensor:
    num_rows, num_in = x.shape
    share = num_in // num_splits
    grid = (triton.cdiv(len(weight), _BLOCK_N), num_splits)
    # Programs that are fewer than multiprocessors must each have more under way.
    few = grid[0] * num_splits <= num_programs(x.device, 1)
    _product_kernel[grid](
        out,
        x,
        weight,
        num_rows,
        out.shape[-1],
        x.stride(0),
        NUM_IN=num_in,
        SHARE=share,
        BLOCK_M=16 if num_rows <= 16 else 32,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=share if share in _AT_ONCE else _BLOCK_K,
        GATED=gated,
        num_warps=4,
        num_stages=6 if few else 3,
        **dependent_launch(x.device),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    out_ptr,  # [num_rows, num_out] or, float32, [splits, num_rows, num_out]
    x_ptr,  # [num_rows, NUM_IN]
    weight_ptr,  # [num_out or 2 * num_out, NUM_IN]
    num_rows,
    num_out,
    x_stride,
    NUM_IN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: BLOCK_N products with every row, over a share of the inputs."""
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    EVEN: tl.constexpr = SHARE % BLOCK_K == 0
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[None, :]
    i = tl.arange(0, BLOCK_N)[:, None]
    n = tl.program_id(0) * OUTS + i % OUTS
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = m < num_rows, n < num_out
    # Gated, the block's second half are the rows of `up` that belong to the gate's before them.
    weight_row = n.to(tl.int64) + i // OUTS * num_out
    weight_at = weight_ptr + weight_row * NUM_IN + split * SHARE + k[None, :]
    x_at = x_ptr + m * x_stride + split * SHARE + k[:, None]
    if SHARE == BLOCK_K:
        weight = tl.load(weight_at, mask=is_out, other=0.0)
        wait_for_inputs(DEPENDENT)
        y = tl.dot(weight, tl.load(x_at, mask=is_row, other=0.0))
    else:
        wait_for_inputs(DEPENDENT)
        y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, SHARE, BLOCK_K):
            in_x, in_weight = is_row, is_out
            if not EVEN:
                inside = start + k < SHARE
                in_x, in_weight = is_row & inside[:, None], is_out & inside[None, :]
            x = tl.load(x_at + start, mask=in_x, other=0.0)
            weight = tl.load(weight_at + start, mask=in_weight, other=0.0)
            y = tl.dot(weight, x, y)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OUTS, BLOCK_M]), (1, 2, 0)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[:, None]
    at = (split * num_rows + m) * num_out + n
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_row & (n < num_out))
