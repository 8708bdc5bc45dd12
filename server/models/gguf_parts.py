"""GGUF models in several files, as llama.cpp splits them: NAME-00001-of-00003.gguf and so on.

The first part has all of the metadata. `split.count` and `split.no` are in each.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES

from outrider.engine.models.gguf_file import DEFAULT_ALIGNMENT, MAGIC, GgufFile

_COUNT, _NUMBER, _NUM_TENSORS = "split.count", "split.no", "split.tensors.count"
_VERSION = 3


def open_whole(paths: Sequence[Path]) -> list[GgufFile]:
    """The files of one model, each whole. Raises ValueError naming what is missing or doubled."""
    files, seen = [GgufFile(path) for path in paths], dict[str, Path]()
    for i, (path, file) in enumerate(zip(paths, files, strict=True)):
        count, number = file.metadata.get(_COUNT, 1), file.metadata.get(_NUMBER, i)
        if (count, number) != (len(files), i) and (count, len(files)) != (0, 1):
            raise ValueError(
                f"{path.name} is part {number + 1} of {count} by its metadata, and {i + 1} of "
                f"{len(files)} by the names of the files; parts keep the names that they were "
                "written with, such as NAME-00001-of-00003.gguf"
            )
        for name in _cut_short(file):
            raise ValueError(f"{path.name} is cut short: it ends before the end of {name}")
        for name in file.entries:
            if name in seen:
                raise ValueError(f"{name} is in {seen[name].name} and in {path.name}")
            seen[name] = path
    promised = files[0].metadata.get(_NUM_TENSORS, len(seen))
    if promised != len(seen):
        raise ValueError(f"its {len(files)} files have {len(seen)} of {promised} tensors")
    return files


def join(files: Sequence[GgufFile], path: Path) -> None:
    """Write one file with the metadata of the first part and the tensors of all."""
    metadata = {
        key: raw for key, raw in files[0].raw_metadata.items() if not key.startswith("split.")
    }
    num_tensors = sum(len(file.entries) for file in files)
    header = [MAGIC, struct.pack("<IQQ", _VERSION, num_tensors, len(metadata)), *metadata.values()]
    alignment = files[0].metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    start, starts = 0, []
    for file in files:
        starts.append(start)
        start += _aligned(len(file.data), alignment)
        for name, entry in file.entries.items():
            encoded, dims = name.encode(), entry.shape[::-1]
            header.append(struct.pack("<Q", len(encoded)) + encoded)
            header.append(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            header.append(struct.pack("<IQ", entry.type_id, starts[-1] + entry.offset))
    with path.open("wb") as out:
        out.write(b"".join(header))
        first = _aligned(out.tell(), alignment)
        for file, begin in zip(files, starts, strict=True):
            out.seek(first + begin)
            out.write(file.data)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _cut_short(file: GgufFile) -> Iterator[str]:
    """Names of tensors of known types that end behind the end of the file."""
    sizes = {int(type_): size for type_, size in GGML_QUANT_SIZES.items()}
    for name, entry in file.entries.items():
        if entry.type_id in sizes:
            block, block_bytes = sizes[entry.type_id]
            num_bytes = math.prod(entry.shape) // block * block_bytes
            if entry.offset + num_bytes > len(file.data):
                yield name
