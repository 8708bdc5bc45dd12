"""Linear layers as a CPU reads them best: what makes few rows cheap.

torch's linear hands a plain weight to the BLAS at every call. Reordered once at load by oneDNN, the
same product took 0.5 of the time at one row and 0.2 to 0.5 at five (benchmarks/LOG.md), and the
rows of a verification are exactly such a few.

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


class PackedWeight(NamedTuple):
    """The weight of a linear layer, [N, K]; with `scale`, that of rounded * scale[:, None]."""

    reordered: Tensor  # in oneDNN's layout; the integers where they are rounded, exact in bfloat16
    rounded: Tensor | None  # [N, K] int8
    scale: Tensor | None  # [N]


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`F.linear` over a packed weight. Shape: x [..., T, K] -> [..., T, N]."""
    if weight.rounded is None or weight.scale is None:
        return _reordered_linear(x, weight.reordered, bias)
    rows = x.flatten(0, -2)
    if 0 < len(rows) <= _MAX_ROUNDED_ROWS:
        out = torch._weight_int8pack_mm(rows, weight.rounded, weight.scale)
        out = out.view(*x.shape[:-1], out.shape[-1])
    else:
        out = _reordered_linear(x, weight.reordered, None).mul_(weight.scale)
    return out if bias is None else out.add_(bias)


def _reordered_linear(x: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.shape[-2]
    # To copy few rows takes as long as the product spares.
    padding = padded_rows(num_rows) - num_rows if num_rows > _EXACT_ROWS else 0
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return out[..., :num_rows, :] if padding else out


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

    None where oneDNN lacks the dtype, this torch the operator, or the two disagree.
    Shape: [N, K].
    """
    try:
        if rounds and weight.shape[1] <= _MAX_ROUNDED_INPUTS:
            packed, weight = _round(weight)
        else:
            packed = PackedWeight(_reorder(weight), None, None)
        agrees = all(_agrees(packed, weight, num_rows) for num_rows in (3, 5))
    except (RuntimeError, AttributeError):  # not built with oneDNN, or not for this dtype
        return None
    return packed if agrees else None


def _reorder(weight: Tensor) -> Tensor:
    # No row count is hinted: layouts made for one count are reordered anew at another.
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return reordered


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
    # Both round: the sums may differ by a few units of the last place of their largest term.
    tolerance = 8 * torch.finfo(x.dtype).eps * expected.abs().max().clamp_min(1e-6)
    return bool(((packed_linear(x, packed) - expected).abs() <= tolerance).all())
