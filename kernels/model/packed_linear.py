"""Linear layers as a CPU reads them best: what makes few rows cheap.

torch's linear hands a plain weight to the BLAS at every call. Reordered once at load by oneDNN, the
same product took 0.5 of the time at one row and 0.2 to 0.5 at five (benchmarks/log/cpu.md), and the
rows of a verification are exactly such a few.

How oneDNN sums can hang on how many rows it is handed: one row, or more than 32, differ from the
rest on some machines. Which counts sum alike is found out at load, and rows are handed over in
such blocks alone: a row comes out the same to the bit in any company.

A draft may be rounded: whatever it proposes, the target decides. A weight of 8 bits and a scale a
row is a half of the bytes, and takes a third of the time at one row of a narrow layer.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHEAPEST_ROWS, _EXACT_ROWS = 4, 16
# Measured: with more rows, or longer ones, torch's product of 8-bit weights is behind oneDNN's.
_MAX_ROUNDED_ROWS = 4
_MAX_ROUNDED_INPUTS = 1024
# Row counts to hand over, if they sum as _CHEAPEST_ROWS do.
_BLOCKS = (512, 128, 64, 32, 28, 24, 20, *range(16, 3, -1))
_COMPARED = 100_000  # outputs; of those that are summed otherwise one in 10,000 comes out different
# oneDNN reads bfloat16 inputs by so many, and beyond the last where they are no multiple.
_INPUT_MULTIPLE = 32


class PackedWeight(NamedTuple):
    """The weight of a linear layer, [N, K]; with `scale`, that of rounded * scale[:, None]."""

    reordered: Tensor  # in oneDNN's layout; the integers where they are rounded, exact in bfloat16
    rounded: Tensor | None  # [N, K] int8
    scale: Tensor | None  # [N]
    blocks: tuple[int, ...] = ()  # row counts that sum alike, descending; (): it need not be alike


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`F.linear` over a packed weight. Shape: x [..., T, K] -> [..., T, N]."""
    rows = x.flatten(0, -2)
    if weight.rounded is None or weight.scale is None:
        out = _reordered_linear(rows, weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])
    if 0 < len(rows) <= _MAX_ROUNDED_ROWS:
        out = torch._weight_int8pack_mm(rows, weight.rounded, weight.scale)
    else:
        out = _reordered_linear(rows, weight, None).mul_(weight.scale)
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if bias is None else out.add_(bias)


def _reordered_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    num_rows = padded = len(rows)
    # To copy few rows takes as long as the product spares.
    if weight.blocks or num_rows > _EXACT_ROWS:
        padded = padded_rows(num_rows)
    is_whole = not weight.blocks or padded in weight.blocks
    if not is_whole:
        padded = -(-padded // _CHEAPEST_ROWS) * _CHEAPEST_ROWS
    num_missing = weight.reordered.shape[1] - rows.shape[1]
    if padded > num_rows or num_missing:
        rows = F.pad(rows, (0, num_missing, 0, padded - num_rows))
    if is_whole:
        return _product(rows, weight.reordered, bias)[:num_rows]
    out = rows.new_empty(padded, weight.reordered.shape[0])
    start = 0
    while start < padded:
        size = next(size for size in weight.blocks if size <= padded - start)
        block = slice(start, start + size)
        out[block] = _product(rows[block], weight.reordered, bias)
        start += size
    return out[:num_rows]


def _product(rows: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
    return out


def padded_rows(num_rows: int) -> int:
    """Rows to compute for `num_rows`: four at least, the same up to 16, then one of four steps an
    octave.

    Of one, two or three rows oneDNN takes up to a third longer than of four. It compiles and keeps
    most of a megabyte for every row count it meets, and a scheduler that mixes prefill with
    decoding meets them all.
    """
    if num_rows <= _EXACT_ROWS:
        return max(num_rows, _CHEAPEST_ROWS)
    step = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


@torch.inference_mode()
def pack_weight(weight: Tensor, *, rounds: bool = False) -> PackedWeight | None:
    """Reorder the weight of a linear layer; with `rounds`, round it to 8 bits where that pays.

    None where oneDNN lacks the dtype, this torch the operator, or the two disagree. Only without
    `rounds` does a row come out the same to the bit in any company. Shape: [N, K].
    """
    try:
        if rounds and weight.shape[1] <= _MAX_ROUNDED_INPUTS:
            packed, weight = _round(weight)
        else:
            packed = PackedWeight(_reorder(weight), None, None)
        if not all(_agrees(packed, weight, num_rows) for num_rows in (3, 5)):
            return None
        return packed if rounds else packed._replace(blocks=_alike(packed.reordered))
    except (RuntimeError, AttributeError):  # not built with oneDNN, or not for this dtype
        return None


def _reorder(weight: Tensor) -> Tensor:
    if weight.itemsize == 2:
        weight = F.pad(weight, (0, -weight.shape[1] % _INPUT_MULTIPLE))
    # No row count is hinted: layouts made for one count are reordered anew at another.
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return reordered


_alike_by_shape: dict[tuple[torch.Size, torch.dtype, int], tuple[int, ...]] = {}


def _alike(reordered: Tensor) -> tuple[int, ...]:
    """Which of _BLOCKS sum as _CHEAPEST_ROWS do with weights of this shape."""
    key = (reordered.shape, reordered.dtype, torch.get_num_threads())
    if key not in _alike_by_shape:
        num_out, num_in = reordered.shape
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(128, num_in, generator=generator).to(reordered.dtype)
        truth = _in_blocks(x, reordered, _CHEAPEST_ROWS)
        alike = [_CHEAPEST_ROWS]
        for size in sorted(_BLOCKS)[1:]:
            if size > len(x):
                x, truth = x.repeat(4, 1), truth.repeat(4, 1)
            rows = x[: max(size, min(len(x), _COMPARED // num_out)) // size * size]
            if torch.equal(_in_blocks(rows, reordered, size), truth[: len(rows)]):
                alike.append(size)
            elif size > _EXACT_ROWS:
                break
        _alike_by_shape[key] = tuple(reversed(alike))
    return _alike_by_shape[key]


def _in_blocks(rows: Tensor, reordered: Tensor, size: int) -> Tensor:
    return torch.cat([_product(block, reordered, None) for block in rows.split(size)])


def _round(weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """The weight in 8 bits, and the plain weight that this stands for."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-12).to(weight.dtype)
    rounded = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    integers = rounded.to(weight.dtype)
    return PackedWeight(_reorder(integers), rounded, scale), integers * scale[:, None]


def _agrees(packed: PackedWeight, weight: Tensor, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
    expected = F.linear(x, weight)
    # Both round: the result, by a few units of the last place of the largest, and float32 sums.
    of_sums = 2 * weight.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    relative = max(8 * torch.finfo(x.dtype).eps, of_sums)
    tolerance = relative * expected.abs().max().clamp_min(1e-6)
    return bool(((packed_linear(x, packed) - expected).abs() <= tolerance).all())
