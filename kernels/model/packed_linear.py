"""Linear layers on a CPU, made fast for few rows.

torch's linear passes a plain weight to the BLAS at every call. If oneDNN reorders the weight once
at load, the same product takes half the time at one row, and 0.2 to 0.5 of it at five
(benchmarks/log/cpu.md). Verification has just that many rows.

oneDNN's order of summation can depend on the number of rows: on some machines one row, or more than
32, are summed differently from the rest. At load we find out which numbers of rows sum alike, and
then pass rows in blocks of these sizes only. So the bits of a row do not depend on the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHEAPEST_ROWS, _EXACT_ROWS = 4, 16
# Block sizes to use if they sum as _CHEAPEST_ROWS rows do.
_BLOCKS = (512, 128, 64, 32, 28, 24, 20, *range(16, 3, -1))
_COMPARED = 100_000  # outputs: summed in another order, about one in 10,000 differs
# oneDNN reads this many bfloat16 inputs at a time, even beyond the last one.
_INPUT_MULTIPLE = 32


class PackedWeight(NamedTuple):
    """The weight of a linear layer, [N, K]."""

    reordered: Tensor  # in oneDNN's layout
    blocks: tuple[int, ...]  # sizes of blocks of rows that sum alike, descending


def packed_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`F.linear` over a packed weight. Shape: [T, K] -> [T, N]."""
    num_rows = len(rows)
    padded = padded_rows(num_rows)
    is_whole = padded in weight.blocks
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
        left = padded - start  # others might leave fewer rows than the smallest block has
        size = next(n for n in weight.blocks if n <= left and n % _CHEAPEST_ROWS == 0)
        block = slice(start, start + size)
        out[block] = _product(rows[block], weight.reordered, bias)
        start += size
    return out[:num_rows]


def _product(rows: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
    return out


def padded_rows(num_rows: int) -> int:
    """Number of rows to compute instead of `num_rows`.

    At least four; unchanged up to 16; then one of four sizes for each doubling. oneDNN takes up to
    a third longer for one to three rows than for four. It also compiles a kernel, of almost a
    megabyte, for every number of rows it meets, and mixing prefill with decoding meets them all.
    """
    if num_rows <= _EXACT_ROWS:
        return max(num_rows, _CHEAPEST_ROWS)
    step = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


@torch.inference_mode()
def pack_weight(weight: Tensor) -> PackedWeight | None:
    """Reorder the weight of a linear layer.

    None if oneDNN lacks the dtype, this torch the operator, or the results disagree. Shape: [N, K].
    """
    try:
        reordered = _reorder(weight)
        packed = PackedWeight(reordered, _alike(reordered))
        return packed if all(_agrees(packed, weight, num_rows) for num_rows in (3, 5)) else None
    except (RuntimeError, AttributeError):  # torch lacks oneDNN, or oneDNN this dtype
        return None


def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype on this processor.

    With AVX2 alone, for one, it has none of bfloat16.
    """
    return pack_weight(torch.eye(_INPUT_MULTIPLE, dtype=dtype)) is not None


def _reorder(weight: Tensor) -> Tensor:
    if weight.itemsize == 2:
        weight = F.pad(weight, (0, -weight.shape[1] % _INPUT_MULTIPLE))
    # No number of rows is given: a layout for one number would be reordered again for another.
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return reordered


_alike_by_shape: dict[tuple[torch.Size, torch.dtype, int], tuple[int, ...]] = {}


def _alike(reordered: Tensor) -> tuple[int, ...]:
    """Which of _BLOCKS sum as _CHEAPEST_ROWS rows do, for weights of this shape."""
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


def _agrees(packed: PackedWeight, weight: Tensor, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
    expected = F.linear(x, weight)
    # Both round: the result, by a few units in the last place of the largest, and float32 sums.
    of_sums = 2 * weight.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    relative = max(8 * torch.finfo(x.dtype).eps, of_sums)
    tolerance = relative * expected.abs().max().clamp_min(1e-6)
    return bool(((packed_linear(x, packed) - expected).abs() <= tolerance).all())
