"""Which models are served, in which dtype and to which length; refuses what would go wrong."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Blocks that are an MLP alone.
MLP_LAYER_TYPES = {"mlp", "moe"}
# Whose state only our own decoder keeps.
STATEFUL_LAYER_TYPES = {"linear_attention"}

_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # how many there are
_TAKEN = "num_experts_per_tok"
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


class FinalRefusalError(UnsupportedModelError):
    """Transformers' own code would not compute what is meant either."""


@contextlib.contextmanager
def failures_explained() -> Iterator[None]:
    """Raises UnsupportedModelError, on one line, where transformers' code for a model fails."""
    try:
        yield
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code that nobody has tried here may raise anything
        log.debug("transformers' code fails", exc_info=True)
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedModelError(f"transformers' code fails ({reason})") from error


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
    if layer_types and layer_types.isdisjoint(LAYER_TYPES):
        kinds = ", ".join(sorted(layer_types))
        raise UnsupportedModelError(f"none of its layers attends to tokens: they are {kinds}")
    if getattr(text_config, "num_hidden_layers", 1) < 1:
        raise UnsupportedModelError("it has no layers")
    states_window = "sliding_attention" in layer_types and not layers_differ(text_config)
    if states_window and getattr(text_config, "sliding_window", None) is None:
        raise UnsupportedModelError(
            "it has layers with a window, but its sliding_window is not set"
        )
    counts = [getattr(text_config, name, None) for name in _EXPERTS]
    num_experts = max([count for count in counts if isinstance(count, int)], default=0)
    taken = getattr(text_config, _TAKEN, None)
    if num_experts and isinstance(taken, int) and not 0 < taken <= num_experts:
        raise UnsupportedModelError(f"a row takes {taken} of {num_experts} experts")
    rope_types = _rope_types(text_config)
    if "dynamic" in rope_types:
        raise UnsupportedModelError("its dynamic RoPE depends on the whole batch")
    for rope in ropes_of(text_config).values():
        theta = rope.get("rope_theta")
        if isinstance(theta, int | float) and not theta > 0:
            raise UnsupportedModelError(f"its rope_theta is {theta}; it must be more than 0")


def layers_differ(text_config: PreTrainedConfig) -> bool:
    """Whether layers have fields of their own (`per_layer_config`), which cannot be read of all."""
    return bool(text_config.is_heterogeneous)


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
    window = getattr(text_config, "sliding_window", None)
    has_window = window is not None and window < max_positions(hf_config)
    if layer_types:
        has_window &= "sliding_attention" in layer_types
    if hf_config.model_type in WINDOW_IN_MASK and has_window:
        raise UnsupportedModelError("its sliding window lives in the mask")


def max_positions(hf_config: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, that the model computes correctly in every batch.

    Raises UnsupportedModelError if the configuration does not say.
    """
    text_config = hf_config.get_text_config()
    longest = int(getattr(text_config, "max_position_embeddings", None) or 0)
    if longest < 1:
        raise UnsupportedModelError(
            "its config.json does not say how many positions it has (max_position_embeddings)"
        )
    for rope in ropes_of(text_config).values():
        if rope.get("rope_type") == "longrope":
            # Beyond this, one long sequence changes the factors of all others in its batch.
            name = "original_max_position_embeddings"
            original = getattr(text_config, name, None) or rope.get(name)
            longest = min(longest, int(original or longest))
    return longest


def checked_starts(hf_config: PreTrainedConfig, length: int) -> list[int]:
    """Positions at which the load-time comparison starts its prompts of `length` tokens.

    Near and far, because some models scale with the position: everywhere, or beyond the length of
    their training, or beyond the length from which RoPE was stretched.
    """
    ropes = ropes_of(hf_config.get_text_config()).values()
    originals = {int(rope.get("original_max_position_embeddings") or 0) for rope in ropes}
    last = max_positions(hf_config) - length
    return sorted({0, *(start for start in (*originals, last // 2, last) if 0 < start <= last)})


def ropes_of(text_config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """The parameters of RoPE by type of layer, or by "" if all layers have the same.

    Beside those of types, transformers reads no others.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    return {name: each for name, each in rope.items() if isinstance(each, dict)} or {"": rope}


def _rope_types(text_config: PreTrainedConfig) -> set[str]:
    return {str(rope.get("rope_type", "default")) for rope in ropes_of(text_config).values()}
