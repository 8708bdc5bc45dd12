"""Turns the name of a model into a local directory that transformers loads."""

import difflib
import hashlib
import logging
import re
from pathlib import Path

from outrider.engine.api import ReportProgress, ignore_progress
from outrider.engine.models.heads.config import head_kind
from outrider.engine.models.weight_files import (
    GGUF,
    INDEX,
    WeightFileError,
    stored_tensors,
    unread_files,
)

from ..config.model_names import looks_like_path
from . import builtin, hub, store
from .convert import gguf_to_directory, parts_of
from .store import ModelError

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Increase when the conversion of GGUF files changes its output, or refuses more of them.
_GGUF_RECIPE = 6
_MADE_FROM_GGUF = re.compile(r" mtime \d+, recipe (\d+)$")
_MAX_POINTER_BYTES = 1024  # by the specification of Git LFS


def resolve(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    report: ReportProgress = ignore_progress,
) -> Path:
    """The directory of `model`, fetched and converted if needed.

    `model` is a built-in name, a local directory, a GGUF file or a hub id, tried in this order;
    `revision` is for hub ids only. Raises ModelError.
    """
    path = Path(model).expanduser()
    is_local = model in builtin.BUILTINS or path.exists() or looks_like_path(model)
    if is_local and revision is not None:
        raise ModelError(
            f"revision {revision!r} is set for {model!r}, which is local; only hub ids have "
            "revisions: remove it"
        )
    if model in builtin.BUILTINS:
        return builtin.obtain(builtin.BUILTINS[model], report)
    if not is_local:
        if not _HUB_ID.fullmatch(model):
            raise ModelError(_unknown(model))
        directory = hub.snapshot(model, revision, with_code=trust_remote_code)
        return _checked(directory, model)
    if not path.exists():
        raise ModelError(f"{model!r} does not exist (looked at {path.absolute()})")
    if path.is_dir():
        return _checked(path.absolute(), model)
    if path.suffix.lower() == ".gguf":
        return _convert_gguf(path.absolute(), report)
    raise ModelError(
        f"{model!r} is a file, but no GGUF file; give a model directory, a .gguf file, or a hub id"
    )


def is_hub_id(model: str) -> bool:
    """Whether `resolve` looks for it on the hub."""
    is_local = model in builtin.BUILTINS or Path(model).expanduser().exists()
    return not is_local and not looks_like_path(model) and bool(_HUB_ID.fullmatch(model))


def find(model: str, revision: str | None = None) -> Path:
    """The directory of `model` if it is on this machine already; fetches nothing."""
    path = Path(model).expanduser()
    if model in builtin.BUILTINS:
        found = store.find(model, builtin.BUILTINS[model].source)
    elif path.is_file():
        found = store.find(*_gguf_entry(path))
    elif path.exists() or not _HUB_ID.fullmatch(model):
        return resolve(model, revision)
    else:
        found = _checked(hub.snapshot(model, revision, cached_only=True), model)
    if found is None:
        raise ModelError(f"{model} is not in the store; `outrider models fetch {model}` gets it")
    return found


def _unknown(model: str) -> str:
    known = list(builtin.BUILTINS)
    nearest = difflib.get_close_matches(model, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"built in: {', '.join(known)}."
    return (
        f"no model {model!r}; {hint} Else give a directory or .gguf file that exists, or a hub id "
        "(owner/name)"
    )


def _gguf_entry(path: Path) -> tuple[str, str]:
    """Name and source in the store; a file that is changed or replaced is another entry.

    Raises ModelError if it is one of several parts, and others are missing.
    """
    # Parts are found by their names, which what a link leads to may not have.
    parts = [part.resolve() for part in parts_of(path.absolute())]
    states = [(part, part.stat()) for part in parts]
    described = [
        f"{part}, {state.st_size} bytes, mtime {state.st_mtime_ns}" for part, state in states
    ]
    source = f"{', '.join(described)}, recipe {_GGUF_RECIPE}"
    return f"{path.stem}-{hashlib.sha256(source.encode()).hexdigest()[:12]}", source


def _convert_gguf(path: Path, report: ReportProgress) -> Path:
    name, source = _gguf_entry(path)
    for part in parts_of(path):
        _refuse_pointer(part)
    return store.build(name, source, lambda folder: gguf_to_directory(path, folder, report), report)


def _refuse_old_conversion(directory: Path, model: str) -> None:
    """Raises ModelError if it was made from a GGUF file by an older recipe."""
    if (directory / store.MANIFEST).is_file():
        source = str(store.read_json(directory / store.MANIFEST).get("source"))
        found = _MADE_FROM_GGUF.search(source)
        if found and int(found[1]) < _GGUF_RECIPE:
            raise ModelError(
                f"{model!r} was converted by an older version of Outrider, which could lose "
                f"tensors and tokens; give the GGUF file, which is then converted again ({source})"
            )


def _refuse_pointer(file: Path) -> None:
    """Raises ModelError if Git has left a note in place of a large file."""
    is_small = file.is_file() and file.stat().st_size < _MAX_POINTER_BYTES
    if is_small and file.read_bytes().startswith(b"version https://git-lfs"):
        raise ModelError(
            f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` there"
        )


def _checked(directory: Path, model: str) -> Path:
    """`directory`, if it is complete; otherwise raises ModelError naming what is missing."""
    names = {file.name for file in directory.iterdir()}
    is_head = head_kind(directory) is not None  # a head uses its target's tokenizer
    if "config.json" not in names:
        why = "it has no config.json; if it has GGUF files, give the path of one"
        if "adapter_config.json" in names:
            why = "a LoRA adapter, not a whole model"
        raise ModelError(f"{model!r} is not a model directory: {why}")
    tokenizers = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}
    if not is_head and not names & tokenizers:
        raise ModelError(f"{model!r} has no tokenizer (tokenizer.json or tokenizer.model)")
    # Only tensors are read from a head's .bin file.
    is_pickled = is_head and "pytorch_model.bin" in names
    # The store keeps a GGUF file by this name beside its config.
    is_kept = GGUF in names
    has_safetensors = any(name.endswith(".safetensors") for name in names) or INDEX in names
    if not is_pickled and not is_kept and not has_safetensors:
        raise ModelError(
            f"{model!r} has no .safetensors weights; pickle checkpoints (.bin, .pt) are not "
            "loaded, since opening one can run code: convert it with transformers' save_pretrained"
        )
    for file in directory.iterdir():
        _refuse_pointer(file)
    _refuse_old_conversion(directory, model)
    if has_safetensors:
        if is_kept:
            raise ModelError(
                f"{model!r} has weights as {GGUF} and as .safetensors files, which may be two "
                "models: move one of them out of the directory"
            )
        try:
            stored_tensors(directory)
        except WeightFileError as error:
            raise ModelError(f"{model!r} cannot be used: {error}") from error
        if unread := unread_files(directory):
            log.warning("%s: its index does not name %s: not read", model, ", ".join(unread))
    return directory
