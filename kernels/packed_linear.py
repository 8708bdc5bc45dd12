"""Linear layers in oneDNN's own weight layout: what makes few rows cheap on a CPU.

torch's linear hands a plain weight to the BLAS at every call. Reordered once at load, the same
product took 0.5 of the time at one row and 0.2 to 0.5 at five (benchmarks/LOG.md), and the rows of
a verification are exactly such a few.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_EXACT_ROWS = 16


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` over a weight from `pack_weight`. Shape: [..., T, K] -> [..., T, N]."""
    num_rows = x.shape[-2]
    padding = padded_rows(num_rows) - num_rows
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[..., :num_rows, :] if padding else out


def padded_rows(num_rows: int) -> int:
    """Rows to compute for `num_rows`: the same up to 16, then one of four steps an octave.

    oneDNN compiles and keeps most of a megabyte for every row count it meets, and a scheduler
    that mixes prefill with decoding meets them all.
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


@torch.inference_mode()
def pack_weight(weight: Tensor) -> Tensor | None:
    """The weight of a linear layer, reordered by oneDNN. Shape: [N, K].

    None where oneDNN lacks the dtype, this torch the operator, or the two disagree.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        # No row count is hinted: layouts made for one count are reordered anew at another.
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        out = packed_linear(x, packed)
    except (RuntimeError, AttributeError):  # not built with oneDNN, or not for this dtype
        return None
    # Both round: the sums may differ by a few units of the last place of their largest term.
    expected = F.linear(x, weight)
    tolerance = 8 * torch.finfo(x.dtype).eps * expected.abs().max().clamp_min(1e-6)
    return packed if bool(((out - expected).abs() <= tolerance).all()) else None
