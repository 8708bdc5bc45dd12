"""A model directory whose weights are a GGUF file."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.layers import compiled
from outrider.kernels.cpu.packing import BLOCK, Codes, Layout, pack

from .checkpoint import EMBEDDING, AnyCheckpoint, Outputs, ReportCounts, check_shape
from .gguf_file import FILE_NAME, GgufFile
from .shares import Cut
from .weights import Axis, Dense, Matrix, Tiles

# Names in the architecture `llama`, the only one that is read here.
_OUTER = {EMBEDDING: "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Tensors that stretch RoPE: by Llama 3.1's rule, and by LongRoPE.
_ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def why_misread(file: GgufFile, understood: Collection[str] = ()) -> str | None:
    """What this file has that transformers would leave out without a word; None if nothing.

    Tensors that are `understood` may be left out.
    """
    architecture = file.metadata.get("general.architecture")
    if stretched := _rope_scaling(file.metadata, f"{architecture}.rope"):
        return stretched
    # Gemma 4's factors only say which dimensions rotate, as its configuration does.
    ignored = set() if architecture == "gemma4" else _ROPE_FACTORS
    for name in file.names:
        is_left_out = name in ignored or (architecture == "llama" and not _is_known(name))
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


def _is_known(name: str) -> bool:
    """Whether it is a tensor of a Llama without biases."""
    stem, _, kind = name.removeprefix("blk.").rpartition(".")
    known = {*_OUTER.values(), *_INNER.values()}
    return kind == "weight" and stem.lstrip("0123456789.") in known


def why_unpacked(file: GgufFile) -> str | None:
    """Why the weights of a file that is read whole cannot be kept quantised; None if they can.

    Raises UnknownFormatError naming a type that has no reader here.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        return f"its architecture is {architecture}"
    layouts = {file.format_of(name).layout for name in file.names}
    if layouts == {Layout.PLAIN}:
        return "none of it is quantised"
    return None


def missing_tensors(file: GgufFile) -> list[str]:
    """The tensors of a Llama that its file lacks, by name. Raises KeyError without block_count."""
    stems = [_OUTER[EMBEDDING], _OUTER["model.norm"]]
    for i in range(file.metadata["llama.block_count"]):
        stems += [f"blk.{i}.{name}" for name in _INNER.values()]
    return [name for name in (f"{stem}.weight" for stem in stems) if name not in file.entries]


class GgufCheckpoint(AnyCheckpoint):
    """The tensors of a GGUF file under transformers' names.

    On a CPU with compiled layers, matrices stay quantised; elsewhere they are unpacked, one by one,
    to the model's dtype.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, report: ReportCounts
    ) -> None:
        super().__init__(dtype, device, report)
        self._file = GgufFile(folder / FILE_NAME)
        self._num_tensors = len({*self._file.names} - _ROPE_FACTORS)
        self._keeps_width = device.type == "cpu" and compiled() is not None

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._file.names

    def stored(self, name: str) -> Tensor:
        return self._read(name).dequantised().view(self._file.shape_of(_gguf_name(name)))

    def stacked(self, *names: str, cuts: Sequence[Cut | None] = ()) -> Tensor:
        return torch.cat([self.stored(name).to(self.dtype) for name in names]).to(self.device)

    def unread(self) -> set[str]:
        read = {_gguf_name(name) for name in self._names_read}
        return {*self._file.names} - read - _ROPE_FACTORS

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
        rounds_inputs: bool = True,
    ) -> Matrix:
        names = [f"{name}.weight" for name in sizes]
        layouts = {self._file.format_of(_gguf_name(name)).layout for name in names}
        for name, size in zip(names, sizes.values(), strict=True):
            assert isinstance(size, int)  # a Llama has no layers that are stored as one
            check_shape(name, self._file.shape_of(_gguf_name(name)), (size, num_inputs))
        if not self._keeps_width or num_inputs % BLOCK:
            return Dense(self.stacked(*names))
        parts = [self._read(name) for name in names]
        (layout,) = layouts if len(layouts) == 1 else (Layout.PLAIN,)
        if len(layouts) > 1:  # for example if v alone has more bits: merge the unpacked numbers
            parts = [Codes(part.dequantised()) for part in parts]
        columns = [part for part in zip(*parts, strict=True) if part[0] is not None]
        merged = Codes(*(torch.cat(column) for column in columns))
        return Tiles(pack(merged, layout), self.dtype)

    def _read(self, name: str) -> Codes:
        gguf_name = _gguf_name(name)
        codes = self._file.read(gguf_name)
        self._count(name)
        stem = gguf_name.split(".")[-2]
        if stem not in _HEADS:
            return codes
        num_heads = self._file.metadata.get(_HEADS[stem])
        num_heads = num_heads or self._file.metadata[_HEADS["attn_q"]]
        return Codes(*(_unpermuted(part, num_heads) for part in codes if part is not None))


def _unpermuted(rows: Tensor, num_heads: int) -> Tensor:
    """Rows in transformers' order: RoPE rotates halves of a key head there, pairs in the file."""
    pairs: Tensor = rows.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if found := _LAYER.fullmatch(stem):
        return f"blk.{found[1]}.{_INNER.get(found[2], found[2])}.{kind}"
    return f"{_OUTER.get(stem, stem)}.{kind}"
