"""Tiny mixtures and hybrids as GGUF files, and the plain models that these mean."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tiny_gguf import encoded, write_out
from tiny_models import with_stacked_experts
from torch import Tensor

ARCHITECTURES = {
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.": "blk.", "self_attn.q_": "attn_q_", "self_attn.k_": "attn_k_",
    "self_attn.v_": "attn_v_", "self_attn.o_": "attn_output_", "attn_q_proj": "attn_q",
    "attn_k_proj": "attn_k", "attn_v_proj": "attn_v", "attn_output_proj": "attn_output",
    "input_layernorm": "attn_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.": "ffn_gate_inp.", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_MTP = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}  # fmt: skip
# Of these the file's tensors are float32.
_PLAIN = (
    "norm.weight", "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "gate_inp.weight",
    "gate_inp_shexp.weight",
)  # fmt: skip


def save_gguf(
    plain: Path,
    folder: Path,
    types: tuple[Type, ...],
    describe: Callable[[GGUFWriter], object] = lambda writer: None,
    **changes: Tensor | None,
) -> Path:
    """Write the model `plain` as a GGUF file into folder/"gguf", and the plain model that it means
    into folder/"meant". Its matrices take turns at the types; tensors of the file may be changed,
    added, or left out.
    """
    config = json.loads((plain / "config.json").read_text())
    tensors = with_stacked_experts(load_file(plain / "model.safetensors"))
    meant = dict(tensors)
    has_mtp = any(key.startswith("mtp.") for key in tensors)
    for kind in ("gguf", "meant"):
        shutil.copytree(plain, folder / kind)
    (folder / "gguf/model.safetensors").unlink()
    writer = GGUFWriter(folder / "gguf/model.gguf", ARCHITECTURES[config["model_type"]])
    writer.add_block_count(config["num_hidden_layers"] + has_mtp)
    writer.add_nextn_predict_layers(int(has_mtp))
    _describe(writer, config)
    describe(writer)
    added = {name: tensor for name, tensor in changes.items() if tensor is not None}
    matrices = 0
    for key, tensor in tensors.items():
        for name, part in _as_in_file(key, tensor, config):
            if name in changes and name not in added:
                continue
            values = added.pop(name, part).contiguous().numpy()
            if name.endswith(_PLAIN):
                writer.add_tensor(name, values)
                continue
            type_ = types[matrices % len(types)]
            matrices += 1
            rows = values.reshape(-1, values.shape[-1])
            data = encoded(type_, rows, seed=matrices)
            writer.add_tensor(name, data.reshape(*values.shape[:-1], -1), raw_dtype=type_)
            plain_values = torch.from_numpy(dequantize(data, type_).reshape(values.shape).copy())
            if values.shape == part.shape:
                _put_back(meant, key, name, plain_values, config)
    for name, tensor in added.items():
        writer.add_tensor(name, tensor.numpy())
    write_out(writer)
    save_file(meant, folder / "meant/model.safetensors", metadata={"format": "pt"})
    return folder / "gguf"


def _as_in_file(key: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors of one of the model's."""
    last = f"model.layers.{config['num_hidden_layers']}."
    name = key.replace("mtp.layers.0.", last)
    for ours, theirs in _MTP.items():
        name = name.replace(ours, f"{last}nextn.{theirs}")
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    is_hybrid = "linear_num_key_heads" in config
    if is_hybrid:
        name = name.replace("post_attention_layernorm", "post_attention_norm")
        if name.endswith("norm.weight") and "ssm_norm" not in name and tensor.ndim == 1:
            tensor = tensor + 1
        tensor = _tiled(key, tensor, config)
    name = name.replace("post_attention_layernorm", "ffn_norm")
    if name.endswith("ssm_a"):
        tensor = -tensor.exp()
    if name.endswith(("ssm_conv1d.weight", "ffn_gate_inp_shexp.weight")):
        tensor = tensor.squeeze()
    layer = name.partition("mlp.")[0]
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        yield f"{layer}ffn_gate_exps.weight", gate
        yield f"{layer}ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{layer}ffn_down_exps.weight", tensor
    else:
        end = "_shexp" if "shared_expert." in name else ""
        for part in ("gate", "up", "down"):
            for mlp in ("mlp.shared_expert.", "mlp."):
                name = name.replace(f"{mlp}{part}_proj", f"ffn_{part}{end}")
        yield name, tensor


def _order(config: dict[str, Any]) -> Tensor:
    """By the file's value head, ours."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    repeats = num_values // num_keys
    return torch.tensor([kh * repeats + j for j in range(repeats) for kh in range(num_keys)])


def _tiled(key: str, tensor: Tensor, config: dict[str, Any], *, back: bool = False) -> Tensor:
    heads = _order(config)
    if back:
        heads = heads.argsort()
    dim = config["linear_value_head_dim"]
    values = torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads.tolist()])
    num_others = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if "in_proj_qkv" in key or "conv1d" in key:
        return torch.cat((tensor[:num_others], tensor[num_others:][values]))
    if "in_proj_z" in key:
        return tensor[values]
    if key.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tensor[heads]
    return tensor[:, values] if "linear_attn.out_proj" in key else tensor


def _put_back(meant: dict[str, Tensor], key: str, name: str, values: Tensor, config: dict) -> None:
    if "linear_num_key_heads" in config:
        values = _tiled(key, values, config, back=True)
    if name.endswith(("gate_exps.weight", "up_exps.weight")):
        both = meant[key].clone()
        half = both.shape[1] // 2
        (both[:, half:] if "up_exps" in name else both[:, :half]).copy_(values)
        values = both
    meant[key] = values.contiguous()


def _num_experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])  # its older name


def _describe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(_num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "linear_num_key_heads" in config:
        num_values = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(num_values)
        writer.add_ssm_inner_size(num_values * config["linear_value_head_dim"])
        writer.add_full_attention_interval(2)
        writer.add_rope_dimension_count(config["head_dim"] // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
