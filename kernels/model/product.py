"""Products of rows with a weight. An output is summed in one order, however many rows there are.

    y = x W^T + b,     or silu(gate) * up of its two halves,     or its parts, sums over shares of K

Made for few rows, where reading the weights takes all the time. Outputs lie along the long side of
the tensor cores' tiles, so that the number of rows only changes the short side. A weight with few
outputs would leave multiprocessors idle, so its product is split over K. How often depends on the
weight alone. `split_product` adds the parts of one that is added to a residual; others of very few
outputs are left to `few_outputs_product`.
"""

import torch
from torch import Tensor

from .._dispatch import num_programs, num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .few_outputs_product import few_outputs_product, has_few_outputs
from .silu_mul import silu, silu_mul
from .tiles import BLOCK_N, num_splits_of, tile_of_program

# Measured on an H200.
_MAX_ROWS = 32
_MAX_ROWS_OF_FEW_OUTPUTS = 256
_BLOCK_K = 128
_AT_ONCE = (64, 128, 256)  # with so many inputs a program loads all its weights before x is there
_TOGETHER = tl.constexpr(8)  # blocks of outputs whose programs run together and share rows of x


def is_ahead(x: Tensor, weight: Tensor) -> bool:
    """Whether this is faster than the library's product."""
    most = _MAX_ROWS_OF_FEW_OUTPUTS if has_few_outputs(weight) else _MAX_ROWS
    return len(x) <= most and weight.element_size() == 2


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Shape: x [T, K], rows dense, weight [N, K], bias [N] or, gated, [2 N, K], [2 N] -> [T, N]."""
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2 if gated else len(weight))
    assert out.is_contiguous()
    if not has_few_outputs(weight):
        return _launch(out, x, weight, bias, 1, gated)
    y = x.new_empty(len(x), len(weight)) if gated else out
    few_outputs_product(y, x, weight, bias)
    return silu_mul(y, out) if gated else out


def product_parts(x: Tensor, weight: Tensor, num_splits: int) -> Tensor:
    """The parts of a product, to be added up.

    Shape: x [T, K], K a multiple of num_splits -> [num_splits, T, N] float32
    """
    out = x.new_empty(num_splits, len(x), len(weight), dtype=torch.float32)
    return _launch(out, x, weight, None, num_splits, False)


def parts_of(weight: Tensor) -> int:
    """How many parts a product is split into."""
    num_out, num_in = weight.shape
    return num_splits_of(num_out, num_in, weight.device, multiple=8, least=_BLOCK_K)


def _launch(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, num_splits: int, gated: bool
) -> Tensor:
    num_rows, num_in = x.shape
    share = num_in // num_splits
    tile = _tile(x, weight, share, num_splits)
    grid = (
        triton.cdiv(out.shape[-1], tile["BLOCK_N"] // (2 if gated else 1))
        * triton.cdiv(num_rows, tile["BLOCK_M"]),
        num_splits,
    )
    _product_kernel[grid](
        out, x, weight, bias, num_rows, out.shape[-1], x.stride(0),
        NUM_IN=num_in, SHARE=share, GATED=gated, **tile, **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _tile(x: Tensor, weight: Tensor, share: int, num_splits: int) -> dict[str, int]:
    """Block sizes, warps, and how many blocks a program loads ahead."""
    num_rows = len(x)
    block_m = max(16, triton.next_power_of_2(num_rows))
    block_n, block_k, num_warps = BLOCK_N, 64, 4
    if num_rows <= 2 * _MAX_ROWS:
        block_k = share if share in _AT_ONCE else _BLOCK_K
        # With fewer programs than multiprocessors, each must load further ahead.
        few = triton.cdiv(len(weight), block_n) * num_splits <= num_programs(x.device, 1)
        num_stages = (6 if few else 3) if num_rows <= _MAX_ROWS else 5
    elif num_rows <= 256:
        block_m, num_stages = 128, 4
    else:
        block_m, block_n, num_warps, num_stages = 128, 128, 8, 3
    stage_bytes = (block_m + block_n) * block_k * x.element_size()
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": num_warps,
        "num_stages": num_stages_of(num_stages, stage_bytes, x.device),
    }


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    out_ptr,  # [num_rows, num_out] or, float32, [splits, num_rows, num_out]
    x_ptr,  # [num_rows, NUM_IN]
    weight_ptr,  # [num_out or 2 * num_out, NUM_IN]
    bias_ptr,  # [num_out or 2 * num_out] or None
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
    """Each program: BLOCK_N outputs of BLOCK_M rows, over one share of the inputs.

    Whatever the block sizes, an output adds up its inputs in order, as many at a time as the tensor
    cores take.
    """
    start_next_kernel(DEPENDENT)
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    EVEN: tl.constexpr = SHARE % BLOCK_K == 0
    block, row_block = tile_of_program(
        tl.program_id(0), tl.cdiv(num_out, OUTS), tl.cdiv(num_rows, BLOCK_M), _TOGETHER
    )
    split = tl.program_id(1)
    m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    i = tl.arange(0, BLOCK_N)[:, None]
    n = block * OUTS + i % OUTS
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = m < num_rows, n < num_out
    # If gated, the second half of a block holds the rows of `up` that match the gate's rows.
    weight_row = n.to(tl.int64) + i // OUTS * num_out
    weight_at = weight_ptr + weight_row * NUM_IN + split * SHARE + k[None, :]
    x_at = x_ptr + m.to(tl.int64) * x_stride + split * SHARE + k[:, None]
    if SHARE == BLOCK_K:
        weight = tl.load(weight_at, mask=is_out, other=0.0)
        wait_for_inputs(DEPENDENT)
        x = tl.load(x_at, mask=is_row, other=0.0)
        y = tl.dot(weight, x)
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
    if bias_ptr is not None:
        bias_at = bias_ptr + n + i // OUTS * num_out
        y += tl.load(bias_at, mask=is_out, other=0.0).to(tl.float32)
    if GATED:
        # Rounded first, as the library rounds both halves.
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OUTS, BLOCK_M]), (1, 2, 0)))
        y = silu(gate) * up
        n = block * OUTS + tl.arange(0, OUTS)[:, None]
    at = (split * num_rows + m).to(tl.int64) * num_out + n
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_row & (n < num_out))
