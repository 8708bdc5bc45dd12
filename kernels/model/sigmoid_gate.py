"""Gates of attention and of shared experts: y * sigmoid(gate), in place.

The gate and its sigmoid are rounded to the dtype of y, as transformers rounds them.
"""

import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .narrow_matrix import RowFormat
from .rms_norm import block_of_row
from .row_codes import Rows, as_wanted, empty_rows, places_of, store_codes

_AT_ONCE = 2048  # numbers of a program


def gate_heads(y: Tensor, gate: Tensor, format_: RowFormat | None = None) -> Rows:
    """y *= sigmoid(gate), rounded if a format is given; then y itself may have any numbers.

    Shape: y [T, heads, dim], gate as y; the numbers of a head are dense -> [T, heads * dim]
    """
    num_rows, num_heads, dim = y.shape
    if not uses_triton(y):
        return y.mul_(gate.sigmoid()).flatten(1)
    assert y.is_contiguous()
    assert gate.stride(2) == 1
    block = triton.next_power_of_2(dim)
    heads = max(1, _AT_ONCE // block)
    flat = y.flatten(1)
    rows = empty_rows(flat, format_, flat, size=heads * dim if dim == block else 1)
    _gate_heads_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        y, gate, num_heads, *gate.stride()[:2], **places_of(rows, format_), NUM_IN=num_heads * dim,
        DIM=dim, HEADS=heads, BLOCK=block, **dependent_launch(y.device),
    )  # fmt: skip
    return as_wanted(rows, format_)


def gate_rows(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y *= sigmoid(x . weight), one gate for each row.

    Its bits depend on the row alone: a library's product of one output is summed in another order
    for other numbers of rows. Shape: y [T, N], x [T, K], rows dense, weight [K]
    """
    if not uses_triton(y):
        gate = (x.float() * weight.float()).sum(1, keepdim=True).to(y.dtype)
        y.mul_(sigmoid_reference(gate))
        return
    assert y.stride(1) == x.stride(1) == weight.stride(0) == 1
    (num_rows, width), num_in = y.shape, x.shape[1]
    _gate_rows_kernel[(num_rows,)](
        y, x, weight, y.stride(0), x.stride(0), WIDTH=width, NUM_IN=num_in,
        BLOCK_N=min(_AT_ONCE, triton.next_power_of_2(width)), **block_of_row(num_in),
        **dependent_launch(y.device),
    )  # fmt: skip


def sigmoid_reference(x: Tensor) -> Tensor:
    """Shape: [T, N] -> [T, N]."""
    # Padded, rows are not dense: torch takes each by itself, and rounds it alike wherever it lies.
    return F.pad(x, (0, 1))[:, :-1].sigmoid()


@triton.jit
def rounded_sigmoid(x, dtype: tl.constexpr):
    """Rounded to a dtype, as float32."""
    return (1.0 / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)


@triton.jit
def _gate_heads_kernel(
    y_ptr,  # [T, num_heads, DIM]
    gate_ptr,  # as y
    num_heads,
    row_stride,
    head_stride,
    out_ptr,  # y_ptr, or None
    codes_ptr,  # [T, WIDTH] or None
    codes_scale_ptr,  # [T, groups] or None
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_IN: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: HEADS heads of one row."""
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (d < DIM)
    gate = tl.load(gate_ptr + row * row_stride + head * head_stride + d, mask=mask, other=0.0)
    at = (row * num_heads + head) * DIM + d
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    y = y.to(tl.float32) * rounded_sigmoid(gate.to(tl.float32), y.dtype)
    y = y.to(y_ptr.dtype.element_ty)
    if out_ptr is not None:
        tl.store(out_ptr + at, y, mask=mask)
    if codes_ptr is not None:
        SIZE: tl.constexpr = HEADS * DIM
        y = tl.reshape(y.to(tl.float32), [SIZE])
        first = tl.program_id(1) * SIZE
        store_codes(y, row, first, codes_ptr, codes_scale_ptr, NUM_IN, WIDTH, GROUP, SIZE)


@triton.jit
def _gate_rows_kernel(
    y_ptr,  # [T, WIDTH]
    x_ptr,  # [T, NUM_IN]
    weight_ptr,  # [NUM_IN]
    y_stride,
    x_stride,
    WIDTH: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    dtype = y_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    gate = rounded_sigmoid(tl.sum(x * weight, 0).to(dtype).to(tl.float32), dtype)
    for start in range(0, WIDTH, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = y_ptr + row * y_stride + n
        y = tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32) * gate
        tl.store(at, y.to(dtype), mask=n < WIDTH)
