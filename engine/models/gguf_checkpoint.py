"""A model directory whose weights are a GGUF file."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.layers import compiled
from outrider.kernels.cpu.packing import BLOCK, Codes, Layout, pack_tiles

from ..progress import ReportCounts
from .checkpoint import EMBEDDING, AnyCheckpoint, Checkpoint, check_shape
from .gguf_architectures import architecture_of
from .gguf_file import GgmlType, GgufFile
from .narrow_weight import Stacked
from .shares import Cut, Outputs, num_outputs
from .weight_files import GGUF, holds_gguf
from .weights import Axis, Dense, Matrix, Tiles

# Tensors that stretch RoPE: by Llama 3.1's rule, and by LongRoPE.
_ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

# Metadata that no config of transformers takes from a file, and their values that change nothing.
_LEFT_OUT: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}


def why_misread(file: GgufFile, understood: Collection[str] = ()) -> str | None:
    """What this file has that transformers would leave out without a word; None if nothing.

    Tensors that are `understood` may be left out.
    """
    name = file.metadata.get("general.architecture")
    if stretched := _rope_scaling(file.metadata, f"{name}.rope"):
        return stretched
    for key, neutral in _LEFT_OUT.items():
        value = file.metadata.get(f"{name}.{key}", neutral[0])
        if value not in neutral:
            return f"{name}.{key} {value:g}"
    # Gemma 4's factors only say which dimensions rotate, as its configuration does.
    ignored = set() if name == "gemma4" else _ROPE_FACTORS
    known = architecture_of(file.metadata)
    for name in file.entries:
        is_left_out = name in ignored or (known is not None and not known.is_known(name))
        if is_left_out and name not in understood:
            return name
    return None


def _rope_scaling(metadata: dict[str, Any], prefix: str) -> str | None:
    """The entry that scales RoPE, and its value; without a type it is linear, as in llama.cpp."""
    key = f"{prefix}.scaling.type"
    type_ = metadata.get(key)
    if type_ not in (None, "none", "linear"):
        return f"{key} {type_}"
    for key in (f"{prefix}.scaling.factor", f"{prefix}.scale_linear"):
        if type_ != "none" and metadata.get(key, 0) not in (0, 1):
            return f"{key} {metadata[key]:g}"
    return None


def why_unpacked(file: GgufFile) -> str | None:
    """Why the weights of a file that is read whole cannot be kept quantised; None if they can.

    Raises UnknownTypeError naming a type that has no reader here.
    """
    if architecture_of(file.metadata) is None:
        return f"its architecture is {file.metadata.get('general.architecture')}"
    layouts = {file.format_of(name).layout for name in file.entries}
    if layouts == {Layout.PLAIN}:
        return "none of it is quantised"
    return None


def missing_tensors(file: GgufFile) -> list[str]:
    """The tensors that a file lacks, by name, if its architecture is known here.

    Raises KeyError naming metadata that it lacks.
    """
    architecture = architecture_of(file.metadata)
    return [] if architecture is None else architecture.missing(file.entries)


def open_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device, report: ReportCounts, **options: Any
) -> AnyCheckpoint:
    """The weights of a model directory, whatever files have them; `options` as in Checkpoint, for
    all but GGUF files.
    """
    if holds_gguf(folder):
        return GgufCheckpoint(folder, dtype, device, report)
    return Checkpoint(folder, dtype, device, report, **options)


class GgufCheckpoint(AnyCheckpoint):
    """The tensors of a GGUF file under transformers' names.

    On a CPU with compiled layers, matrices stay quantised; elsewhere they are unpacked, one by one,
    to the model's dtype.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, report: ReportCounts
    ) -> None:
        """Raises ValueError if the file is broken, or its architecture not known here."""
        super().__init__(dtype, device, report)
        self._file = GgufFile(folder / GGUF)
        architecture = architecture_of(self._file.metadata)
        if architecture is None:
            raise ValueError(why_unpacked(self._file))
        self._architecture = architecture
        self._num_tensors = len({*self._file.entries} - _ROPE_FACTORS)
        self._keeps_width = device.type == "cpu" and compiled() is not None

    def __contains__(self, name: str) -> bool:
        return self._architecture.place(name).name in self._file.entries

    def stored(self, name: str) -> Tensor:
        return self._read(name).dequantised().view(self._shape_of(name))

    def stacked(self, *names: str, cuts: Sequence[Cut | None] = ()) -> Tensor:
        return torch.cat([self.stored(name).to(self.dtype) for name in names]).to(self.device)

    def unread(self) -> set[str]:
        return {*self._file.entries} - self._names_read - _ROPE_FACTORS

    def _tied(self, embedding: Tensor) -> Matrix:
        if not self._keeps_width:
            return Dense(embedding)
        num_tokens, width = embedding.shape
        return self.weight(width, {EMBEDDING: num_tokens})

    def weight(
        self,
        num_inputs: int,
        sizes: Mapping[str, Outputs],
        axis: Axis | None = None,
        *,
        of_expert: bool = False,
    ) -> Matrix:
        names = [f"{name}.weight" for name in sizes]
        for name, size in zip(names, sizes.values(), strict=True):
            check_shape(name, self._shape_of(name), (num_outputs(size), num_inputs))
        if not self._keeps_width or num_inputs % BLOCK:
            return Dense(self.stacked(*names))
        parts = [(self._format_of(name).layout, self._read(name)) for name in names]
        file_format = f"{self._format_of(names[0]).bits}-bit GGUF"
        if len({layout for layout, _ in parts}) > 1 and self._architecture.is_compiled:
            # For example if v alone has more bits: merge the unpacked numbers.
            parts = [(Layout.PLAIN, Codes(part.dequantised())) for _, part in parts]
        tiles: list[Matrix] = []
        for layout, group in groupby(parts, lambda part: part[0]):
            columns = zip(*(codes for _, codes in group), strict=True)
            merged = Codes(*(torch.cat(column) for column in columns if column[0] is not None))
            is_unpacked = merged.scale is None
            packed = pack_tiles(merged, Layout.PLAIN if is_unpacked else layout)
            tiles.append(Tiles(packed, self.dtype, file_format))
        return tiles[0] if len(tiles) == 1 else Stacked(tiles)

    def _format_of(self, name: str) -> GgmlType:
        return self._file.format_of(self._architecture.place(name).name)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        place = self._architecture.place(name)
        return self._architecture.shape(place, self._file.shape_of(place.name))

    def _read(self, name: str) -> Codes:
        place = self._architecture.place(name)
        codes = self._file.read(place.name, place.part)
        self._count(place.name)
        return self._architecture.restored(place, codes)
