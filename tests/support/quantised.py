"""Tiny checkpoints in each quantised format, by formula, beside the plain model that they mean."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_models import with_stacked_experts
from torch import Tensor

# A layer's tensors by the ends of their names, and the matrix that they stand for.
Made = tuple[dict[str, Tensor], Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Format(NamedTuple):
    config: dict[str, Any]
    make: Callable[[Tensor], Made]
    inputs: Callable[[Tensor], Tensor] = lambda x: x  # as the quantised layers take them


_MIXTRAL = ("w1", "w2", "w3")  # linear layers of its experts


def quantise(plain: Path, folder: Path, name: str, *, leave: tuple[str, ...] = ()) -> Path:
    """Write the checkpoint of `plain` in a format to folder/"quantised", and the plain model that
    it means to folder/"meant". Layers whose names contain one of `leave` stay plain.
    """
    format_ = FORMATS[name]
    tensors = load_file(plain / "model.safetensors")
    quantised, meant = {}, dict(tensors)
    for key, tensor in tensors.items():
        layer = key.removesuffix(".weight")
        is_left = any(part in key for part in leave)
        last = layer.rpartition(".")[2]
        if tensor.ndim != 2 or not ("_proj" in last or last in _MIXTRAL) or is_left:
            quantised[key] = tensor
            continue
        made, meant[key] = format_.make(tensor)
        quantised |= {f"{layer}.{end}": value.contiguous() for end, value in made.items()}
    return _written(plain, folder, quantised, meant, format_.config)


def quantise_stacked(plain: Path, folder: Path, name: str) -> Path:
    """Like `quantise`, for experts alone, those of a layer in one tensor."""
    tensors = load_file(plain / "model.safetensors")
    quantised, meant = {}, dict(tensors)
    for key, tensor in with_stacked_experts(tensors).items():
        if key in tensors:
            quantised[key] = tensor
            continue
        experts, part = key.rsplit(".", 1)
        made = [FORMATS[name].make(matrix) for matrix in tensor]
        for end in made[0][0]:
            suffix = "" if end == "weight" else f"_{end}".replace("_weight_scale_inv", "_scale_inv")
            quantised[key + suffix] = torch.stack([each[end] for each, _ in made])
        for i, (_, matrix) in enumerate(made):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for one, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                meant[f"{experts}.{i}.{one}.weight"] = half.contiguous()
    return _written(plain, folder, quantised, meant, FORMATS[name].config)


def quantise_experts(plain: Path, folder: Path) -> Path:
    """Like `quantise`, for the experts of a gpt-oss: MXFP4 as it is published."""
    tensors = load_file(plain / "model.safetensors")
    quantised, meant = {}, dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith("bias"):  # zeros would hide errors
            quantised[key] = meant[key] = torch.randn(tensor.shape) / 4
            continue
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantised[key] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        codes = torch.randint(0, 16, (num_experts, num_out, num_in // 32, 32), dtype=torch.uint8)
        exponent = torch.randint(121, 125, codes.shape[:3], dtype=torch.uint8)
        matrix = E2M1[codes.int()] * (exponent.float() - 127).exp2()[..., None]
        meant[key] = matrix.flatten(2).transpose(1, 2).contiguous()
        quantised[f"{key}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        quantised[f"{key}_scales"] = exponent
    return _written(plain, folder, quantised, meant, {"quant_method": "mxfp4"})


def _written(
    plain: Path,
    folder: Path,
    quantised: dict[str, Tensor],
    meant: dict[str, Tensor],
    stated: dict[str, Any],
) -> Path:
    for kind, kept in (("quantised", quantised), ("meant", meant)):
        path = Path(shutil.copytree(plain, folder / kind))
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = stated
    (folder / "quantised/config.json").write_text(json.dumps(config))
    return folder / "quantised"


def fp8_of_tensor(weight: Tensor) -> Made:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_of_rows(weight: Tensor) -> Made:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_of_blocks(name: str, dtype: torch.dtype) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        num_out, num_in = weight.shape
        blocks = -(-num_out // 128), -(-num_in // 128)
        scale = torch.rand(blocks) * 0.01 + 0.001
        if dtype == torch.float8_e8m0fnu:
            scale = scale.log2().round().exp2()
        stored = scale.to(dtype)
        whole = stored.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        whole = whole[:num_out, :num_in]
        codes = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, name: stored}, codes.float() * whole

    return make


def grouped(weight: Tensor, bits: int, group: int, *, asymmetric: bool) -> tuple[Tensor, ...]:
    """Codes [N, K] of 0 to 2^bits - 1, scales and zero points [N, groups], float16 scales."""
    num_out, num_in = weight.shape
    parts = weight.view(num_out, -1, group)
    most = (1 << bits) - 1
    scale = (parts.abs().amax(2) * 2 / most).half()
    zero = torch.full(scale.shape, 1 << (bits - 1))
    if asymmetric:
        zero = torch.randint(0, most, scale.shape)
    codes = (parts / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, most)
    return codes.view(num_out, num_in).int(), scale, zero.int()


def meant_by(codes: Tensor, scale: Tensor, zero: Tensor, index: Tensor) -> Tensor:
    """Shape: [N, K], [N, groups], [N, groups], [K] the group of each input -> [N, K]"""
    return scale.float()[:, index] * (codes - zero[:, index])


def packed_along(numbers: Tensor, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """Numbers of the last dimension in int32 words, the first lowest, or by their places."""
    count = 32 // bits
    places = places or tuple(range(count))
    missing = -numbers.shape[-1] % count
    numbers = torch.nn.functional.pad(numbers, (0, missing)).unflatten(-1, (-1, count)).long()
    words = sum(numbers[..., i] << (bits * place) for i, place in enumerate(places))
    return torch.as_tensor(words).to(torch.int32)


def awq(weight: Tensor) -> Made:
    codes, scale, zero = grouped(weight, 4, 32, asymmetric=True)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    index = torch.arange(weight.shape[1]) // 32
    tensors = {
        "qweight": packed_along(codes.t(), 4, places),
        "qzeros": packed_along(zero.t(), 4, places),
        "scales": scale.t(),
    }
    return tensors, meant_by(codes, scale, zero, index)


def gptq(
    bits: int, group: int, *, asymmetric: bool, scattered: bool, added: int
) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        codes, scale, zero = grouped(weight, bits, group, asymmetric=asymmetric)
        if asymmetric and added:
            zero.clamp_(1)
        index = torch.arange(weight.shape[1]) // group
        if scattered:
            index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
        tensors = {
            "qweight": _down(codes.t(), bits),
            "qzeros": packed_along(zero.t() - added, bits),
            "scales": scale.t(),
            "g_idx": index.int(),
        }
        return tensors, meant_by(codes, scale, zero, index)

    return make


def _down(numbers: Tensor, bits: int) -> Tensor:
    """Words down the first dimension."""
    return packed_along(numbers.t(), bits).t()


def pack_quantized(bits: int, group: int | None, *, asymmetric: bool) -> Callable[[Tensor], Made]:
    def make(weight: Tensor) -> Made:
        size = group or weight.shape[1]
        codes, scale, zero = grouped(weight, bits, size, asymmetric=asymmetric)
        index = torch.arange(weight.shape[1]) // size
        tensors = {
            "weight_packed": packed_along(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if asymmetric:
            tensors["weight_zero_point"] = _down(zero, bits)
        return tensors, meant_by(codes, scale, zero, index)

    return make


def int8_of_rows(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def in_fp8(x: Tensor) -> Tensor:
    """Each row rounded to e4m3 by a scale of its own."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def in_fp8_by_128(x: Tensor) -> Tensor:
    return torch.cat([in_fp8(part) for part in x.split(128, -1)], -1)


