"""The model families whose structure we know, each in a file of this folder; see `llama.py`."""

from importlib import import_module
from pkgutil import iter_modules

from transformers import PreTrainedConfig

from .base import Family

# By model type: a class is found by being in a file beside this one.
FAMILIES: dict[str, type[Family]] = {
    model_type: family
    for file in iter_modules(__path__)
    for family in vars(import_module(f".{file.name}", __name__)).values()
    if isinstance(family, type) and issubclass(family, Family)
    for model_type in vars(family).get("model_types", ())
}


def why_unknown(config: PreTrainedConfig, quantised: str | None) -> str | None:
    """Why no family can build this model, with weights in this format; None if one can."""
    if config.model_type not in FAMILIES:
        return "its architecture has no decoder here"
    family = FAMILIES[config.model_type]
    if family.only_format not in (None, quantised):
        return f"only experts in {family.only_format.upper()} have a decoder here"
    return family.why_unknown(config)
