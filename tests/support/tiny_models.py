"""Tiny random models, saved as real model directories."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import outrider.engine.models.architectures  # noqa: F401 - registers those that transformers lacks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 97
Tiny = Callable[..., Path]  # `tiny_model(architecture, seed=…)` -> model directory
Quick = Callable[..., Path]  # `quick_model(seed, num_layers)` -> model directory
_HYBRID: dict[str, object] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, object] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
TINY: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "mimo": {"num_key_value_heads": 2, "head_dim": 16, "num_nextn_predict_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 16, "attention_out_bias": True},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "ministral3": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        # Queries are scaled from here on.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "olmo2": {"num_key_value_heads": 2},
    "olmo3": {
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "exaone4": {
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {},
    "gpt_neox": {},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _EXPERTS,
    "qwen3_next": _HYBRID
    | _EXPERTS
    | {"mlp_only_layers": [2], "shared_expert_intermediate_size": 40},
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
    },
    "mixtral": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "olmoe": {
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    },
    "granitemoe": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.4,
    },
    "granitemoehybrid": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 12,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 128,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.4,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "nemotron_h": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "linear_attention",
            "mlp",
        ],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 12,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-30,  # else transformers' own logits are wrong
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def save_tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    scale: float = 0.3,
    **overrides: object,
) -> Path:
    """A random model of a few thousand parameters with sharp enough logits that tokens differ."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        **TINY.get(architecture, {}),
        **overrides,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, scale, generator=generator)
            elif name.endswith("sinks"):
                parameter.normal_(0, 1, generator=generator)
            elif name.endswith(("A_log", "dt_bias")) or "linear_attention" in layer_types:
                parameter.normal_(0, scale, generator=generator)  # zeros would hide mistakes
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1, generator=generator)
    model.save_pretrained(path)
    return path


def change_config(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensor(
    model: Path, name: str, value: Tensor | Callable[[Tensor], Tensor] | None
) -> None:
    """Add a tensor, replace it, or remove it if the value is None."""
    tensors = load_file(model / "model.safetensors")
    old = tensors.pop(name, None)
    if callable(value):
        assert old is not None
        value = value(old)
    if value is not None:
        tensors[name] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def with_stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with those of a layer's experts in one, as some files have them."""
    found = dict(tensors)
    for name in [name for name in found if name.endswith("experts.0.gate_proj.weight")]:
        experts = name.removesuffix(".0.gate_proj.weight")
        num_experts = sum(other.startswith(experts) for other in found) // 3

        def each(part: str, experts: str = experts, num: int = num_experts) -> Tensor:
            return torch.stack([found.pop(f"{experts}.{i}.{part}.weight") for i in range(num)])

        gate_up = each("gate_proj"), each("up_proj")
        found[f"{experts}.gate_up_proj"] = torch.cat(gate_up, 1)
        found[f"{experts}.down_proj"] = each("down_proj")
    return found


def split_weights(model: Path, *, stale: Mapping[str, Tensor] = {}, has_index: bool = True) -> None:
    """Keep the weights in two files, of which the second also has the `stale` tensors."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {
        f"model-0000{i}-of-00002.safetensors": {name: tensors[name] for name in half}
        for i, half in ((1, names[::2]), (2, names[1::2]))
    }
    if has_index:
        weight_map = {name: file for file, part in files.items() for name in part}
        write_index(model, weight_map)
    files["model-00002-of-00002.safetensors"] |= stale
    for file, part in files.items():
        save_file(part, model / file, metadata={"format": "pt"})


def write_index(model: Path, weight_map: Mapping[str, str]) -> None:
    """As some tools write it: without metadata."""
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict(weight_map)}))
