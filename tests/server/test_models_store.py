"""The model store: each model once, whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.engine.api import ignore_progress
from outrider.server.models import store
from outrider.server.models.store import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    return tmp_path


def make(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 100)


def must_not_be_called(folder: Path) -> None:
    raise AssertionError("built again")


# Builds "m" in another process: notes that it began, then takes as long as it is asked to.
BUILD_ELSEWHERE = """
import sys, time
from pathlib import Path
from outrider.server.models import store
from outrider.engine.api import ignore_progress
home, sleep_s = Path(sys.argv[1]), float(sys.argv[2])
def make(folder):
    (folder / "weights").write_text("half")
    with (home / "builds").open("a") as log:
        log.write("x")
    time.sleep(sleep_s)
    (folder / "weights").write_text("whole")
print(store.build("m", "s", make, lambda stage, done, total: print(stage, flush=True)), flush=True)
"""


def build_elsewhere(home: Path, sleep_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-c", BUILD_ELSEWHERE, str(home), str(sleep_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_model_is_built_once_and_then_found() -> None:
    path = store.build("m", "s", make, ignore_progress)
    assert (path / "weights").read_bytes() == b"w" * 100
    assert store.build("m", "s", must_not_be_called, ignore_progress) == path
    assert store.find("m", "s") == path
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert store.entries() == {"m": store.StoredModel("s", size_bytes)}


def test_a_model_of_another_source_is_made_anew() -> None:
    store.build("m", "old", make, ignore_progress)
    assert store.find("m", "new") is None
    path = store.build("m", "new", lambda folder: (folder / "other").touch(), ignore_progress)
    assert sorted(file.name for file in path.iterdir()) == ["other", store.MANIFEST]


def test_a_failed_build_leaves_nothing_and_the_old_model_in_place(home: Path) -> None:
    path = store.build("m", "old", make, ignore_progress)

    def fail(folder: Path) -> None:
        make(folder)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        store.build("m", "new", fail, ignore_progress)
    assert [entry.source for entry in store.entries().values()] == ["old"]
    assert path.exists()
    assert sorted(child.name for child in path.parent.iterdir()) == [".m.lock", "m"]


def test_a_killed_build_leaves_nothing_that_counts(home: Path) -> None:
    process = build_elsewhere(home, sleep_s=60)
    wait_for(home / "builds")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.entries() == {}
    path = store.build("m", "s", make, ignore_progress)
    assert (path / "weights").read_bytes() == b"w" * 100
    assert sorted(child.name for child in path.parent.iterdir()) == [".m.lock", "m"]


@pytest.mark.deep
def test_two_processes_build_once_and_both_get_it_whole(home: Path) -> None:
    first = build_elsewhere(home, sleep_s=5)  # until the second has come up, however slowly
    wait_for(home / "builds")
    second = build_elsewhere(home, sleep_s=0.5)
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert (home / "builds").read_text() == "x"
    assert (home / "models/m/weights").read_text() == "whole"
    assert outputs[0] == [str(home / "models/m")]
    assert outputs[1] == ["Waiting for another process that prepares m"] * 2 + outputs[0]


def test_removed_models_are_gone_and_unknown_names_are_refused(home: Path) -> None:
    store.build("m", "s", make, ignore_progress)
    store.remove("m")
    assert store.entries() == {}
    assert not (home / "models/m").exists()
    with pytest.raises(ModelError, match=r"no model 'm' in .*; there: none"):
        store.remove("m")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_as_such(error: Exception) -> None:
    def fail(folder: Path) -> None:
        raise error

    with pytest.raises(ModelError, match=r"no room left \(\d+ MB free\).*OUTRIDER_HOME"):
        store.build("m", "s", fail, ignore_progress)


def test_a_home_that_cannot_be_written_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("OUTRIDER_HOME", str(home / "file" / "below"))
    with pytest.raises(ModelError, match=r"cannot write to the model store .*OUTRIDER_HOME"):
        store.build("m", "s", make, ignore_progress)


def test_home_is_outrider_home_else_the_xdg_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "/a/b")
    assert store.home() == Path("/a/b")
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert store.home() == Path("/c/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert store.home() == Path("/h/.cache/outrider")
