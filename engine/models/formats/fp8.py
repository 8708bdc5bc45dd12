"""FP8 (e4m3), with one scale for the whole matrix, for each output, or for each block."""

from typing import Any

import torch

from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix

from .base import Read, Tensors, UnsupportedFormatError

# Checkpoints' names for the factor of the weights.
_SCALES = ("weight_scale_inv", "weight_scale")


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: fp8`. Activations are not quantised, whatever `activation_scheme` says."""
    block = config.get("weight_block_size")
    return lambda tensors, layer: read(tensors, layer, block)


def read(tensors: Tensors, layer: str, block: list[int] | None) -> NarrowMatrix | None:
    """`block`: how many outputs and inputs share a scale; None if scales are not for blocks."""
    if tensors.dtype_of(f"{layer}.weight") != torch.float8_e4m3fn:
        return None
    name = next((f"{layer}.{name}" for name in _SCALES if f"{layer}.{name}" in tensors), None)
    if name is None:
        raise UnsupportedFormatError(f"{layer} is in FP8 without a {' or '.join(_SCALES)}")
    codes, scale = tensors.stored(f"{layer}.weight"), tensors.stored(name)
    if scale.dtype.itemsize == 1:  # e8m0
        scale = scale.float()
    num_out, num_in = codes.shape
    if scale.numel() == 1:
        return narrow_matrix("fp8", codes, scale.view(1, 1), group=num_in, rows=num_out)
    if tuple(scale.shape) in ((num_out,), (num_out, 1)):
        return narrow_matrix("fp8", codes, scale.view(1, num_out), group=num_in)
    if block is None:
        raise UnsupportedFormatError(f"{layer} has scales of the shape {tuple(scale.shape)}")
    rows, group = block
    return narrow_matrix("fp8", codes, scale.t(), group=group, rows=rows)
