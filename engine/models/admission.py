"""Which models are served, in which dtype and to which length; refuses what would go wrong."""

import contextlib
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ..config import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Blocks that are an MLP alone.
MLP_LAYER_TYPES = {"mlp", "moe"}
# Whose state only our own decoder keeps.
STATEFUL_LAYER_TYPES = {"linear_attention"}

# These would call our attention, but need a mask that it does not get, or call it in another way.
REFUSED_MODEL_TYPES = {
    "llama4": "its chunked attention lives in the mask",
    "llama4_text": "its chunked attention lives in the mask",
    "doge": "it builds a dynamic mask of its own",
    "diffllama": "it calls attention twice a layer",
    "stablelm": "it drops attention arguments",
}
# transformers has their sliding window, if it is on, in the mask alone.
WINDOW_IN_MASK = {"moshi", "phimoe", "qwen2_moe"}


class UnsupportedModelError(ConfigError):
    """The model, or the format of its weights, would not run correctly; the message says why."""


def resolve_dtype(name: str, hf_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to run in; "auto" is the checkpoint's on CUDA and the faster one on a CPU."""
    if name != "auto":
        if name not in DTYPES:
            raise UnsupportedModelError(f"dtype is {name!r}; it may be auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    checkpoint_dtype = hf_config.get_text_config().dtype
    return checkpoint_dtype if isinstance(checkpoint_dtype, torch.dtype) else torch.bfloat16


def _cpu_has_bfloat16() -> bool:
    # Without these instructions bfloat16 is emulated, several times slower than float32.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(line.split())
    return False


def check_config(hf_config: PreTrainedConfig) -> None:
    """Refuse a model by its configuration; raises UnsupportedModelError."""
    if reason := REFUSED_MODEL_TYPES.get(hf_config.model_type):
        raise UnsupportedModelError(reason)
    text_config = hf_config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if unknown := layer_types - LAYER_TYPES - MLP_LAYER_TYPES - STATEFUL_LAYER_TYPES:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(unknown))}")
    rope_types = _rope_types(text_config)
    if "dynamic" in rope_types:
        raise UnsupportedModelError("its dynamic RoPE depends on the whole batch")


def keeps_state(hf_config: PreTrainedConfig) -> bool:
    """Whether some layers look at other tokens through a state."""
    layer_types = getattr(hf_config.get_text_config(), "layer_types", None) or ()
    return not STATEFUL_LAYER_TYPES.isdisjoint(layer_types)


def check_masks(hf_config: PreTrainedConfig) -> None:
    """Refuse a model that transformers' code would compute wrongly without a mask.

    Raises UnsupportedModelError.
    """
    text_config = hf_config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    has_window = getattr(text_config, "sliding_window", None) is not None
    if layer_types:
        has_window = "sliding_attention" in layer_types
    if hf_config.model_type in WINDOW_IN_MASK and has_window:
        raise UnsupportedModelError("its sliding window lives in the mask")


def max_positions(hf_config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, that the model computes correctly in every batch."""
    text_config = hf_config.get_text_config()
    longest = int(text_config.max_position_embeddings)
    if "longrope" in _rope_types(text_config):
        # Beyond this, one long sequence changes the factors of all others in its batch.
        rope = text_config.rope_parameters
        original = getattr(text_config, "original_max_position_embeddings", None) or rope.get(
            "original_max_position_embeddings"
        )
        longest = min(longest, int(original or longest))
    return longest


def checked_starts(hf_config: PreTrainedConfig, length: int) -> list[int]:
    """Positions at which the load-time comparison starts its prompts of `length` tokens.

    Near and far, because some models scale with the position: everywhere, or beyond the length of
    their training, or beyond the length from which RoPE was stretched.
    """
    text_config = hf_config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    original = int(rope.get("original_max_position_embeddings") or 0)
    last = max_positions(hf_config) - length
    return sorted({0, *(start for start in (original, last // 2, last) if 0 < start <= last)})


def _rope_types(text_config: PreTrainedConfig) -> set[str]:
    rope = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {str(r.get("rope_type", "default")) for r in by_layer_type or [rope]}
