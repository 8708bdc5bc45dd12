"""compressed-tensors: FP8, integers of 4 and 8 bits, MXFP4, NVFP4."""

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.model.expert_matrix import MXFP4_GROUP
from outrider.kernels.model.narrow_matrix import NarrowMatrix, narrow_matrix

from ..admission import UnsupportedModelError
from ..checkpoint import Checkpoint, Read
from . import fp8, nvfp4
from .base import group_of, matrix_of_integers, signed, unpacked

_FORMATS = {
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
}  # fmt: skip


def reader(config: dict[str, Any]) -> Read:
    """`quant_method: compressed-tensors`.

    Inputs are rounded if the recipe finds a scale for each row. Other recipes for inputs (one scale
    for all rows, or scales from the checkpoint) are left out.
    """
    groups = (config.get("config_groups") or {}).values()
    for name in (config.get("format"), *(group.get("format") for group in groups)):
        if name is not None and name not in _FORMATS:
            raise UnsupportedModelError(
                f"format is {name!r}; {', '.join(sorted(_FORMATS))} are read"
            )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(f"its weights are sparse ({sparsity})")
    if config.get("transform_config"):
        raise UnsupportedModelError("its activations are rotated (transform_config)")
    blocks = {
        tuple(group["weights"]["block_structure"])
        for group in groups
        if (group.get("weights") or {}).get("block_structure")
    }
    if len(blocks) > 1:
        raise UnsupportedModelError(f"its blocks have several sizes: {sorted(blocks)}")
    block = list(blocks.pop()) if blocks else None
    rounded = {kind for group in groups if (kind := _rounded_inputs(group)) is not None}
    weights = [group.get("weights") or {} for group in groups]
    needed = {}  # by integers
    if weights and all(of.get("symmetric") is False for of in weights):
        needed["weight_zero_point"] = "its config says that it is not symmetric"
    if weights and all(of.get("actorder") == "group" for of in weights):
        needed["weight_g_idx"] = "its config says that groups are not in order (actorder)"
    return lambda tensors, layer: _read(tensors, layer, block, rounded, needed)


def _rounded_inputs(group: dict[str, Any]) -> str | None:
    """`float` or `int`, if these weights' inputs are rounded to 8 bits, each row by itself."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    by_row = inputs.get("strategy") == "token" or (
        inputs.get("strategy") == "group" and weights.get("strategy") == "block"
    )
    is_alike = weights.get("type") == inputs.get("type")
    has_8_bits = weights.get("num_bits") == inputs.get("num_bits") == 8
    if not (inputs.get("dynamic") and by_row and is_alike and has_8_bits):
        return None
    return str(inputs["type"]) if inputs.get("symmetric", True) else None


def _read(
    tensors: Checkpoint,
    layer: str,
    block: list[int] | None,
    rounded: set[str],
    needed: dict[str, str],
) -> NarrowMatrix | None:
    if f"{layer}.weight_packed" in tensors:
        if tensors.view(f"{layer}.weight_packed").dtype == torch.uint8:
            return _read_e2m1(tensors, layer)
        for name, why in needed.items():
            if f"{layer}.{name}" not in tensors:
                raise UnsupportedModelError(f"{layer} has no {name}, though {why}")
        return _read_packed(tensors, layer)
    if tensors.view(f"{layer}.weight").dtype == torch.int8:
        return _read_int8(tensors, layer, rounds_inputs="int" in rounded)
    return fp8.read(tensors, layer, block, rounds_inputs="float" in rounded)


def _read_packed(tensors: Checkpoint, layer: str) -> NarrowMatrix:
    """Integers packed into words along the inputs, zero points along the outputs."""
    words = tensors.stored(f"{layer}.weight_packed")
    num_out, num_in = tensors.stored(f"{layer}.weight_shape").long().tolist()
    bits = next((bits for bits in (4, 8) if words.shape[1] == -(-num_in * bits // 32)), None)
    if bits is None:
        raise UnsupportedModelError(f"{layer} has neither 4 nor 8 bits")
    codes = unpacked(words, bits, dim=1)[:, :num_in]
    rows, scale = _scales(tensors, layer, num_out)
    zero = None
    if f"{layer}.weight_zero_point" in tensors:
        zero = unpacked(tensors.stored(f"{layer}.weight_zero_point"), bits, dim=0)[:num_out].t()
        zero = (zero if bits == 4 else signed(zero.contiguous())).to(torch.int8).contiguous()
    index = f"{layer}.weight_g_idx"
    return matrix_of_integers(tensors, index, codes, bits, scale, rows=rows, zero=zero)


def _read_int8(tensors: Checkpoint, layer: str, *, rounds_inputs: bool) -> NarrowMatrix:
    if f"{layer}.weight_zero_point" in tensors:
        raise UnsupportedModelError(f"{layer} is in whole bytes with zero points")
    codes = tensors.stored(f"{layer}.weight")
    num_out, num_in = codes.shape
    rows, scale = _scales(tensors, layer, num_out)
    group = group_of(num_in, len(scale))
    rounds_inputs = rounds_inputs and group == num_in
    return narrow_matrix("int8", codes, scale, group=group, rows=rows, rounds_inputs=rounds_inputs)


def _scales(tensors: Checkpoint, layer: str, num_out: int) -> tuple[int, Tensor]:
    """How many outputs share a scale, and the scales: [groups, N / rows].

    Raises ValueError if outputs have different numbers of them.
    """
    scale = tensors.stored(f"{layer}.weight_scale")
    rows = num_out if scale.numel() == 1 else 1
    if scale.numel() % (num_out // rows):
        found = " x ".join(map(str, scale.shape))
        raise ValueError(f"it has {num_out} outputs, and {found} scales")
    return rows, scale.view(num_out // rows, -1).t()


def _read_e2m1(tensors: Checkpoint, layer: str) -> NarrowMatrix:
    """NVFP4 if scales are in FP8, else MXFP4."""
    if tensors.view(f"{layer}.weight_scale").dtype == torch.float8_e4m3fn:
        return nvfp4.read(
            tensors, layer, codes="weight_packed", factor="weight_global_scale", divides=True
        )
    pairs = tensors.stored(f"{layer}.weight_packed")  # [N, K / 2], even inputs low
    codes = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
    exponent = tensors.stored(f"{layer}.weight_scale").view(torch.uint8).float() - 127
    return narrow_matrix("fp4", codes, exponent.exp2().bfloat16().t(), group=MXFP4_GROUP)
