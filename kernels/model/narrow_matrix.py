"""The matrix of a linear layer in 4 or 8 bits a number, with scales:

    W[n, k] = (value(code[n, k]) - zero[k // group, n]) * scale[k // group, n // rows] * factor[n]

A byte holds one 8-bit code or two 4-bit codes: the low nibbles belong to `half` inputs, the high
nibbles to the next `half`. So a block of bytes unpacks into two adjacent blocks of numbers.

The bytes of a row are reordered within chunks of 64 (or 32), so that the bytes which one thread
passes to the tensor cores are adjacent. Tensor cores take 16 inputs at a time, of which thread t of
four holds 2t, 2t + 1, 2t + 8 and 2t + 9. So a thread reads 16 bytes at once, and threads need not
exchange any. The bits of words of e2m1 are reordered as well (see `e2m1.py`). If inputs are rounded
too, tensor cores take codes from shared memory, and the bytes keep their order.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import e2m1
from .fp8 import MAX_E4M3, to_e4m3

Kind = Literal["fp8", "int8", "fp4", "nvfp4", "int4"]

# The most inputs in a step of a product; a 4-bit row is packed step by step.
STEP = 128
# Sizes of groups of inputs that share a scale: these, multiples of STEP, or all inputs.
SMALL_GROUPS = (32, 64)
NVFP4_GROUP = 16  # there the scales multiply numbers, not sums: their products are exact in 16 bits
_NO_ZERO = {"fp8": 0, "int8": 0, "fp4": 0, "nvfp4": 0, "int4": 8}
_ROWS_AT_ONCE = 4096


class RowFormat(NamedTuple):
    """How a matrix takes its inputs, if it rounds them (`row_codes`)."""

    dtype: torch.dtype  # of the codes: float8_e4m3fn or int8
    group: int  # inputs that share a scale
    num_groups: int
    width: int  # codes of a row: K, padded
    keeps_rows: bool = False  # whether rows are wanted as they are, too


class NarrowMatrix(NamedTuple):
    """The matrix W of a linear layer, [N, K]."""

    kind: Kind  # fp8 is e4m3, fp4 and nvfp4 are e2m1; int8 is signed, int4 is 0 to 15
    codes: Tensor  # [N, bytes of a row] float8_e4m3fn, int8, or for 4 bits uint8
    scale: Tensor  # [groups, N / rows], any floating dtype; nvfp4: packed (e2m1.py)
    zero: Tensor | None  # [groups, N] int8; None: 8 for int4, else 0
    num_in: int  # K
    group: int  # inputs that share a scale
    rows: int = 1  # outputs that share a scale
    order: Tensor | None = None  # [K]: column j of the codes multiplies input order[j]
    rounds_inputs: bool = False  # to codes of its kind; 8 bits only, and one group or STEP * 2^n
    factor: Tensor | None = None  # [N] float32: nvfp4 only, which always has it

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.num_in

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scale, self.zero, self.order, self.factor)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def row_format(self) -> RowFormat | None:
        """What inputs are rounded to, if they are."""
        if not self.rounds_inputs:
            return None
        return RowFormat(self.codes.dtype, self.group, len(self.scale), self.codes.shape[1])

    @property
    def half(self) -> int:
        """The inputs of a step of a product: whole groups, or a part of one."""
        return _half(self.group)

    @property
    def chunk(self) -> int:
        """How many bytes of a row are reordered among themselves."""
        return _chunk(self.group)


def _half(group: int) -> int:
    if group == NVFP4_GROUP:
        return SMALL_GROUPS[-1]
    return group if group in SMALL_GROUPS else STEP


def _chunk(group: int) -> int:
    return min(64, _half(group))


def has_4_bits(kind: Kind) -> bool:
    return kind in ("int4", "fp4", "nvfp4")


def narrow_matrix(
    kind: Kind,
    codes: Tensor,
    scale: Tensor,
    *,
    group: int,
    rows: int = 1,
    zero: Tensor | None = None,
    order: Tensor | None = None,
    rounds_inputs: bool = False,
    factor: Tensor | None = None,
) -> NarrowMatrix:
    """A matrix from codes, one a number. If `group` is at least K, each output has one scale.

    Shape: codes [N, K], of 4 bits uint8; scale [groups, N / rows], of nvfp4 float8_e4m3fn, not
    negative; zero [groups, N]; factor [N].
    Raises ValueError naming a group or a shape that is not served.
    """
    num_out, num_in = codes.shape
    group = min(group, num_in)
    if kind == "nvfp4":
        assert (group, rows, scale.dtype) == (NVFP4_GROUP, 1, torch.float8_e4m3fn)
        assert factor is not None
        if num_in % NVFP4_GROUP:
            raise ValueError(f"it has {num_in} inputs, no multiple of {NVFP4_GROUP}")
    elif group < num_in and group % STEP and group not in SMALL_GROUPS:
        raise ValueError(
            f"{group} inputs share a scale; 32, 64, multiples of 128, and all of them are served"
        )
    expected = (-(-num_in // group), -(-num_out // rows))
    if tuple(scale.shape) != expected:
        raise ValueError(f"its scales have the shape {tuple(scale.shape)}, not {expected}")
    if zero is not None and tuple(zero.shape) != (expected[0], num_out):
        raise ValueError(f"its zero points have the shape {tuple(zero.shape)}")
    if kind == "nvfp4":
        codes = codes * (scale.float().t() > 0).repeat_interleave(group, 1)
        scale = e2m1.pack_scales(scale)
    if has_4_bits(kind):
        half = _half(group)
        codes = F.pad(codes, (0, -num_in % (2 * half))).reshape(num_out, -1, 2, half)
        codes = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    chunk = _chunk(group)
    plain = codes.contiguous().view(torch.uint8)
    if missing := -plain.shape[1] % chunk:
        plain = F.pad(plain, (0, missing))
    scale = scale.contiguous()
    if rounds_inputs:
        assert kind in ("fp8", "int8")
        assert zero is None
        assert order is None
        codes = plain.view(codes.dtype)
        return NarrowMatrix(kind, codes, scale, None, num_in, group, rows, rounds_inputs=True)
    # [N, chunks, tensor core steps, halves of 16 inputs, threads, inputs of a pair]
    turns = plain.view(num_out, -1, chunk // 16, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)
    turned = turns.reshape(num_out, -1)
    if kind in ("fp4", "nvfp4"):
        turned = e2m1.pack(turned.view(torch.int32)).view(torch.uint8)
    codes = turned.view(codes.dtype)
    return NarrowMatrix(kind, codes, scale, zero, num_in, group, rows, order, factor=factor)


def without_rounding(matrix: NarrowMatrix) -> NarrowMatrix:
    """The same matrix for inputs as they come."""
    if not matrix.rounds_inputs:
        return matrix
    codes = matrix.codes[:, : matrix.num_in]
    return narrow_matrix(
        matrix.kind, codes, matrix.scale, group=matrix.group, rows=matrix.rows, zero=matrix.zero
    )


def can_stack(first: NarrowMatrix, matrix: NarrowMatrix) -> bool:
    """Whether they have one format, and their inputs one order."""
    if first.order is None or matrix.order is None:
        same_order = first.order is matrix.order
    else:
        same_order = torch.equal(first.order, matrix.order)
    return (
        same_order
        and matrix.kind == first.kind
        and matrix.codes.shape[1:] == first.codes.shape[1:]
        and matrix.codes.dtype == first.codes.dtype
        and matrix.scale.dtype == first.scale.dtype
        and (matrix.num_in, matrix.group) == (first.num_in, first.group)
        and (matrix.zero is None) == (first.zero is None)
        and matrix.rounds_inputs == first.rounds_inputs
    )


def stack(matrices: Sequence[NarrowMatrix]) -> NarrowMatrix | None:
    """The matrices stacked into one; None if their formats differ."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    rows = first.rows
    for matrix in matrices:
        if not can_stack(first, matrix):
            return None
        if matrix.rows != rows or len(matrix.codes) % matrix.rows:
            rows = 1  # because blocks of outputs would cross the seam
    scales = [matrix.scale if rows > 1 else _scale_of_rows(matrix) for matrix in matrices]
    zeros = [matrix.zero for matrix in matrices if matrix.zero is not None]
    factors = [matrix.factor for matrix in matrices if matrix.factor is not None]
    codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in matrices])
    return first._replace(
        codes=codes.view(first.codes.dtype),
        scale=torch.cat(scales, 1),
        zero=torch.cat(zeros, 1) if zeros else None,
        rows=rows,
        factor=torch.cat(factors) if factors else None,
    )


