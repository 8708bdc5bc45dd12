"""The model families whose structure we know, each in a file of this folder; see `llama.py`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from transformers import PreTrainedConfig

from ..checkpoint import AnyCheckpoint
from ..decoder import Decoder
from .base import Family

# By model type: a class is found by being in a file beside this one.
FAMILIES: dict[str, type[Family]] = {
    model_type: family
    for file in iter_modules(__path__)
    for family in vars(import_module(f".{file.name}", __name__)).values()
    if isinstance(family, type) and issubclass(family, Family)
    for model_type in vars(family).get("model_types", ())
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
