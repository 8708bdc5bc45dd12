"""ModelOpt: each layer in NVFP4, in FP8 or plain, also several in one checkpoint (MIXED_PRECISION).

A layer's tensors say which: the lists in configurations forget some. Inputs are not rounded.
"""

from typing import Any

import torch

from outrider.kernels.model.narrow_matrix import NarrowMatrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Read
from . import fp8, nvfp4

_ALGORITHMS = {
    "FP8", "FP8_BLOCK_SCALES", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "MXFP8",
    "NVFP4", "W4A16_NVFP4",
}  # fmt: skip
_BLOCK = [128, 128]


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: modelopt`, or the file hf_quant_config.json."""
    config = {**config, **config.get("quantization", {})}
    each = {"the model": config, **(config.get("quantized_layers") or {})}
    for name, settings in each.items():
        algorithm = settings.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise UnsupportedModelError(
                f"quant_algo of {name} is {algorithm}; {', '.join(sorted(_ALGORITHMS))} are read"
            )
    return _read


def _read(tensors: Checkpoint, layer: str) -> NarrowMatrix | None:
    if f"{layer}.pre_quant_scale" in tensors:
        raise UnsupportedModelError(f"{layer} scales its inputs (pre_quant_scale)")
    dtype = tensors.view(f"{layer}.weight").dtype
    if dtype == torch.uint8:
        return nvfp4.read(tensors, layer, codes="weight", factor="weight_scale_2", divides=False)
    return fp8.read(tensors, layer, _BLOCK)
