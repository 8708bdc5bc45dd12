"""Drafts that ship with the package: an ordinary model directory with its embedding in 8 bits.

The embedding, which is tied to the head, is most of a small draft. With 8 bits a number and one
scale a row the draft's first choices stay the same, and the package is half as large. Unpacked, any
engine can load the directory.
"""

import shutil
from pathlib import Path

import safetensors.torch
import torch

from outrider.engine.models.loading import DRAFTED_TOKENS
from outrider.engine.models.weight_files import stored_tensors

EMBEDDING = "model.embed_tokens.weight"
_PACKED_EMBEDDING, _LAYERS = "embedding.safetensors", "layers.safetensors"
_KEPT_FILES = (
    "config.json",
    "generation_config.json",
    DRAFTED_TOKENS,
    "README.md",
    "NOTICE",
)


def pack(directory: Path, folder: Path) -> None:
    """Fill `folder` from a model directory with a tied embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for file in {stored.path for stored in stored_tensors(directory).values()}:
        tensors |= safetensors.torch.load_file(file)
    rows = tensors.pop(EMBEDDING).float()
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    packed = {"rows": (rows / scale).round().to(torch.int8), "scale": scale}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(packed, folder / _PACKED_EMBEDDING)
    safetensors.torch.save_file(tensors, folder / _LAYERS)
    for name in _KEPT_FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, folder / name)


def unpack(folder: Path, directory: Path) -> None:
    """Fill `directory` with what `pack` was given: weights in bfloat16, config, card."""
    packed = safetensors.torch.load_file(folder / _PACKED_EMBEDDING)
    tensors = safetensors.torch.load_file(folder / _LAYERS)
    tensors[EMBEDDING] = (packed["rows"].float() * packed["scale"]).bfloat16()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in _KEPT_FILES:
        if (folder / name).exists():
            shutil.copyfile(folder / name, directory / name)
