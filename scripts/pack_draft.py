"""Put a distilled draft into the package, as the default target's.

outrider distill --target smollm2-135m-instruct --out /tmp/draft --budget 10m --size 4x256
.venv/bin/python -P scripts/pack_draft.py /tmp/draft
"""

import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch

from outrider.engine.models.weight_files import stored_tensors
from outrider.server.models.builtin import SHIPPED_DRAFT
from outrider.server.models.packed import EMBEDDING, KEPT_FILES, LAYERS, PACKED_EMBEDDING


def pack(directory: Path, folder: Path) -> None:
    """Fill `folder` from a model directory with a tied embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for file in {stored.path for stored in stored_tensors(directory).values()}:
        tensors |= safetensors.torch.load_file(file)
    rows = tensors.pop(EMBEDDING).float()
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    packed = {"rows": (rows / scale).round().to(torch.int8), "scale": scale}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(packed, folder / PACKED_EMBEDDING)
    safetensors.torch.save_file(tensors, folder / LAYERS)
    for name in KEPT_FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, folder / name)


if __name__ == "__main__":
    pack(Path(sys.argv[1]), SHIPPED_DRAFT)
    for file in sorted(SHIPPED_DRAFT.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file}")
