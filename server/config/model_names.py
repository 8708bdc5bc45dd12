"""Names of models, as settings and clients have them: hub ids, paths and built-in names."""

from pathlib import Path


def name_of(model: str) -> str:
    """A model's name without its folder: do not reveal where models are on this machine."""
    return Path(model).expanduser().absolute().name if looks_like_path(model) else model


def looks_like_path(model: str) -> bool:
    """Whether it cannot be a hub id."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf")
