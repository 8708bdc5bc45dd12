"""The config of a GGUF file's model: transformers', and what it does not read of the metadata."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from outrider.engine.models.gguf_file import GgufFile

_EPS = ("rms_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
# Metadata, and the fields that state it, of which a config has one: for others it keeps defaults.
_FIELDS = {
    "attention.layer_norm_epsilon": _EPS,
    "attention.layer_norm_rms_epsilon": _EPS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
# Gemmas scale scores by the width of a head, but those of 27B, known by their number of layers, by
# what the hidden states have for each head, as in llama.cpp: the metadata do not say.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Its heads have two widths and two kinds of RoPE, which are stated in other ways. What transformers
# does not read of its metadata must be what it takes for granted.
_GEMMA4 = "gemma4"
_GRANTED = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
}


def config_of(held: Path, file: "GgufFile", rope: dict[str, Any] | None) -> "PreTrainedConfig":
    """That of the file `held`; `rope` are the parameters of RoPE, if its tensors state them.

    Raises ValueError naming what the config of this architecture cannot state.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(held.parent, gguf_file=held.name)
    name = file.metadata["general.architecture"]
    if name == _GEMMA4:
        _check_granted(config, file)
    else:
        _state_sizes(config, file, name)
        _state_rope(config, file, name)
    if rope is not None:
        config.rope_parameters = rope
    return config


def _state_sizes(config: Any, file: "GgufFile", name: str) -> None:
    for key, fields in _FIELDS.items():
        value = file.metadata.get(f"{name}.{key}")
        field = next((field for field in fields if hasattr(config, field)), None)
        if value and field is not None:
            setattr(config, field, value)
        elif value and key.endswith("softcapping"):
            raise ValueError(f"it has {name}.{key} {value:g}, which a {config.model_type} lacks")
    # transformers has defaults of its own for some architectures; those of llama.cpp are these.
    stated = file.metadata.get(f"{name}.attention.key_length")
    config.head_dim = int(stated or config.hidden_size // config.num_attention_heads)
    if name in _LAYERS_OF_27B:
        is_27b = config.num_hidden_layers == _LAYERS_OF_27B[name]
        width = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = width


def _state_rope(config: Any, file: "GgufFile", name: str) -> None:
    whole = getattr(config, "rope_parameters", None) or {}
    stated = {
        "rope.freq_base": whole.get("full_attention", whole),
        "rope.freq_base_swa": whole.get("sliding_attention"),
    }
    for key, parameters in stated.items():
        if parameters and (theta := file.metadata.get(f"{name}.{key}")):
            parameters["rope_theta"] = theta
    head_dim = config.head_dim
    rotated = file.metadata.get(f"{name}.rope.dimension_count") or head_dim
    if "partial_rotary_factor" in whole:
        whole["partial_rotary_factor"] = rotated / head_dim
    elif whole and rotated != head_dim:
        raise ValueError(
            f"it has {name}.rope.dimension_count {rotated}, but heads of {head_dim}, which a "
            f"{config.model_type} rotates whole"
        )


def _check_granted(config: Any, file: "GgufFile") -> None:
    for key, field in _GRANTED.items():
        granted = getattr(config, field)
        stated = file.metadata.get(f"{_GEMMA4}.{key}", granted)
        if stated != granted:
            raise ValueError(
                f"it has {_GEMMA4}.{key} {stated}, which transformers takes to be {granted}; use "
                "the model's original directory or hub id instead"
            )
