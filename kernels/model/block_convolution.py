"""The convolution of a head that drafts blocks, with taps of its own for every row.

    y[i, c] = sum of (base[t, c] + delta[i, t, c // group]) x[i - t, c]  over taps t <= i

i is a row's index in the block of its sequence, whose first row is the last known token. Nothing in
front of a block is read. Sums are float32.
"""

import torch
from torch import Tensor

from .._dispatch import uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .rows import BatchRows


def block_convolution(
    x: Tensor,
    base: Tensor,
    delta: Tensor,
    rows: BatchRows,
    num_tokens: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Convolve the rows of blocks, or add the result to a residual, in place.

    Shape: x, residual [T, hidden], dense; base [taps, hidden], dense; delta [T, taps, groups], each
    row dense; num_tokens [num_slots] int64 -> [T, hidden]
    """
    if not uses_triton(x):
        y = block_convolution_reference(x, base, delta, rows, num_tokens)
        return y.to(x.dtype) if residual is None else residual.copy_(residual.float() + y)
    num_rows, width = x.shape
    _, num_taps, num_groups = delta.shape
    assert x.is_contiguous()
    assert base.is_contiguous()
    assert delta.stride()[1:] == (num_groups, 1)
    assert residual is None or residual.is_contiguous()
    out = torch.empty_like(x) if residual is None else residual
    block = min(1024, triton.next_power_of_2(width))
    _block_convolution_kernel[(num_rows, triton.cdiv(width, block))](
        out, residual, x, base, delta, delta.stride(0), rows.positions, rows.slot_of_row,
        num_tokens, WIDTH=width, TAPS=num_taps, GROUPS=num_groups, BLOCK=block,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


def block_convolution_reference(
    x: Tensor, base: Tensor, delta: Tensor, rows: BatchRows, num_tokens: Tensor
) -> Tensor:
    """Shape: as block_convolution, but float32."""
    row = torch.arange(len(x), device=x.device)
    index = rows.positions - num_tokens[rows.slot_of_row] + 1
    index = torch.minimum(index, row)  # padding is no row of a block
    group = x.shape[1] // delta.shape[2]
    y = torch.zeros_like(x, dtype=torch.float32)
    for t in range(len(base)):
        taps = base[t].float() + delta[:, t].float().repeat_interleave(group, 1)
        before = x[(row - t).clamp_min(0)].float()
        y += torch.where((index >= t)[:, None], taps * before, 0)
    return y


@triton.jit
def _block_convolution_kernel(
    out_ptr,  # [T, WIDTH]
    residual_ptr,  # [T, WIDTH] or None
    x_ptr,  # [T, WIDTH]
    base_ptr,  # [TAPS, WIDTH]
    delta_ptr,  # [T, TAPS, GROUPS]
    delta_stride,
    positions_ptr,  # [T]
    slot_of_row_ptr,  # [T]
    num_tokens_ptr,  # [num_slots]
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: a part of one row."""
    start_next_kernel(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    group = channel // (WIDTH // GROUPS)
    num_tokens = tl.load(num_tokens_ptr + tl.load(slot_of_row_ptr + row))
    index = tl.minimum(tl.load(positions_ptr + row) - num_tokens + 1, row)
    if residual_ptr is None:
        y = tl.zeros([BLOCK], dtype=tl.float32)
    else:
        y = tl.load(residual_ptr + row * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
    for t in tl.static_range(TAPS):
        base = tl.load(base_ptr + t * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
        delta_at = delta_ptr + row * delta_stride + t * GROUPS + group
        taps = base + tl.load(delta_at, mask=mask, other=0.0).to(tl.float32)
        sees = mask & (index >= t)
        x = tl.load(x_ptr + (row - t) * WIDTH + channel, mask=sees, other=0.0).to(tl.float32)
        y += taps * x
    tl.store(out_ptr + row * WIDTH + channel, y.to(out_ptr.dtype.element_ty), mask=mask)
