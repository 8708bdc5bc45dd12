"""Products of many inputs with few outputs, such as a router's logits: y = x W^T + b.

Were an output summed by one program, most multiprocessors would be idle, and the others would wait
for memory. So the inputs are taken in shares. The sum of each starts from 0, and these are added in
order, whatever the number of rows. Of few rows each share has a program, and the last one of a tile
that is done adds the sums. Many rows have a program for all shares.
"""

import torch
from torch import Tensor

from .._dispatch import num_stages_of
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .tiles import BLOCK_N, counters

_MAX_OUTPUTS = 9 * BLOCK_N  # more have programs enough
_MIN_INPUTS = 2048  # fewer are read while a program waits for the others
_SHARE = 256  # inputs; a program reads its weights before they are there
_MAX_SHARED_ROWS = 512  # more have programs enough without shares; measured on an H200


def has_few_outputs(weight: Tensor) -> bool:
    """Whether `few_outputs_product` is for this weight. Shape: [N, K]"""
    num_out, num_in = weight.shape
    return num_out <= _MAX_OUTPUTS and num_in >= _MIN_INPUTS and weight.element_size() == 2


def few_outputs_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Shape: out [T, N], dense, x [T, K], rows dense, weight [N, K], bias [N]"""
    (num_rows, num_in), num_out = x.shape, len(weight)
    tile = _tile(x, weight)
    num_tiles = triton.cdiv(num_rows, tile["BLOCK_M"]) * triton.cdiv(num_out, tile["BLOCK_N"])
    num_programs, parts, done = 1, None, None
    if num_rows <= _MAX_SHARED_ROWS:
        num_programs = triton.cdiv(num_in, _SHARE)
        parts = x.new_empty(num_programs, num_rows, num_out, dtype=torch.float32)
        done = counters(x.device, triton.next_power_of_2(num_tiles))
    _few_outputs_kernel[(num_tiles, num_programs)](
        out, x, weight, bias, parts, done, num_rows, num_out, x.stride(0),
        NUM_IN=num_in, SHARE=_SHARE, **tile, **dependent_launch(x.device),
    )  # fmt: skip


def _tile(x: Tensor, weight: Tensor) -> dict[str, int]:
    """Block sizes, warps, and how many blocks a program loads ahead; no sum depends on these."""
    if len(x) <= _MAX_SHARED_ROWS:  # small, so that many programs add parts
        sizes = {"BLOCK_M": 16, "BLOCK_N": BLOCK_N, "BLOCK_K": _SHARE}
        return {**sizes, "num_warps": 8, "num_stages": 1}
    block_m, block_n, block_k = 64, BLOCK_N if len(weight) <= BLOCK_N else 128, 128
    stage_bytes = (block_m + block_n) * block_k * x.element_size()
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 4,
        "num_stages": num_stages_of(4, stage_bytes, x.device),
    }


@triton.jit(do_not_specialize=["num_rows"])
def _few_outputs_kernel(
    out_ptr,  # [num_rows, num_out]
    x_ptr,  # [num_rows, NUM_IN]
    weight_ptr,  # [num_out, NUM_IN]
    bias_ptr,  # [num_out] or None
    parts_ptr,  # [shares, num_rows, num_out] float32, or None
    done_ptr,  # [tiles], how many of its shares are done, or None
    num_rows,
    num_out,
    x_stride,
    NUM_IN: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: BLOCK_N outputs of BLOCK_M rows, over one share of the inputs or, without
    `parts`, over all.
    """
    start_next_kernel(DEPENDENT)
    SHARES: tl.constexpr = (NUM_IN + SHARE - 1) // SHARE
    EVEN: tl.constexpr = NUM_IN % BLOCK_K == 0
    num_blocks = tl.cdiv(num_out, BLOCK_N)
    row_block, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    m = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = m < num_rows, n < num_out
    weight_at = weight_ptr + n * NUM_IN + k[None, :]
    x_at = x_ptr + m * x_stride + k[:, None]
    if parts_ptr is not None:
        first = tl.program_id(1) * SHARE
        in_x, in_weight = is_row, is_out
        if not EVEN:
            inside = first + k < NUM_IN
            in_x, in_weight = is_row & inside[:, None], is_out & inside[None, :]
        weight = tl.load(weight_at + first, mask=in_weight, other=0.0)
        wait_for_inputs(DEPENDENT)
        x = tl.load(x_at + first, mask=in_x, other=0.0)
        y = tl.dot(weight, x)
    else:
        wait_for_inputs(DEPENDENT)
        y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # the sum of a share, so far
        for start in range(0, NUM_IN, BLOCK_K):
            in_x, in_weight = is_row, is_out
            if not EVEN:
                inside = start + k < NUM_IN
                in_x, in_weight = is_row & inside[:, None], is_out & inside[None, :]
            x = tl.load(x_at + start, mask=in_x, other=0.0)
            weight = tl.load(weight_at + start, mask=in_weight, other=0.0)
            part = tl.dot(weight, x, part)
            # No branch: that would read `part` while the tensor cores still write it.
            is_whole = ((start + BLOCK_K) % SHARE == 0) | (start + BLOCK_K >= NUM_IN)
            y = tl.where(is_whole, y + part, y)
            part = tl.where(is_whole, 0.0, part)
    at, mask = m * num_out + n, is_row & is_out
    if parts_ptr is None:
        _store(out_ptr, bias_ptr, y, at, n, is_out, mask)
    else:
        stride = num_rows.to(tl.int64) * num_out
        tl.store(parts_ptr + tl.program_id(1) * stride + at, y, mask=mask)
        tl.debug_barrier()  # all stores of the program must come before its count
        done_ptr += tl.program_id(0)
        if tl.atomic_add(done_ptr, 1, sem="acq_rel") == SHARES - 1:
            tl.store(done_ptr, 0)
            y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for share in tl.static_range(SHARES):
                # Not from a cache that may have been filled before the others stored.
                part_at = parts_ptr + share * stride + at
                y += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
            _store(out_ptr, bias_ptr, y, at, n, is_out, mask)


@triton.jit
def _store(out_ptr, bias_ptr, y, at, n, is_out, mask):
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
