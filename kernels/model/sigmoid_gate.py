"""Gates of attention and of shared experts: y * sigmoid(gate), in place.

The gate and its sigmoid are rounded to the dtype of y, as transformers rounds them.
"""

import torch.nn.functional as F
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .narrow_matrix import RowFormat
from .row_codes import Rows, as_wanted, empty_rows, places_of, store_heads

_AT_ONCE = 2048  # numbers of a program


def gate_heads(y: Tensor, gate: Tensor, format_: RowFormat | None = None) -> Rows:
    """y *= sigmoid(gate), rounded if a format is given; then y itself may have any numbers.

    Shape: y [T, heads, dim], dense, gate as y, or [T, heads, 1]; the numbers of a head are dense
    -> [T, heads * dim]
    """
    num_rows, num_heads, dim = y.shape
    if not uses_triton(y):
        return y.mul_(gate.sigmoid()).flatten(1)
    assert y.is_contiguous()
    assert gate.stride(2) == 1 or gate.shape[2] == 1
    block = triton.next_power_of_2(dim)
    heads = max(1, _AT_ONCE // block)
    flat = y.flatten(1)
    rows = empty_rows(flat, format_, flat, size=heads * dim if dim == block else 1)
    _gate_heads_kernel[(num_rows, triton.cdiv(num_heads, heads))](
        y, gate, num_heads, *gate.stride()[:2], **places_of(rows, format_), NUM_IN=num_heads * dim,
        DIM=dim, WHOLE=gate.shape[2] == 1, HEADS=heads, BLOCK=block, **dependent_launch(y.device),
    )  # fmt: skip
    return as_wanted(rows, format_)


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
    gate_ptr,  # as y or, WHOLE, [T, num_heads, 1]
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
    WHOLE: tl.constexpr,
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
    gate_at = gate_ptr + row * row_stride + head * head_stride
    if WHOLE:
        gate = tl.load(gate_at, mask=head < num_heads, other=0.0)
    else:
        gate = tl.load(gate_at + d, mask=mask, other=0.0)
    at = (row * num_heads + head) * DIM + d
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    y = y.to(tl.float32) * rounded_sigmoid(gate.to(tl.float32), y.dtype)
    y = y.to(y_ptr.dtype.element_ty)
    store_heads(
        y, row, at, mask, out_ptr, codes_ptr, codes_scale_ptr, NUM_IN, WIDTH, GROUP, HEADS * DIM
    )  # fmt: skip
