"""Drafts that ship with the package: an ordinary model directory with its embedding in 8 bits.

The embedding, which is tied to the head, is most of a small draft. With 8 bits a number and one
scale a row the draft's first choices stay the same, and the package is half as large. Unpacked, any
engine can load the directory.
"""

import shutil
from pathlib import Path

import safetensors.torch

from outrider.engine.models.loading import DRAFTED_TOKENS

EMBEDDING = "model.embed_tokens.weight"
PACKED_EMBEDDING, LAYERS = "embedding.safetensors", "layers.safetensors"
KEPT_FILES = (
    "config.json",
    "generation_config.json",
    DRAFTED_TOKENS,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
    "LICENSE",
    "NOTICE",
)


def unpack(folder: Path, directory: Path) -> None:
    """Fill `directory` with the model that scripts/pack_draft.py has packed into `folder`: weights
    in bfloat16, config, tokenizer, card.
    """
    packed = safetensors.torch.load_file(folder / PACKED_EMBEDDING)
    tensors = safetensors.torch.load_file(folder / LAYERS)
    tensors[EMBEDDING] = (packed["rows"].float() * packed["scale"]).bfloat16()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in KEPT_FILES:
        if (folder / name).exists():
            shutil.copyfile(folder / name, directory / name)
