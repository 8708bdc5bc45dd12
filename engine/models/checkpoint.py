"""The tensors of a model directory, read by name and slice as they are asked for."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .weights import Dense, Linear

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """Safetensors files of one model. Each read goes straight to the device."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        """Raises FileNotFoundError if the folder holds no safetensors."""
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0
        index = folder / _INDEX
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / _SINGLE, "pt") as single:
                file_of = dict.fromkeys(single.keys(), _SINGLE)
        # Opened on the CPU, where a read is a view of the file: nothing is left over on a device.
        self._files = {name: safe_open(folder / name, "pt") for name in set(file_of.values())}
        self._file_of = file_of

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, *names: str) -> Tensor:
        """Tensors of the same width, one below the other, in the model's dtype."""
        parts = [self._files[self._file_of[name]].get_slice(name) for name in names]
        shapes = [part.get_shape() for part in parts]
        out = torch.empty(
            sum(shape[0] for shape in shapes),
            *shapes[0][1:],
            dtype=self._dtype,
            device=self._device,
        )
        first = 0
        for part, shape in zip(parts, shapes, strict=True):
            out[first : first + shape[0]].copy_(part[:])
            first += shape[0]
            self._num_read += 1
            self._progress(self._num_read, len(self._file_of))
        return out

    def linear(self, *names: str) -> Linear:
        """Linear layers that read the same inputs, as one of all their outputs."""
        biases = [f"{name}.bias" for name in names]
        return Linear(
            Dense(self.tensor(*(f"{name}.weight" for name in names))),
            self.tensor(*biases) if biases[0] in self else None,
        )
