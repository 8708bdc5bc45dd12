"""AWQ: 4 bits, groups of inputs with a scale and a zero point."""

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Read
from .base import group_of, unpacked

# The place of each of the eight outputs in a word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: awq`."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModelError(f"version is {version!r}, and only 'gemm' is read")
    if config.get("bits", 4) != 4:
        raise UnsupportedModelError(f"it has {config['bits']} bits, and only 4 are read")
    return _read


def _read(tensors: Checkpoint, layer: str) -> NarrowMatrix | None:
    if f"{layer}.qweight" not in tensors:
        return None
    if f"{layer}.qzeros" not in tensors:
        raise UnsupportedModelError(f"{layer} has no qzeros")
    codes = tensors.stored(f"{layer}.qweight")  # [K, N / 8]
    zero = tensors.stored(f"{layer}.qzeros")  # [groups, N / 8]
    scale = tensors.stored(f"{layer}.scales")  # [groups, N]
    codes, zero = (_in_order(unpacked(words, 4, dim=1)) for words in (codes, zero))
    group = group_of(len(codes), len(scale))
    return narrow_matrix("int4", codes.t(), scale, group=group, zero=zero.to(torch.int8))


def _in_order(numbers: Tensor) -> Tensor:
    """Shape: [.., N]"""
    places = torch.tensor(_PLACES, device=numbers.device)
    return numbers.view(len(numbers), -1, 8)[:, :, places].flatten(1)
