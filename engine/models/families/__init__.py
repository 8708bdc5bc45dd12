"""The model families whose structure we know, one file each; see `llama.py`."""

from typing import Any

from transformers import PreTrainedConfig

from ..checkpoint import AnyCheckpoint
from ..decoder import Decoder
from .base import Family
from .gpt_oss import GptOss
from .llama import Llama, SeedOss, SmolLM3, Windowed
from .qwen3_moe import Qwen3Moe

# By model type.
FAMILIES: dict[str, type[Family]] = {
    model_type: family
    for family in (GptOss, Llama, Qwen3Moe, SeedOss, SmolLM3, Windowed)
    for model_type in family.model_types
}


def why_unknown(config: PreTrainedConfig) -> str | None:
    """Why `build` cannot build this model; None if it can."""
    if config.model_type not in FAMILIES:
        return "its architecture has no decoder here"
    return FAMILIES[config.model_type].why_unknown(config)


def build(config: Any, tensors: AnyCheckpoint) -> Decoder:
    """Build the decoder of a configuration for which `why_unknown` returns None.

    Raises KeyError naming a tensor that the checkpoint lacks, ValueError naming a wrong shape.
    """
    return FAMILIES[config.model_type](tensors, config).decoder()
