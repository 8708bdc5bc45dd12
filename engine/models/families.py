"""The model families whose structure we know, and how a checkpoint of each becomes a `Decoder`.

To add a family that is a Llama under another name, enter it in FAMILIES. For any other, write a
function from a checkpoint to a decoder, and the parts that it needs in `blocks.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider.kernels.model.rms_norm import Norm

from .any_checkpoint import AnyCheckpoint
from .attention import PagedAttention, Rope
from .blocks import AttentionMixer, Block, GatedMLP
from .decoder import Decoder

# The fields of a configuration that the code below implements.
_IMPLEMENTED = {
    "attention_bias",
    "attention_out_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
}
# Fields that do not change the forward pass.
_NEUTRAL = {
    *PreTrainedConfig().to_dict(),
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "residual_dropout",
    "rope_scaling",  # repeated in rope_parameters
    "rope_theta",  # likewise
    "tokenizer_class",
    "transformers.js_config",
    "unk_token_id",
    "use_cache",
}
# Fields from which transformers computes inv_freq and its scaling, which we take from there.
_ROPE = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # others depend on the sequence's length


def why_unknown(config: PreTrainedConfig) -> str | None:
    """Why `build` cannot build this model; None if it can."""
    if config.model_type not in FAMILIES:
        return "its architecture has no decoder here"
    told = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    given = {key for key, value in told.items() if value not in (None, False)}
    if unknown := sorted(given - _IMPLEMENTED - _NEUTRAL):
        return f"its config has {', '.join(unknown)}"
    rope = config.rope_parameters or {}
    if unknown := sorted(set(rope) - _ROPE):
        return f"its RoPE has {', '.join(unknown)}"
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _STATIC_ROPE:
        return f"its RoPE is {rope_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return None


def build(config: Any, checkpoint: AnyCheckpoint, rope: Rope) -> Decoder:
    """Build the decoder of a configuration for which `why_unknown` returns None.

    Raises KeyError naming a tensor that the checkpoint lacks.
    """
    return FAMILIES[config.model_type](config, checkpoint, rope)


def _llama(config: Any, checkpoint: AnyCheckpoint, rope: Rope) -> Decoder:
    """Pre-norm blocks of attention with RoPE and a gated MLP; with head norms if it has them."""

    def norm(name: str) -> Norm:
        return Norm(checkpoint.tensor(f"{name}.weight"), config.rms_norm_eps)

    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    no_rope = Rope(torch.zeros_like(rope.inv_freq), 1.0)  # rotates by 0 at every position
    has_rope = getattr(config, "no_rope_layers", None) or [True] * config.num_hidden_layers
    blocks = []
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        has_head_norms = f"{attention}.q_norm.weight" in checkpoint
        mixer = AttentionMixer(
            norm=norm(f"{layer}.input_layernorm"),
            qkv=checkpoint.linear(*(f"{attention}.{name}_proj" for name in "qkv")),
            output=checkpoint.linear(f"{attention}.o_proj"),
            attention=PagedAttention(
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                value_dim=head_dim,
                scale=head_dim**-0.5,
                window=_window(config, i),
                k_scale=_kv_scale(checkpoint, attention, "k"),
                v_scale=_kv_scale(checkpoint, attention, "v"),
            ),
            rope=rope if has_rope[i] else no_rope,
            head_norms=(norm(f"{attention}.q_norm"), norm(f"{attention}.k_norm"))
            if has_head_norms
            else None,
        )
        gated_mlp = GatedMLP(
            norm=norm(f"{layer}.post_attention_layernorm"),
            gate_up=checkpoint.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=checkpoint.linear(f"{mlp}.down_proj"),
        )
        blocks.append(Block(mixer, gated_mlp))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    head = checkpoint.head("lm_head", embedding if config.tie_word_embeddings else None)
    return Decoder(embedding, blocks, norm("model.norm"), head)


# What checkpoints call what keys and values in FP8 are multiplied by; the last is of both.
_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")


def _kv_scale(checkpoint: AnyCheckpoint, attention: str, which: str) -> float:
    """The scale of keys ("k") or values ("v") in pages of FP8; 1 if the checkpoint has none.

    Raises ValueError if heads have scales of their own.
    """
    names = [f"{attention}.{name.format(which)}" for name in _KV_SCALES]
    name = next((name for name in names if name in checkpoint), None)
    if name is None:
        return 1.0
    scale = checkpoint.stored(name)
    if scale.numel() != 1:
        raise ValueError(f"{name} has {scale.numel()} scales; one for all heads is read")
    return float(scale)


def _window(config: Any, layer: int) -> int | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


FAMILIES: dict[str, Callable[[Any, AnyCheckpoint, Rope], Decoder]] = {
    "cwm": _llama,
    "llama": _llama,
    "ministral": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "seed_oss": _llama,
    "smollm3": _llama,
}
