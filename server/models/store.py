"""The folder of converted models: each built once, whole or not at all."""

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.api import ReportProgress, ignore_progress

MANIFEST = "outrider.json"


class ModelError(RuntimeError):
    """A model that cannot be obtained or used; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store."""

    source: str
    size_bytes: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError, naming the file, if it holds none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object")
    return found


def home() -> Path:
    """`$OUTRIDER_HOME`, else `outrider` in the user's cache folder (XDG)."""
    if given := os.environ.get("OUTRIDER_HOME"):
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "outrider"


def downloads() -> Path:
    """The folder of verified downloads, until the models made from them are complete."""
    return home() / "downloads"


def _models() -> Path:
    return home() / "models"


def entries() -> dict[str, StoredModel]:
    """Every complete model of the store, by name."""
    found = {}
    for manifest in sorted(_models().glob(f"*/{MANIFEST}")):
        if not manifest.parent.name.startswith("."):
            source = read_json(manifest)["source"]
            size_bytes = sum(file.stat().st_size for file in manifest.parent.iterdir())
            found[manifest.parent.name] = StoredModel(source, size_bytes)
    return found


def find(name: str, source: str) -> Path | None:
    """The complete model `name` if it was made from `source`."""
    try:
        manifest = read_json(_models() / name / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _models() / name if manifest["source"] == source else None


def build(name: str, source: str, make: Callable[[Path], None], report: ReportProgress) -> Path:
    """The model `name` made from `source`; if it is missing, `make` fills an empty folder.

    May be killed at any moment, and called by several processes: one builds, the others wait.
    `source` describes the input, including versions: if it changed, the model is made again.
    """
    with _disk_errors_explained():
        if path := find(name, source):
            return path
    with _disk_errors_explained(), _lock(name, report):
        if path := find(name, source):  # another process made it while this one waited
            return path
        _remove_scratch(name)
        final = _models() / name
        partial = _models() / f".{name}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            make(partial)
            (partial / MANIFEST).write_text(json.dumps({"source": source}) + "\n")
            _sync(partial)
            _remove_tree(final)
            partial.rename(final)
            _sync_folder(final.parent)
        finally:
            _remove_tree(partial)
        return final


def remove(name: str) -> None:
    """Delete a model of the store. Raises ModelError if there is none of that name."""
    if name not in (there := entries()):
        raise ModelError(f"no model {name!r} in {_models()}; there: {', '.join(there) or 'none'}")
    with _disk_errors_explained(), _lock(name, ignore_progress):
        # Renamed first: gone for others at once, however long deleting the files takes.
        (_models() / name).rename(_models() / f".{name}.partial-removed")
        _remove_scratch(name)


def _remove_scratch(name: str) -> None:
    """Delete what killed processes have left. The caller must hold the lock."""
    for left in _models().glob(f".{glob.escape(name)}.partial-*"):
        # An orphaned pip may still be writing there: the next build deletes the rest.
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _lock(name: str, report: ReportProgress) -> Iterator[None]:
    # The lock file stays: removing it would let a third process lock a new file of that name
    # while a second still waits on the old one.
    try:
        _models().mkdir(parents=True, exist_ok=True)
        file = (_models() / f".{name}.lock").open("w")
    except OSError as error:
        raise _explained(error) or ModelError(_not_writable(error)) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"Waiting for another process that prepares {name}", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
            report(f"Waiting for another process that prepares {name}", 1, 1)
        yield


@contextlib.contextmanager
def _disk_errors_explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if explained := _explained(error):
            raise explained from error
        raise


def _explained(error: Exception) -> ModelError | None:
    """A clear message if the disk is the problem, in whatever form the error arrived."""
    # safetensors has an error type of its own, and pip only prints text.
    if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
        free_mb = shutil.disk_usage(_existing(home())).free // 10**6
        return ModelError(
            f"the disk of the model store {home()} has no room left ({free_mb} MB free): clear "
            "some, remove models (`outrider models list`), or set OUTRIDER_HOME to a folder on "
            "another disk"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ModelError(_not_writable(error))
    return None


def _not_writable(error: OSError) -> str:
    return (
        f"cannot write to the model store {home()}: {error.strerror}; set OUTRIDER_HOME to a "
        "folder that this user may write to"
    )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
