"""FP8 (e4m3), with one scale for the whole matrix, for each output, or for each block.

Plain layers may also be rounded to it here.
"""

from collections.abc import Collection
from typing import Any

import torch

from outrider.kernels.model.narrow_matrix import STEP, NarrowMatrix, narrow_matrix, round_to_fp8

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Read

_MXFP8_GROUP = 32  # inputs that share a power of two
# Checkpoints' names for the factor of the weights.
_SCALES = ("weight_scale_inv", "weight_scale")
# The last part of the names of layers that choose experts, or weight them.
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: fp8`. Inputs are rounded if `activation_scheme` is `dynamic`.

    That is a scale for each row or, if the weights have blocks, for each row of a block.
    """
    block = config.get("weight_block_size")
    is_dynamic = config.get("activation_scheme") == "dynamic"
    return lambda tensors, layer: read(tensors, layer, block, rounds_inputs=is_dynamic)


def rounding(
    *, rounds_inputs: bool, leaves_out: Collection[str] = (), unless: Read | None = None
) -> Read:
    """Rounds plain layers to FP8 when they are read, all but those that are left out, and routers:
    a choice of other experts changes much, and their bytes are few.

    `unless` reads the layers that are quantised already.
    """

    def read(tensors: Checkpoint, layer: str) -> NarrowMatrix | None:
        if layer in leaves_out:
            return None
        if unless is not None and (quantised := unless(tensors, layer)) is not None:
            return quantised
        if layer.rpartition(".")[2] in _ROUTERS:
            return None
        return round_to_fp8(tensors.stacked(f"{layer}.weight"), rounds_inputs=rounds_inputs)

    return read


def read(
    tensors: Checkpoint, layer: str, block: list[int] | None, *, rounds_inputs: bool = False
) -> NarrowMatrix | None:
    """`block`: how many outputs and inputs share a scale; None if scales are not for blocks."""
    if tensors.view(f"{layer}.weight").dtype != torch.float8_e4m3fn:
        return None
    name = next((f"{layer}.{name}" for name in _SCALES if f"{layer}.{name}" in tensors), None)
    if name is None:
        raise UnsupportedModelError(f"{layer} is in FP8 without a {' or '.join(_SCALES)}")
    codes, scale = tensors.stored(f"{layer}.weight"), tensors.stored(name)
    if scale.dtype == torch.uint8:  # MXFP8
        scale, block = scale.view(torch.float8_e8m0fnu), [1, _MXFP8_GROUP]
    if scale.ndim == 4:  # [blocks of outputs, 1, blocks of inputs, 1]
        scale = scale[:, 0, :, 0]
    if scale.dtype.itemsize == 1:  # e8m0
        scale = scale.float()
    num_out, num_in = codes.shape
    if scale.numel() == 1:
        group, rows, scale = num_in, num_out, scale.view(1, 1)
    elif tuple(scale.shape) in ((num_out,), (num_out, 1)):
        group, rows, scale = num_in, 1, scale.view(1, num_out)
    elif block is not None:
        rows, group = block
        scale = scale.t()
    else:
        raise UnsupportedModelError(f"{layer} has scales of the shape {tuple(scale.shape)}")
    is_served = group >= num_in or (group >= STEP and group.bit_count() == 1)
    rounds_inputs = rounds_inputs and is_served
    return narrow_matrix("fp8", codes, scale, group=group, rows=rows, rounds_inputs=rounds_inputs)
