"""The tensors of a model directory, read by name and slice as they are asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .weights import Dense, Linear

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLE = "pytorch_model.bin"  # which some heads come in


class Checkpoint:
    """Files of one model. Each read goes straight to the device."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        """Raises FileNotFoundError if the folder holds no weights."""
        self._dtype, self._device = dtype, device
        self._progress, self._num_read = progress, 0
        index = folder / _INDEX
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif not (folder / _SINGLE).exists() and (folder / _PICKLE).exists():
            file_of = dict.fromkeys(_Unpickled(folder / _PICKLE).keys(), _PICKLE)
        else:
            with safe_open(folder / _SINGLE, "pt") as single:
                file_of = dict.fromkeys(single.keys(), _SINGLE)
        # Opened on the CPU, where a read is a view of the file: nothing is left over on a device.
        self._files: dict[str, Any] = {name: _open(folder / name) for name in set(file_of.values())}
        self._file_of = file_of

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, *names: str) -> Tensor:
        """Tensors of the same width, one below the other, in the model's dtype."""
        parts = [self._files[self._file_of[name]].get_slice(name) for name in names]
        shapes = [part.get_shape() for part in parts]
        for name, part in zip(names, parts, strict=True):
            if part.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"{name} is of dtype {part.get_dtype()}; {', '.join(_FLOATS)} are read here"
                )
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

    def integers(self, name: str) -> Tensor:
        """A tensor of integers or truth values, on the CPU."""
        values: Tensor = self._files[self._file_of[name]].get_slice(name)[:]
        if values.is_floating_point():
            raise ValueError(f"{name} is of dtype {values.dtype}; it holds integers")
        return values.long()

    def linear(self, *names: str) -> Linear:
        """Linear layers that read the same inputs, as one of all their outputs."""
        biases = [f"{name}.bias" for name in names]
        return Linear(
            Dense(self.tensor(*(f"{name}.weight" for name in names))),
            self.tensor(*biases) if biases[0] in self else None,
        )


# As safetensors calls them.
_FLOATS = ("F32", "BF16", "F16", "F64")
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}


class _Unpickled:
    """A file of torch.save, read as one of safetensors is. Only tensors are: no code runs."""

    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self._tensors: dict[str, Tensor] = loaded.get("state_dict", loaded)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self._tensors[name])


class _Slice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _open(path: Path) -> Any:
    return _Unpickled(path) if path.suffix == ".bin" else safe_open(path, "pt")
