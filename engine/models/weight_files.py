"""Which file of a model directory gives a tensor: one rule for all that read safetensors files.

The index decides. Without one, the tensors are those of model.safetensors and of a checkpoint in
numbered parts. An MTP head may have a file of its own, which counts if it is there, whatever the
index says. Or all are in a GGUF file, which has another reader (`gguf_file.py`). Only headers are
read here, and torch is not needed.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GGUF = "model.gguf"  # the weights, where they are not in safetensors files
_MTP_FILE = "mtp.safetensors"
_PART = re.compile(r"model-\d+-of-(\d{1,6})\.safetensors")
# What names begin with, and with what those of a model of text.
_TEXT_PARTS = {"model.language_model.": "model.", "model.mtp.": "mtp."}
OF_IMAGES = "model.visual."  # what names of the parts for images begin with: they are not loaded
_LENGTH_BYTES = 8  # of the number at a file's start, which says how long its header is
_CHUNK_BYTES = 1 << 24


class WeightFileError(ValueError):
    """The weight files are incomplete, damaged or contradict each other; the message says which."""


class Stored(NamedTuple):
    """Where and how a tensor is stored."""

    path: Path
    dtype: str  # as safetensors writes it: BF16, I32, ...
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    end: int


def holds_gguf(folder: Path) -> bool:
    """Whether the weights of this model directory are a GGUF file."""
    return (folder / GGUF).is_file()


def name_in_text(name: str, renamed: Mapping[str, str] = {}) -> str:
    """A tensor's name in the model of text alone, if its checkpoint also has parts for images.

    `renamed` are parts of names in the files, and what they are here.
    """
    for stored, own in _TEXT_PARTS.items():
        if name.startswith(stored):
            name = own + name.removeprefix(stored)
            break
    for stored, own in renamed.items():
        name = name.replace(stored, own)
    return name


def stored_tensors(folder: Path) -> Mapping[str, Stored]:
    """The tensors of a model directory, by name. A process reads a directory once, unless its files
    change in the meantime: a start asks several times, and a large mixture has 90,000 tensors.

    Raises WeightFileError if a file is missing or damaged, if the index names a file that does not
    have the tensor, or if two of the files have other bytes under one name.
    """
    files = sorted(folder.rglob("*.safetensors*"))  # the index is among them
    stats = [(path, path.stat()) for path in files if path.is_file()]
    state = ((str(path), st.st_ino, st.st_size, st.st_mtime_ns) for path, st in stats)
    return _stored_tensors(folder, tuple(state))


@functools.lru_cache(maxsize=4)  # a target, its draft, and one more of each
def _stored_tensors(folder: Path, state: tuple[object, ...]) -> Mapping[str, Stored]:
    """`state`: of the files, which must change if they do."""
    index = _index(folder)
    files = _parts(folder) if index is None else sorted({*index.values()})
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise WeightFileError(
            f"it is incomplete: {len(missing)} of {len(files)} weight files are missing, "
            f"{missing[0]} the first"
        )
    headers = {file: _header(folder / file) for file in files}
    found: dict[str, Stored] = {}
    for name, file in (index or {}).items():
        if name not in headers[file]:
            raise WeightFileError(
                f"{INDEX} says that {name} is in {file}, which does not have it: get the model "
                "again"
            )
        found[name] = headers[file][name]
    for tensors in headers.values():
        for name, stored in tensors.items():
            if index is None:
                found.setdefault(name, stored)
            if name in found and not _same_bytes(found[name], stored):
                first, second = (each.path.relative_to(folder) for each in (found[name], stored))
                raise WeightFileError(
                    f"{name} is in {first} and, with other numbers, in {second}: one of them "
                    "belongs to another model; get the model again"
                )
    return MappingProxyType(found)


def indexed_files(folder: Path) -> list[str]:
    """The files that the index names, such as `x` or `sub/x`; none without an index.

    Raises WeightFileError if the index is damaged, or names files outside the folder.
    """
    return sorted(set((_index(folder) or {}).values()))


def unread_files(folder: Path) -> list[str]:
    """The files beside an index that it does not name: they are not read."""
    there = {path.name for path in folder.glob("*.safetensors")}
    return sorted(there - {*indexed_files(folder)}) if (folder / INDEX).is_file() else []


def _index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, if there is an index."""
    if not (folder / INDEX).is_file():
        return None
    try:
        weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        # Each file once: paths are slow to make, and names are many.
        files = {file: PurePosixPath(file) for file in set(weight_map.values())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{INDEX} is damaged: {error!r}") from error
    for file in files.values():
        if file.is_absolute() or ".." in file.parts:
            raise WeightFileError(f"{INDEX} names {file}, which is outside the model's directory")
    texts = {file: str(path) for file, path in files.items()}  # `./x` has become `x`
    index = {name: texts[file] for name, file in weight_map.items()}
    if (folder / _MTP_FILE).is_file():
        own = dict.fromkeys(_header(folder / _MTP_FILE), _MTP_FILE)
        return {name: file for name, file in own.items() if _is_mtp(name)} | index
    return {name: file for name, file in index.items() if file != _MTP_FILE or not _is_mtp(name)}


def _is_mtp(name: str) -> bool:
    return name_in_text(name).startswith("mtp.")


def _parts(folder: Path) -> list[str]:
    """Of a folder without an index: model.safetensors, and each part of a checkpoint in parts."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    files = [SINGLE] if SINGLE in names else []
    for total in {match[1] for match in map(_PART.fullmatch, names) if match}:
        numbers = [f"{i:0{len(total)}}" for i in range(1, int(total) + 1)]
        files += [f"model-{number}-of-{total}.safetensors" for number in numbers]
    if not files:
        raise WeightFileError(
            f"it has neither {SINGLE} nor {INDEX}, nor parts named model-00001-of-00002"
            f".safetensors and so on; its weight files are {', '.join(names) or 'none'}"
        )
    return sorted([*files, *({_MTP_FILE} & {*names})])


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            first = _LENGTH_BYTES + length
            if not 0 < length <= size - _LENGTH_BYTES:
                raise ValueError(f"its header ends at byte {first}, the file at {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        found = {}
        for name, entry in entries.items():
            start, end = (first + offset for offset in entry["data_offsets"])
            if not start <= end <= size:
                raise ValueError(f"{name} ends at byte {end}, the file at {size}")
            found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), start, end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{path.name} is damaged or cut short ({error})") from error
    return found


def _same_bytes(one: Stored, other: Stored) -> bool:
    if one == other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))


def _chunks(stored: Stored) -> Iterator[bytes]:
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        for at in range(stored.start, stored.end, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, stored.end - at))