def in_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def mxfp4(weight: Tensor) -> Made:
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    exponent = torch.randint(-6, -2, (len(weight), weight.shape[1] // 32))
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (exponent + 127).to(torch.uint8),
    }
    scale = exponent.float().exp2().repeat_interleave(32, 1)
    return tensors, E2M1[codes.int()] * scale


def nvfp4(*names: str, divides: bool) -> Callable[[Tensor], Made]:
    """`names`: of the codes, and of the factor."""

    def make(weight: Tensor) -> Made:
        groups = weight.unflatten(1, (-1, 16))
        factor = weight.abs().max() / 6 / 448
        scale = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
        whole = scale.float() * factor
        distance = groups[..., None] - E2M1 * whole[..., None, None]
        codes = distance.abs().argmin(-1).to(torch.uint8).flatten(1)
        codes, factor_name = codes[:, ::2] | codes[:, 1::2] << 4, names[1]
        tensors = {
            names[0]: codes,
            "weight_scale": scale,
            factor_name: 1 / factor if divides else factor,
        }
        plain = E2M1[torch.stack((codes & 15, codes >> 4), 2).flatten(1).int()]
        return tensors, plain * whole.repeat_interleave(16, 1)

    return make


def mxfp8(weight: Tensor) -> Made:
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2) / 448).log2().ceil()
    codes = (groups / exponent.exp2()[..., None]).to(torch.float8_e4m3fn).flatten(1)
    plain = codes.float() * exponent.exp2().repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": (exponent + 127).to(torch.uint8)}, plain


