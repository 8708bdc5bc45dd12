"""A model directory of safetensors files, or of one file of torch.save."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.model.expert_matrix import ExpertMatrix
from outrider.kernels.model.narrow_matrix import NarrowMatrix, dequantise, round_to_fp8, stack

from .any_checkpoint import AnyCheckpoint, Progress
from .formats import Read, UnsupportedFormatError
from .formats.mxfp4 import read_experts
from .narrow_weight import Narrow, Scaled, Stacked
from .weights import Dense, RoundedInputs, Weight

log = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLE = "pytorch_model.bin"  # the format of some heads
# By safetensors' names.
_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLOATS = ("F32", "BF16", "F16", "F64")


class Checkpoint(AnyCheckpoint):
    """Tensors are read straight to the device. Layers may be quantised, or rounded here."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        *,
        read: Read | None = None,
        rounds: bool = False,
        rounds_inputs: bool = True,
        rounds_logits: bool = False,
    ) -> None:
        """`read` reads quantised layers. `rounds` rounds the others to FP8: their weights, and
        their inputs if `rounds_inputs`; the layer that gives logits only if `rounds_logits`.

        Raises FileNotFoundError if the folder holds no weights.
        """
        super().__init__(dtype, device, progress)
        self._read, self._rounds = read, rounds
        self._rounds_inputs, self._rounds_logits = rounds_inputs, rounds_logits
        # Only our Triton kernels multiply by narrow matrices; elsewhere they are unpacked.
        self._keeps_narrow = uses_triton(torch.empty(0, device=device))
        self.has_quantised = False
        self._warned = False
        index = folder / _INDEX
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif not (folder / _SINGLE).exists() and (folder / _PICKLE).exists():
            file_of = dict.fromkeys(_Unpickled(folder / _PICKLE).keys(), _PICKLE)
        else:
            with safe_open(folder / _SINGLE, "pt") as single:
                file_of = dict.fromkeys(single.keys(), _SINGLE)
        # Opened on the CPU, where a read is a view of the file, so that no copy stays on a device.
        self._files: dict[str, Any] = {name: _open(folder / name) for name in set(file_of.values())}
        self._file_of = file_of

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def _num_tensors(self) -> int:
        return len(self._file_of)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a tensor is stored in; float32 if it is one that no format looks for."""
        part = self._files[self._file_of[name]].get_slice(name)
        return _DTYPES.get(part.get_dtype(), torch.float32)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def part(self, name: str, index: int) -> Tensor:
        """One entry of the first dimension, in its stored dtype, on the device."""
        if index == 0:
            self._count()
        tensor: Tensor = self._files[self._file_of[name]].get_slice(name)[index]
        return tensor.to(self._device)

    def stored(self, name: str) -> Tensor:
        self._count()
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor.to(self._device)

    def tensor(self, *names: str) -> Tensor:
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
            self._count()
        return out

    def integers(self, name: str) -> Tensor:
        """A tensor of integers or booleans, on the CPU."""
        values: Tensor = self._files[self._file_of[name]].get_slice(name)[:]
        if values.is_floating_point():
            raise ValueError(f"{name} is of dtype {values.dtype}; it holds integers")
        return values.long()

    def experts(
        self, name: str, shape: tuple[int, int, int], *, interleaved: bool = False
    ) -> ExpertMatrix:
        """The same linear layer of every expert, in MXFP4, also on a CPU. Shape: [E, N, K].

        Raises UnsupportedFormatError naming a tensor that is missing or not as it must be.
        """
        self.has_quantised = True
        if self._dtype == torch.float16:
            raise UnsupportedFormatError("float16 cannot hold every number of MXFP4; take bfloat16")
        if not self._keeps_narrow:
            self._warn_once(
                "its experts are unpacked one at a time in every pass, since only a GPU multiplies "
                "by them as they are: this takes no more memory, but much time"
            )
        return read_experts(self, name, shape, interleaved=interleaved)

    def _weight(self, names: tuple[str, ...], *, is_head: bool = False) -> Weight:
        matrices = [self._read(self, name) if self._read else None for name in names]
        if all(matrix is None for matrix in matrices):
            plain = self.tensor(*(f"{name}.weight" for name in names))
            return self._plain(plain, is_head=is_head)
        self.has_quantised = True
        narrow = [matrix for matrix in matrices if matrix is not None]
        if len(narrow) == len(names):
            stacked = stack(narrow)
            if stacked is not None:
                return self._narrow(stacked)
        weights: list[Weight] = [
            Dense(self.tensor(f"{name}.weight")) if matrix is None else self._narrow(matrix)
            for name, matrix in zip(names, matrices, strict=True)
        ]
        if self._keeps_narrow or not all(isinstance(weight, Dense) for weight in weights):
            return Stacked(weights)
        return Dense(torch.cat([weight.dequantised() for weight in weights]))

    def _tied(self, embedding: Tensor) -> Weight:
        return self._plain(embedding, is_head=True)

    def _plain(self, matrix: Tensor, *, is_head: bool) -> Weight:
        if not self._rounds or (is_head and not self._rounds_logits):
            return Dense(matrix)
        return self._narrow(round_to_fp8(matrix, rounds_inputs=self._rounds_inputs))

    def _narrow(self, matrix: NarrowMatrix) -> Weight:
        if self._keeps_narrow:
            return (Scaled if matrix.rounds_inputs else Narrow)(matrix, self._dtype)
        self._warn_once(
            f"the weights are unpacked to {str(self._dtype).removeprefix('torch.')}, since only a "
            "GPU multiplies by them as they are: they take the memory and the time of the plain "
            "model"
        )
        plain = Dense(dequantise(matrix, self._dtype))
        return plain if matrix.row_format is None else RoundedInputs(plain, matrix.row_format)

    def _warn_once(self, warning: str) -> None:
        if not self._warned:
            log.warning("%s", warning)
            self._warned = True


class _Unpickled:
    """A file of torch.save, with the interface of safetensors. Loading it runs no code."""

    def __init__(self, path: Path) -> None:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self._tensors: dict[str, Tensor] = loaded.get("state_dict", loaded)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

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
