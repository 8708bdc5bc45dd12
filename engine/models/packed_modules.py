"""Linear layers of a transformers model on a CPU, with weights that are reordered at load."""

import torch
from torch import Tensor, nn

from outrider.kernels.model.packed_linear import PackedWeight, pack_weight, packed_linear


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, with a weight from `pack_weight`."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed_weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed_weight, self.bias)


@torch.inference_mode()
def pack_linears(model: nn.Module, *, rounds: bool = False) -> int:
    """Replace each plain linear layer by a packed one that computes the same.

    With `rounds`, weights may be rounded to 8 bits. Returns how many layers were replaced: none if
    oneDNN lacks the dtype or this torch the operator.
    """
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may have another forward.
            if type(child) is not nn.Linear:
                continue
            packed = pack_weight(child.weight, rounds=rounds)
            if packed is not None:
                setattr(parent, name, PackedLinear(packed, child.bias))
                num_packed += 1
    return num_packed