def _plain_scale(matrix: NarrowMatrix) -> Tensor:
    """As it is given to `narrow_matrix`."""
    if matrix.kind == "nvfp4":
        num_groups = matrix.num_in // NVFP4_GROUP
        return e2m1.unpack_scales(matrix.scale, num_groups).to(torch.float8_e4m3fn)
    return matrix.scale


def _scale_of_rows(matrix: NarrowMatrix) -> Tensor:
    return matrix.scale.repeat_interleave(matrix.rows, 1)[:, : len(matrix.codes)]


def rows_of(matrix: NarrowMatrix, first: int, count: int) -> NarrowMatrix:
    """A range of outputs: [count, K]."""
    part, rows = slice(first, first + count), matrix.rows
    if rows >= len(matrix.codes):
        scale, rows = matrix.scale, count
    elif first % rows or count % rows:
        scale, rows = _scale_of_rows(matrix)[:, part], 1
    else:
        scale = matrix.scale[:, first // rows : (first + count) // rows]
    zero, factor = matrix.zero, matrix.factor
    return matrix._replace(
        codes=matrix.codes[part].clone(),
        scale=scale.contiguous(),
        zero=zero if zero is None else zero[:, part].contiguous(),
        rows=rows,
        factor=factor if factor is None else factor[part].clone(),
    )


def reordered_rows(matrix: NarrowMatrix, order: Tensor) -> NarrowMatrix:
    """The same with its outputs in this order. Shape: order [N]"""
    rows, scale = matrix.rows, matrix.scale
    in_order = order[::rows]
    blocks = in_order[:, None] + torch.arange(rows, device=order.device)
    if bool((in_order % rows == 0).all()) and torch.equal(blocks.flatten()[: len(order)], order):
        scale = scale[:, in_order // rows]
    else:  # outputs that share a scale do not stay together
        scale, rows = _scale_of_rows(matrix)[:, order], 1
    zero, factor = matrix.zero, matrix.factor
    return matrix._replace(
        codes=matrix.codes.view(torch.uint8)[order].view(matrix.codes.dtype),
        scale=scale.contiguous(),
        zero=zero if zero is None else zero[:, order].contiguous(),
        rows=rows,
        factor=factor if factor is None else factor[order],
    )


def columns_of(matrix: NarrowMatrix, first: int, count: int) -> NarrowMatrix:
    """A range of inputs: [N, count].

    Raises ValueError if the range cuts a group of inputs that share a scale, or if the inputs have
    an order.
    """
    group, scale, zero = matrix.group, _plain_scale(matrix), matrix.zero
    has_order = matrix.order is not None
    if reason := why_not_columns(matrix.num_in, group, first, count, has_order=has_order):
        raise ValueError(reason)
    if group < matrix.num_in:
        groups = slice(first // group, (first + count) // group)
        scale, zero = scale[groups], zero if zero is None else zero[groups].contiguous()
    return narrow_matrix(
        matrix.kind,
        _codes(matrix, slice(None))[:, first : first + count],
        scale,
        group=group,
        rows=matrix.rows,
        zero=zero,
        rounds_inputs=matrix.rounds_inputs,
        factor=matrix.factor,
    )


def why_not_columns(
    num_in: int, group: int, first: int, count: int, *, has_order: bool
) -> str | None:
    """Why a range of inputs cannot be taken out of a matrix; None: it can."""
    if has_order:
        return "its inputs have an order of their own (act-order, desc_act)"
    if group < num_in and (first % group or count % group):
        return f"{group} inputs share a scale, which {count} inputs would cut"
    return None


def round_to_fp8(weight: Tensor, *, rounds_inputs: bool = False) -> NarrowMatrix:
    """Round a plain matrix to e4m3, with a float32 scale for each output. Shape: [N, K]."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        plain = weight[part].float()
        scale[0, part] = plain.abs().amax(1).clamp_min(1e-12) / MAX_E4M3
        codes[part] = to_e4m3(plain / scale[0, part, None])
    return narrow_matrix("fp8", codes, scale, group=weight.shape[1], rounds_inputs=rounds_inputs)


def dequantise(matrix: NarrowMatrix, dtype: torch.dtype) -> Tensor:
    """The plain matrix, rounded once. Shape: [N, K]."""
    out = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    for first in range(0, len(out), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        values = _values(matrix, part)
        if matrix.order is None:
            out[part] = values
        else:
            out[part, matrix.order] = values.to(dtype)
    return out


def _values(matrix: NarrowMatrix, part: slice) -> Tensor:
    """The numbers of some rows, with columns in the order of the codes. Shape: [rows, K]."""
    values = _numbers(matrix, part)
    num_out = len(values)
    n = torch.arange(len(matrix.codes), device=values.device)[part]
    scale = _plain_scale(matrix).float()[:, n // matrix.rows]
    zero: Tensor | float = _NO_ZERO[matrix.kind]
    if matrix.zero is not None:
        zero = matrix.zero[:, part].float().t()[:, :, None]
    # The last group may be shorter.
    padded = F.pad(values, (0, -matrix.num_in % matrix.group)).view(num_out, -1, matrix.group)
    values = ((padded - zero) * scale.t()[:, :, None]).flatten(1)[:, : matrix.num_in]
    return values if matrix.factor is None else values * matrix.factor[part, None]


def _numbers(matrix: NarrowMatrix, part: slice) -> Tensor:
    """The codes of some rows as numbers, before zero and scale. Shape: [rows, K] float32."""
    codes = _codes(matrix, part)
    if matrix.kind not in ("fp4", "nvfp4"):
        return codes.float()
    return torch.tensor(e2m1.VALUES, device=codes.device)[codes.int()]


def _codes(matrix: NarrowMatrix, part: slice) -> Tensor:
    """The codes of some rows, one a number, in their order. Shape: [rows, K]."""
    chunk, half = matrix.chunk, matrix.half
    if matrix.rounds_inputs:
        return matrix.codes[part, : matrix.num_in]
    bytes_ = matrix.codes[part].view(torch.uint8)
    if matrix.kind in ("fp4", "nvfp4"):
        bytes_ = e2m1.unpack(bytes_.view(torch.int32)).view(torch.uint8)
    threads = bytes_.view(len(bytes_), -1, 4, chunk // 16, 2, 2).permute(0, 1, 3, 4, 2, 5)
    codes = threads.reshape(len(bytes_), -1)
    if not has_4_bits(matrix.kind):
        return codes.view(matrix.codes.dtype)[:, : matrix.num_in]
    codes = codes.view(len(codes), -1, 1, half)
    return torch.cat((codes & 15, codes >> 4), 2).flatten(1)[:, : matrix.num_in]
