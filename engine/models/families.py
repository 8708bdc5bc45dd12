"""The model families whose structure we know, and how a checkpoint of each becomes a `Decoder`.

To add a family that is a Llama under another name, enter it in FAMILIES. If its layers differ,
write a subclass of LlamaReader, as in `gpt_oss.py`, and the parts that it needs in `blocks.py`.
"""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig

from .architectures import STATIC_ROPE
from .attention import Rope
from .checkpoint import EMBEDDING, AnyCheckpoint, check_shape
from .decoder import Decoder
from .gpt_oss import GptOssReader
from .llama import LlamaReader

# The declared fields of a configuration that the code below implements.
_IMPLEMENTED = {
    "attention_bias", "attention_out_bias", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias",
    "no_rope_layer_interval", "no_rope_layers", "num_attention_heads", "num_experts_per_tok",
    "num_hidden_layers", "num_key_value_heads", "num_local_experts", "rms_norm_eps",
    "rope_parameters", "sliding_window", "swiglu_alpha", "swiglu_limit", "tie_word_embeddings",
    "use_sliding_window", "vocab_size",
}  # fmt: skip
# Declared fields that do not change the forward pass.
_NEUTRAL = {
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range",
    "output_router_logits", "pad_token_id", "pretraining_tp", "residual_dropout",
    "router_aux_loss_coef", "use_cache",
}  # fmt: skip
# Fields from which transformers computes inv_freq and its scaling, which we take from there.
_ROPE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_theta", "rope_type",
    "truncate", "type",
}  # fmt: skip


def why_unknown(config: PreTrainedConfig) -> str | None:
    """Why `build` cannot build this model; None if it can."""
    if config.model_type not in FAMILIES:
        return "its architecture has no decoder here"
    given = {name for name, value in _declared(config).items() if value not in (None, False)}
    if unknown := sorted(given - _IMPLEMENTED - _NEUTRAL):
        return f"its config has {', '.join(unknown)}"
    rope = config.rope_parameters or {}
    if unknown := sorted(set(rope) - _ROPE):
        return f"its RoPE has {', '.join(unknown)}"
    rope_type = rope.get("rope_type", "default")
    if rope_type not in STATIC_ROPE:
        return f"its RoPE is {rope_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return None


def _declared(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that the class of this configuration adds to those of all models.

    transformers' code for the model reads only these; a config.json may have others.
    """
    common = {field.name for field in fields(PreTrainedConfig)}
    names = {field.name for field in fields(config)} - common
    return {name: getattr(config, name) for name in names}


def build(config: Any, checkpoint: AnyCheckpoint) -> Decoder:
    """Build the decoder of a configuration for which `why_unknown` returns None.

    As in transformers, a head in the file that differs from the embedding is not tied to it; the
    configuration says so from then on.

    Raises KeyError naming a tensor that the checkpoint lacks, ValueError naming a wrong shape.
    """
    reader = FAMILIES[config.model_type](checkpoint, config)
    rope = reader.rope()
    no_rope = Rope(torch.zeros_like(rope.inv_freq), 1.0)  # rotates by 0 at every position
    declared = SimpleNamespace(**_declared(config))
    has_rope = getattr(declared, "no_rope_layers", None) or [True] * config.num_hidden_layers
    blocks = [
        reader.block(
            f"model.layers.{i}", rope if has_rope[i] else no_rope, window=window_of(declared, i)
        )
        for i in range(config.num_hidden_layers)
    ]
    shape = config.vocab_size, config.hidden_size
    embedding = checkpoint.tensor(f"{EMBEDDING}.weight")
    check_shape(f"{EMBEDDING}.weight", embedding.shape, shape)
    if config.tie_word_embeddings and "lm_head.weight" in checkpoint:
        config.tie_word_embeddings = torch.equal(checkpoint.tensor("lm_head.weight"), embedding)
    if config.tie_word_embeddings:
        head = checkpoint.tied(embedding)
    else:
        head = checkpoint.linear(config.hidden_size, lm_head=config.vocab_size)
    return Decoder(embedding, blocks, reader.norm("model.norm"), head)


def window_of(config: Any, layer: int) -> int | None:
    """How many tokens a row of this layer attends to, its own included; None: all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


# By model type, the class that reads its layers.
FAMILIES: dict[str, type[LlamaReader]] = {
    "cwm": LlamaReader,
    "gpt_oss": GptOssReader,
    "llama": LlamaReader,
    "mimo": LlamaReader,
    "ministral": LlamaReader,
    "mistral": LlamaReader,
    "qwen2": LlamaReader,
    "qwen3": LlamaReader,
    "seed_oss": LlamaReader,
    "smollm3": LlamaReader,
}
