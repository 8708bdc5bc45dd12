"""Rows of activations in 8 bits a number, for products of codes with codes:

    x[t, k] = value(code[t, k]) * scale[t, k // group],     scale = max |x| in group / largest code

A row is rounded by itself, so its codes do not depend on the batch.

Rounding takes no launch where the kernel in front has whole groups of a row anyway, as norms and
gates have: it stores what the next layer wants (`empty_rows`, `places_of`, `store_codes`). It
rounds what it would have stored otherwise, so codes are the same either way.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch import INTERPRET, uses_triton
from ..dependent_launch import dependent_launch, start_next_kernel, wait_for_inputs
from ..triton_or_none import tl, triton
from .fp8 import MAX_E4M3, e4m3, to_e4m3
from .narrow_matrix import RowFormat
from .rms_norm import (
    Norm,
    block_of_row,
    normed_row,
    numbers_of_row,
    rms_norm,
    rms_norm_reference,
    rounded,
)

_INTERPRET = tl.constexpr(INTERPRET)
_MAX_INT8 = 127.0
_MIN_SCALE = 1e-12  # a row of zeros has some scale
_AT_ONCE = 4096  # numbers that a program rounds, if a row has several groups


class RowCodes(NamedTuple):
    """Rows in 8 bits: a number is its code times the scale of its group."""

    codes: Tensor  # [T, width] float8_e4m3fn or int8, 0 behind the inputs
    scale: Tensor  # [T, groups] float32
    dtype: torch.dtype  # of the rows before, and of products with them
    plain: Tensor | None = None  # [T, K] the rows before, if the format keeps them


# What a layer takes; one that takes codes also takes rows as they are, and rounds them.
Rows = Tensor | RowCodes


def plain(rows: Rows) -> Tensor:
    """The rows as they are. Raises TypeError if there are only codes."""
    if isinstance(rows, Tensor):
        return rows
    if rows.plain is None:
        raise TypeError("rows are there as codes alone, for a layer that takes none")
    return rows.plain


def round_rows(x: Tensor, format_: RowFormat, norm: Norm | None = None) -> RowCodes:
    """The rows, normalised if there is a norm, as codes. Shape: [T, K], rows dense."""
    if not uses_triton(x):
        return round_rows_reference(x, format_, norm)
    assert x.stride(-1) == 1
    rows = empty_rows(x, format_, x if norm is None else None)
    assert isinstance(rows, RowCodes)
    width = format_.width
    if norm is None and format_.num_groups > 1:
        width = min(width, max(_AT_ONCE, format_.group))
    _round_rows_kernel[len(x), triton.cdiv(format_.width, width)](
        x_ptr=x, norm_ptr=norm.weight if norm is not None else None,
        eps=norm.eps if norm is not None else 0.0, x_stride=x.stride(0), NUM_IN=x.shape[1],
        **places_of(rows, format_), **block_of_row(width), **dependent_launch(x.device),
    )  # fmt: skip
    return rows


def empty_rows(
    like: Tensor, format_: RowFormat | None, out: Tensor | None = None, *, size: int | None = None
) -> Rows:
    """Memory for as many rows, in which a kernel stores them as a layer wants them (`places_of`).

    A program has `size` neighbours of a row, a power of 2, or the whole row. If that is less than a
    group, or no codes are wanted, it stores rows as they are: in `out`, if that is given.
    Shape: like, out [T, K]
    """
    if format_ is None or (size and size < format_.group):
        return like.new_empty(like.shape) if out is None else out
    if format_.keeps_rows and out is None:
        out = like.new_empty(like.shape)
    return RowCodes(
        like.new_empty(len(like), format_.width, dtype=format_.dtype),
        like.new_empty(len(like), format_.num_groups, dtype=torch.float32),
        like.dtype,
        out if format_.keeps_rows else None,
    )


def places_of(rows: Rows | None, format_: RowFormat | None) -> dict[str, Any]:
    """The arguments of a kernel that say where it stores rows: as they are, as codes, or both."""
    if not isinstance(rows, RowCodes) or format_ is None:
        return {"out_ptr": rows, "codes_ptr": None, "codes_scale_ptr": None, "WIDTH": 0, "GROUP": 0}
    return {
        "out_ptr": rows.plain,
        "codes_ptr": rows.codes,
        "codes_scale_ptr": rows.scale,
        "WIDTH": format_.width,
        "GROUP": format_.group,
    }


def normed_rows(x: Tensor, norm: Norm) -> Rows:
    """The rows normalised and, if the norm rounds, as codes. Shape: [T, K], rows dense."""
    return rms_norm(x, norm) if norm.rounds is None else round_rows(x, norm.rounds, norm)


def as_wanted(rows: Rows, format_: RowFormat | None) -> Rows:
    """Rows in such memory as a layer wants them; rounding may take a kernel of its own."""
    if format_ is None or isinstance(rows, RowCodes):
        return rows
    return round_rows(rows, format_)


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
    kept = x if format_.keeps_rows else None
    return RowCodes(padded.view(format_.dtype), scale, x.dtype, kept)


def rounded_rows(x: Tensor, format_: RowFormat, norm: Norm | None = None) -> Tensor:
    """The numbers that the rows' codes stand for, in x's dtype. Shape: [T, K] -> [T, K]."""
    rows = round_rows_reference(x, format_, norm)
    whole = rows.scale.repeat_interleave(format_.group, 1)[:, : x.shape[1]]
    return (rows.codes[:, : x.shape[1]].float() * whole).to(x.dtype)


@triton.jit
def _round_rows_kernel(
    out_ptr,  # [num_rows, NUM_IN], or None
    codes_ptr,  # [num_rows, WIDTH]
    codes_scale_ptr,  # [num_rows, groups]
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
    """Each program: one row or, if it only rounds, some whole groups of it."""
    start_next_kernel(DEPENDENT)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    k = first + numbers_of_row(BLOCK)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < NUM_IN, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x = normed_row(x, norm, eps, NUM_IN)
        z = rounded(x, x_ptr.dtype.element_ty)  # as a layer of other weights would get it
        if out_ptr is not None:
            tl.store(out_ptr + row * NUM_IN + k, z, mask=k < NUM_IN)
        x = z.to(tl.float32)
    store_codes(x, k, row, first, codes_ptr, codes_scale_ptr, NUM_IN, WIDTH, GROUP, BLOCK)


@triton.jit
def store_codes(
    x, k, row, first, codes_ptr, scale_ptr, NUM_IN: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a row, or its whole groups from the input `first` on.

    Shape: x float32, 0 behind the inputs, k [BLOCK] or as `numbers_of_row`.
    """
    # One group may be no power of two.
    SIZE: tl.constexpr = GROUP if GROUP < NUM_IN else BLOCK
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    groups = tl.reshape(x, [BLOCK // SIZE, SIZE])
    codes, scale = codes_of_groups(groups, codes_ptr.dtype.element_ty)
    codes = tl.reshape(codes, k.shape)
    tl.store(codes_ptr + row * WIDTH + k, codes, mask=k < WIDTH)
    # Last: warps exchange the scales first.
    group = first // GROUP + tl.arange(0, BLOCK // SIZE)
    tl.store(scale_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


@triton.jit
def codes_of_groups(groups, CODE: tl.constexpr):
    """Codes and scale of each group. Shape: [groups, SIZE] float32 -> [groups, SIZE], [groups]."""
    LARGEST: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    # As integers, among which NaN is the largest.
    largest = tl.max(tl.abs(groups).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    largest = tl.maximum(largest, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    scale = _quotient(largest, LARGEST, 1.0 / LARGEST)
    x = _quotient(groups, scale[:, None], _inverse(scale)[:, None])
    return _nearest_int8(x) if tl.int8 == CODE else e4m3(x), scale


@triton.jit
def store_heads(
    y, row, at, mask, out_ptr, codes_ptr, scale_ptr, NUM_IN: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store those heads of a row that a program has, SIZE numbers, as `places_of` says.

    Shape: y, at and mask [heads, BLOCK], y in the dtype of rows.
    """
    if out_ptr is not None:
        tl.store(out_ptr + at, y, mask=mask)
    if codes_ptr is not None:
        y = tl.reshape(y.to(tl.float32), [SIZE])
        first = tl.program_id(1) * SIZE
        k = first + tl.arange(0, SIZE)
        store_codes(y, k, row, first, codes_ptr, scale_ptr, NUM_IN, WIDTH, GROUP, SIZE)


@triton.jit
def _quotient(x, y, inverse):
    """x / y to the last bit, given 1 / y likewise: a third of the instructions of a division."""
    if _INTERPRET:  # which rounds twice where a GPU rounds once
        return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + y)
    guess = x * inverse
    return tl.fma(tl.fma(-guess, y, x), inverse, guess)


@triton.jit
def _inverse(x):
    """1 / x to the last bit, without the branch of a division for what is no scale."""
    if _INTERPRET:
        return tl.div_rn(1.0, x)
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1
    )
    return _quotient(1.0, x, tl.fma(tl.fma(-guess, x, 1.0), guess, guess))


@triton.jit
def _nearest_int8(x):
    """Halves go to even: the sum has no bits left for a fraction."""
    return (x + 12582912.0 - 12582912.0).to(tl.int8)
