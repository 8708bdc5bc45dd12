"""Rows of activations in 8 bits a number, for products of codes with codes:

    x[t, k] = value(code[t, k]) * scale[t, k // group],     scale = max |x| in group / largest code

A row is rounded by itself, so its codes do not depend on the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import INTERPRET, uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .fp8 import MAX_E4M3, e4m3, to_e4m3
from .narrow_matrix import RowFormat
from .rms_norm import Norm, block_of_row, normed_row, rms_norm_reference

_INTERPRET = tl.constexpr(INTERPRET)
_MAX_INT8 = 127.0
_MIN_SCALE = 1e-12  # a row of zeros has some scale


class RowCodes(NamedTuple):
    """Rows in 8 bits: a number is its code times the scale of its group."""

    codes: Tensor  # [T, width] float8_e4m3fn or int8, 0 behind the inputs
    scale: Tensor  # [T, groups] float32
    dtype: torch.dtype  # of the rows before, and of products with them


# What a norm gives to the layer behind it.
Normed = Tensor | RowCodes


def round_rows(x: Tensor, format_: RowFormat, norm: Norm | None = None) -> RowCodes:
    """The rows, normalised if there is a norm, as codes. Shape: [T, K], rows dense."""
    if not uses_triton(x):
        return round_rows_reference(x, format_, norm)
    assert x.stride(-1) == 1
    rows = empty_rows(x, format_)
    _round_rows_kernel[(len(x),)](
        rows.codes,
        rows.scale,
        x,
        norm.weight if norm is not None else None,
        norm.eps if norm is not None else 0.0,
        x.stride(0),
        NUM_IN=x.shape[1],
        WIDTH=format_.width,
        GROUP=format_.group,
        **block_of_row(format_.width, 16 if norm is None else 8),  # a norm as `add_parts` takes it
        **dependent_launch(x.device),
    )
    return rows


def empty_rows(like: Tensor, format_: RowFormat) -> RowCodes:
    """Memory for as many rows. Shape: [T, K]."""
    return RowCodes(
        like.new_empty(len(like), format_.width, dtype=format_.dtype),
        like.new_empty(len(like), format_.num_groups, dtype=torch.float32),
        like.dtype,
    )


def round_rows_reference(x: Tensor, format_: RowFormat, norm: Norm | None = None) -> RowCodes:
    """As `round_rows`."""
    if norm is not None:
        x = rms_norm_reference(x, norm)
    num_in = x.shape[1]
    groups = F.pad(x.float(), (0, -num_in % format_.group)).unflatten(1, (-1, format_.group))
    is_fp8 = format_.dtype == torch.float8_e4m3fn
    # By a tensor: a GPU multiplies by the inverse of a number.
    largest = torch.full((), MAX_E4M3 if is_fp8 else _MAX_INT8, device=x.device)
    scale = groups.abs().amax(2).clamp_min(_MIN_SCALE) / largest
    codes = (groups / scale[:, :, None]).flatten(1)[:, :num_in]
    codes = to_e4m3(codes) if is_fp8 else codes.round().to(torch.int8)
    padded = F.pad(codes.view(torch.uint8), (0, format_.width - num_in))
    return RowCodes(padded.view(format_.dtype), scale, x.dtype)


def rounded_rows(x: Tensor, format_: RowFormat, norm: Norm | None = None) -> Tensor:
    """The numbers that the rows' codes stand for, in x's dtype. Shape: [T, K] -> [T, K]."""
    rows = round_rows_reference(x, format_, norm)
    whole = rows.scale.repeat_interleave(format_.group, 1)[:, : x.shape[1]]
    return (rows.codes[:, : x.shape[1]].float() * whole).to(x.dtype)


@triton.jit
def _round_rows_kernel(
    codes_ptr,  # [num_rows, WIDTH]
    scale_ptr,  # [num_rows, groups]
    x_ptr,  # [num_rows, NUM_IN]
    norm_ptr,  # [NUM_IN] or None
    eps,
    x_stride,
    NUM_IN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each program: one row."""
    start_next_kernel(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x = normed_row(x, norm, eps, NUM_IN)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # as a layer of other weights would get it
    store_codes(x, row, codes_ptr, scale_ptr, NUM_IN, WIDTH, GROUP, BLOCK)


@triton.jit
def store_codes(
    x, row, codes_ptr, scale_ptr, NUM_IN: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one row. Shape: x [BLOCK] float32, 0 behind the inputs."""
    CODE: tl.constexpr = codes_ptr.dtype.element_ty
    LARGEST: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    # One group may be no power of two.
    SIZE: tl.constexpr = GROUP if GROUP < NUM_IN else BLOCK
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    groups = tl.reshape(x, [BLOCK // SIZE, SIZE])
    # As integers, among which NaN is the largest.
    largest = tl.max(tl.abs(groups).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    largest = tl.maximum(largest, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(largest, LARGEST)
    group = tl.arange(0, BLOCK // SIZE)
    tl.store(scale_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)
    x = tl.reshape(_quotient(groups, scale[:, None], tl.div_rn(1.0, scale)[:, None]), [BLOCK])
    codes = _nearest_int8(x) if tl.int8 == CODE else e4m3(x)
    k = tl.arange(0, BLOCK)
    tl.store(codes_ptr + row * WIDTH + k, codes, mask=k < WIDTH)


@triton.jit
def _quotient(x, y, inverse):
    """x / y to the last bit, given 1 / y likewise: a third of the instructions of a division."""
    if _INTERPRET:  # which rounds twice where a GPU rounds once
        return tl.div_rn(x, tl.broadcast_to(y, x.shape))
    guess = x * inverse
    return tl.fma(tl.fma(-guess, y, x), inverse, guess)


@triton.jit
def _nearest_int8(x):
    """Halves go to even: the sum has no bits left for a fraction."""
    return (x + 12582912.0 - 12582912.0).to(tl.int8)
