"""Linear layers in oneDNN's own weight layout: what makes few rows cheap on a CPU.

torch's linear hands a plain weight to the BLAS at every call. Reordered once at load, the same
product took 0.5 of the time at one row and 0.2 to 0.5 at five (benchmarks/LOG.md), and the rows of
a verification are exactly such a few.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EXACT_ROWS = 16


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, its weight reordered by oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # No row count is hinted: layouts made for one count are reordered anew at another.
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[-2]
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed_weight, self.bias, "none", [], ""
        )
        return out[..., :num_rows, :]


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
def pack_linears(model: nn.Module) -> int:
    """Replace each plain linear layer by its packed form where that computes the same.

    Returns how many were replaced: none where oneDNN lacks the dtype or this torch the operator.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (packed := _pack(child)) is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _pack(linear: nn.Linear) -> PackedLinear | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, linear.in_features, generator=generator).to(linear.weight.dtype)
    try:
        packed = PackedLinear(linear)
        out = packed(x)
    except (RuntimeError, AttributeError):  # not built with oneDNN, or not for this dtype
        return None
    # Both round: the sums may differ by a few units of the last place of their largest term.
    expected = linear(x)
    tolerance = 8 * torch.finfo(x.dtype).eps * expected.abs().max().clamp_min(1e-6)
    return packed if bool(((out - expected).abs() <= tolerance).all()) else None
