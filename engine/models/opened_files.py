"""The weight files of a model directory, opened: of safetensors, or one of torch.save."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .weight_files import stored_tensors

_PICKLE = "pytorch_model.bin"  # the format of some heads


def open_files(folder: Path) -> dict[str, Any]:
    """By the name of each tensor, its opened file: of safetensors, or a dictionary of torch.save.

    Loading it runs no code. Raises WeightFileError if files are missing or damaged.
    """
    pickled = folder / _PICKLE
    if pickled.exists() and not any(folder.glob("*.safetensors")):
        loaded = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
        loaded = loaded.get("state_dict", loaded)
        return dict.fromkeys(loaded, loaded)
    stored = stored_tensors(folder)
    opened = {path: safe_open(path, "pt") for path in {each.path for each in stored.values()}}
    return {name: opened[each.path] for name, each in stored.items()}