_MODELOPT_NVFP4 = nvfp4("weight", "weight_scale_2", divides=False)


def modelopt_mixed(weight: Tensor) -> Made:
    """Matrices that widen are in NVFP4, others in FP8: of the tensor, or of blocks."""
    if len(weight) > weight.shape[1]:
        return _MODELOPT_NVFP4(weight)
    if len(weight) < 100:
        tensors, plain = fp8_of_blocks("weight_scale", torch.float32)(weight)
        tensors["weight_scale"] = tensors["weight_scale"][:, None, :, None]
        return tensors, plain
    tensors, plain = fp8_of_tensor(weight)
    return {**tensors, "input_scale": torch.tensor(0.5)}, plain


def _compressed(
    format_: str, inputs: dict[str, object] | None = None, **weights: object
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _w8a8(format_: str, type_: str) -> dict[str, Any]:
    number: dict[str, object] = {"num_bits": 8, "type": type_}
    inputs = {**number, "dynamic": True, "strategy": "token", "symmetric": True}
    return _compressed(format_, inputs, **number)


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
FORMATS = {
    "fp8 of tensors": Format({"quant_method": "fp8"}, fp8_of_tensor),
    "fp8 of blocks": Format(_BLOCKS, fp8_of_blocks("weight_scale_inv", torch.float32)),
    "fp8 of blocks, e8m0": Format(
        {**_BLOCKS, "scale_fmt": "ue8m0"}, fp8_of_blocks("weight_scale_inv", torch.float8_e8m0fnu)
    ),
    "fp8 of blocks, inputs too": Format(
        {**_BLOCKS, "activation_scheme": "dynamic"},
        fp8_of_blocks("weight_scale_inv", torch.float32),
        in_fp8_by_128,
    ),
    "fp8 of tensors, inputs too": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_of_tensor, in_fp8
    ),
    "ct fp8 of rows, inputs too": Format(_w8a8("float-quantized", "float"), fp8_of_rows, in_fp8),
    "ct int8, inputs too": Format(_w8a8("int-quantized", "int"), int8_of_rows, in_int8),
    "ct fp8 of rows": Format(_compressed("float-quantized", num_bits=8), fp8_of_rows),
    "ct fp8 of blocks": Format(
        _compressed("float-quantized", strategy="block", block_structure=[128, 128]),
        fp8_of_blocks("weight_scale", torch.bfloat16),
    ),
    "ct int8": Format(_compressed("int-quantized"), int8_of_rows),
    "ct 4 bits": Format(_compressed("pack-quantized"), pack_quantized(4, 64, asymmetric=False)),
    "ct 4 bits, zero points": Format(
        _compressed("pack-quantized", symmetric=False), pack_quantized(4, 32, asymmetric=True)
    ),
    "ct 8 bits": Format(
        _compressed("pack-quantized", num_bits=8), pack_quantized(8, None, asymmetric=False)
    ),
    "ct 8 bits, zero points": Format(
        _compressed("pack-quantized", num_bits=8, symmetric=False),
        pack_quantized(8, 64, asymmetric=True),
    ),
    "ct mxfp4": Format(_compressed("mxfp4-pack-quantized"), mxfp4),
    "ct nvfp4": Format(
        _compressed("nvfp4-pack-quantized", num_bits=4),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, _MODELOPT_NVFP4
    ),
    "modelopt mxfp8": Format({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8),
    "modelopt mixed": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        },
        modelopt_mixed,
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "gptq": Format(_GPTQ, gptq(4, 32, asymmetric=False, scattered=False, added=1)),
    "gptq, zero points": Format(_GPTQ, gptq(4, 64, asymmetric=True, scattered=False, added=1)),
    "gptq, act-order": Format(
        {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, asymmetric=True, scattered=True, added=0),
    ),
    "gptq, 8 bits": Format(
        {**_GPTQ, "bits": 8}, gptq(8, 32, asymmetric=False, scattered=True, added=1)
    ),
}
