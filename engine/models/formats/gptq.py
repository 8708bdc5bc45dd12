"""GPTQ: 4 or 8 bits, with groups of inputs that need not be neighbours (act-order)."""

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.narrow_matrix import NarrowMatrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Read
from .base import matrix_of_integers, unpacked


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: gptq`."""
    layout = str(config.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(f"checkpoint_format is {layout!r}, not gptq or gptq_v2")
    # The first version stores zero points minus one.
    added, has_order = int(layout == "gptq"), config.get("desc_act") is True
    return lambda tensors, layer: _read(tensors, layer, added, has_order=has_order)


def _read(tensors: Checkpoint, layer: str, added: int, *, has_order: bool) -> NarrowMatrix | None:
    if f"{layer}.qweight" not in tensors:
        return None
    if has_order and f"{layer}.g_idx" not in tensors:
        raise UnsupportedModelError(f"{layer} has no g_idx, though desc_act is true")
    words = tensors.stored(f"{layer}.qweight")  # [K * bits / 32, N]
    scale = tensors.stored(f"{layer}.scales")  # [groups, N]
    zero_words = tensors.stored(f"{layer}.qzeros")  # [groups, N * bits / 32]
    bits = 32 * zero_words.shape[1] // scale.shape[1]
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{layer} has {bits} bits; 4 and 8 are read")
    codes, stored = unpacked(words, bits, dim=0).t(), unpacked(zero_words, bits, dim=1)
    if stored.shape != scale.shape:
        raise ValueError(f"its zero points have the shape {tuple(stored.shape)}")
    zero = _zero(stored, bits, added, layer)
    return matrix_of_integers(tensors, f"{layer}.g_idx", codes, bits, scale, zero=zero)


def _zero(stored: Tensor, bits: int, added: int, layer: str) -> Tensor | None:
    """Zero points in our representation; None if all are in the middle."""
    middle = 1 << (bits - 1)
    zero = stored.to(torch.int16) + added
    if bool((zero == middle).all()):
        return None
    if bool((zero == 1 << bits).any()):
        raise UnsupportedModelError(
            f"{layer} has a zero point of {1 << bits}, which other programs read as 0"
        )
    return (zero - (middle if bits == 8 else 0)).to(torch.int8)
