"""GGUF files: their tensors, read by name when they are asked for, and the tensors' formats."""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.packing import Codes, Layout

MAGIC, _VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string: a tokenizer has 300,000
# What a broken header makes of a number, or of arrays in arrays.
_BEYOND_LIMITS = (OverflowError, MemoryError, RecursionError)


class GgmlType(NamedTuple):
    """A GGML type: each row is a sequence of blocks of numbers."""

    name: str
    block: int  # numbers
    block_bytes: int
    layout: Layout  # keeps the numbers exactly
    read: Callable[[Tensor], Codes]  # of blocks [N, blocks, block_bytes] uint8

    @property
    def bits(self) -> int:
        """Of a number, without the scales of its block."""
        kind, _, _ = self.name.partition("_")
        return int(kind.lstrip("BFQ"))


class UnknownTypeError(ValueError):
    """There is no reader for a tensor's type."""


def _half(bytes_: Tensor) -> Tensor:
    return bytes_.contiguous().view(torch.float16)


def _nibbles(bytes_: Tensor) -> Tensor:
    """The low four bits of all bytes, then the high four."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Codes]:
    return lambda blocks: Codes(blocks.flatten(1).view(dtype).float())


def _q4_0(blocks: Tensor) -> Codes:  # d, 16 bytes
    scale = _half(blocks[..., :2]).flatten(1)
    return Codes(_nibbles(blocks[..., 2:]).flatten(1), scale, scale * -8)


def _q4_1(blocks: Tensor) -> Codes:  # d, m, 16 bytes
    scale, offset = _half(blocks[..., :2]).flatten(1), _half(blocks[..., 2:4]).flatten(1)
    return Codes(_nibbles(blocks[..., 4:]).flatten(1), scale, offset)


def _q8_0(blocks: Tensor) -> Codes:  # d, 32 bytes
    return Codes(blocks[..., 2:].view(torch.int8).flatten(1), _half(blocks[..., :2]).flatten(1))


def _q4_k(blocks: Tensor) -> Codes:  # d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes
    d, dmin = _half(blocks[..., :2]).float(), _half(blocks[..., 2:4]).float()
    first, second, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, (high & 15) | (first >> 6) << 4), -1)
    mins = torch.cat((second & 63, (high >> 4) | (second >> 6) << 4), -1)
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Codes(codes.flatten(1), (d * scales).flatten(1), (-dmin * mins).flatten(1))


def _q6_k(blocks: Tensor) -> Codes:  # 128 bytes of 4 bits, 64 of 2 bits, 16 int8 scales, d
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # [.., half, row, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    quarters = torch.cat((low & 15, low >> 4), -2)  # [.., half, 4, 32]
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (quarters | (high >> shift & 3) << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].view(torch.int8) * _half(blocks[..., 208:]).float()
    return Codes(codes.flatten(1), scales.flatten(1))


GGML_TYPES = {
    0: GgmlType("F32", 1, 4, Layout.PLAIN, _plain(torch.float32)),
    1: GgmlType("F16", 1, 2, Layout.PLAIN, _plain(torch.float16)),
    2: GgmlType("Q4_0", 32, 18, Layout.FOUR_HALF, _q4_0),
    3: GgmlType("Q4_1", 32, 20, Layout.FOUR_HALF, _q4_1),
    8: GgmlType("Q8_0", 32, 34, Layout.EIGHT_HALF, _q8_0),
    12: GgmlType("Q4_K", 256, 144, Layout.FOUR_FLOAT, _q4_k),
    14: GgmlType("Q6_K", 256, 210, Layout.EIGHT_FLOAT, _q6_k),
    30: GgmlType("BF16", 1, 2, Layout.PLAIN, _plain(torch.bfloat16)),
}


class Entry(NamedTuple):
    """Where and how a tensor is stored."""

    shape: tuple[int, ...]  # in torch's order: GGUF stores the dimensions reversed
    type_id: int
    offset: int  # in the file's data


class GgufFile:
    """A file's metadata and tensors. A tensor is read only when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is not a GGUF file, or broken."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.raw_metadata: dict[str, bytes] = {}  # each with its key, as it is written in the file
        self.entries: dict[str, Entry] = {}  # by the names of tensors
        try:
            self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError, *_BEYOND_LIMITS) as error:
            raise ValueError(f"{path.name} is a broken GGUF file: {error!r}") from None

    @property
    def data(self) -> memoryview:
        """All tensors, as they are stored."""
        return memoryview(self._bytes)[min(self._start, len(self._bytes)) :]

    def format_of(self, name: str) -> GgmlType:
        """Raises UnknownTypeError naming the type."""
        type_id = self.entries[name].type_id
        if type_id not in GGML_TYPES:
            from gguf import GGMLQuantizationType  # which the engine otherwise does without

            names = {each.value: each.name for each in GGMLQuantizationType}
            type_name = names.get(type_id, f"type {type_id}")
            known = ", ".join(format_.name for format_ in GGML_TYPES.values())
            raise UnknownTypeError(f"{name} is {type_name}, which is not implemented ({known} are)")
        return GGML_TYPES[type_id]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def read(self, name: str, part: int | None = None) -> Codes:
        """A tensor as a matrix, or one entry of its first dimension; one dimension becomes one row.

        Raises UnknownTypeError.
        """
        format_, entry = self.format_of(name), self.entries[name]
        shape, index = (entry.shape, 0) if part is None else (entry.shape[1:], part)
        num_rows, width = math.prod(shape[:-1]), entry.shape[-1]
        num_bytes = num_rows * (width // format_.block * format_.block_bytes)
        start = self._start + entry.offset + index * num_bytes
        end = start + num_bytes
        is_there = part is None or (len(entry.shape) > 2 and part < entry.shape[0])
        if width % format_.block or end > len(self._bytes) or not is_there:
            raise ValueError(f"{name} does not fit into its file")
        data = bytearray(self._bytes[start:end])
        blocks = torch.frombuffer(data, dtype=torch.uint8)
        return format_.read(blocks.view(num_rows, -1, format_.block_bytes))

    def _read_header(self) -> None:
        if self._bytes[:4] != MAGIC:
            raise ValueError("it is no GGUF file")
        self._at = 4
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise ValueError(f"it is of GGUF version {version}; 2 and 3 are known")
        num_tensors, num_entries = self._take("QQ")
        for _ in range(num_entries):
            first, key = self._at, self._take_string()
            self.metadata[key] = self._take_value(*self._take("I"))
            self.raw_metadata[key] = self._bytes[first : self._at]
        for _ in range(num_tensors):
            name = self._take_string()
            (num_dims,) = self._take("I")
            if num_dims == 0:
                raise struct.error(f"{name} has no dimensions")
            if name in self.entries:
                raise struct.error(f"{name} is there twice")
            dims = self._take(f"{num_dims}Q")
            self.entries[name] = Entry(tuple(reversed(dims)), *self._take("IQ"))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error(f"general.alignment is {alignment!r}")
        self._start = -(-self._at // alignment) * alignment

    def _take(self, fields: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{fields}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{fields}")
        return found

    def _take_string(self) -> str:
        start = self._at + _LENGTH.size
        self._at = start + _LENGTH.unpack_from(self._bytes, self._at)[0]
        return self._bytes[start : self._at].decode()

    def _take_value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._take_string()
        if type_id != _ARRAY:
            return self._take(_SCALARS[type_id])[0]
        item_type, length = self._take("IQ")
        if item_type in _SCALARS:
            return self._take(f"{length}{_SCALARS[item_type]}")
        return [self._take_value(item_type) for _ in range(length)]
