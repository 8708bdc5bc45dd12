"""From a name to a model directory, and what is said where there is none."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from tiny_pairs import write_tiny_gguf

from outrider.server.models import hub, resolve, store
from outrider.server.models.store import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


WEIGHTS = safetensors.numpy.save({"a": np.zeros(1)})


def model_directory(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_bytes(WEIGHTS if name.endswith(".safetensors") else b"{}")
    return path


def test_a_local_directory_is_taken_as_it_is(home: Path) -> None:
    directory = model_directory(home / "m")
    assert resolve.resolve(str(directory)) == directory
    assert resolve.resolve("m") == directory
    assert resolve.find("./m") == directory


def test_a_directory_of_the_store_is_taken_from_any_place(home: Path) -> None:
    """Weights from a GGUF file stay in it."""
    directory = model_directory(home / "m", "config.json", "tokenizer.json", "model.gguf")
    assert resolve.resolve("m") == directory


def test_a_local_directory_wins_over_a_hub_id(home: Path) -> None:
    (home / "owner").mkdir()
    directory = model_directory(home / "owner" / "name")
    assert resolve.resolve("owner/name") == directory


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["model.safetensors", "tokenizer.json"], "no config.json"),
        (["m.Q4_K_M.gguf"], "no config.json; if it has GGUF files, give the path of one"),
        (["adapter_config.json", "tokenizer.json"], "LoRA adapter"),
        (["config.json", "model.safetensors"], "no tokenizer"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "pickle checkpoints"),
    ],
)
def test_a_directory_that_is_no_model_says_what_is_missing(
    home: Path, names: list[str], complaint: str
) -> None:
    model_directory(home / "m", *names)
    with pytest.raises(ModelError, match=complaint):
        resolve.resolve("m")


def test_missing_weight_files_are_noticed(home: Path) -> None:
    directory = model_directory(home / "m")
    weights = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing, model-2\.safetensors"):
        resolve.resolve("m")


@pytest.mark.parametrize("name", ["./model-1.safetensors", "sub/model-1.safetensors"])
def test_paths_in_an_index_are_followed(
    name: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_directory(home / "m")  # whose model.safetensors is in vain
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(WEIGHTS)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert resolve.resolve("m") == directory
    assert "m: its index does not name model.safetensors: not read" in caplog.text
    (directory / "model.safetensors").unlink()
    assert resolve.resolve("m") == directory


def test_weights_in_two_formats_are_refused(home: Path) -> None:
    names = ("config.json", "tokenizer.json", "model.gguf", "model.safetensors")
    model_directory(home / "m", *names)
    with pytest.raises(ModelError, match=r"model\.gguf and as \.safetensors files, .* move one"):
        resolve.resolve("m")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_known_from_the_file(home: Path, name: str) -> None:
    (model_directory(home / "m") / name).write_text(POINTER)
    with pytest.raises(ModelError, match=rf"m/{name} is a pointer of Git LFS.*`git lfs pull`"):
        resolve.resolve("m")


def test_a_pointer_in_place_of_a_gguf_file_is_reported(home: Path) -> None:
    (home / "m.gguf").write_text(POINTER)
    with pytest.raises(ModelError, match=r"m\.gguf is a pointer of Git LFS"):
        resolve.resolve("m.gguf")


@pytest.mark.parametrize("damaged", ["{", "[]"])
def test_a_damaged_index_is_named(home: Path, damaged: str) -> None:
    index = model_directory(home / "m") / "model.safetensors.index.json"
    index.write_text(damaged)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is damaged: "):
        resolve.resolve("m")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("./missing", r"does not exist \(looked at /"),
        ("/missing", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("a/b/c", "does not exist"),
        ("smollm2-135m-instrukt", "did you mean 'smollm2-135m-instruct'"),
        ("gpt", "built in: smollm2-135m-instruct"),
    ],
)
def test_names_of_nothing_are_refused(model: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        resolve.resolve(model)


def test_a_file_that_is_no_gguf_by_name_is_refused(home: Path) -> None:
    (home / "weights.bin").touch()
    with pytest.raises(ModelError, match="no GGUF file"):
        resolve.resolve("weights.bin")


@pytest.mark.parametrize("model", ["m", "smollm2-135m-instruct", "./missing"])
def test_a_revision_of_something_local_is_refused(home: Path, model: str) -> None:
    model_directory(home / "m")
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        resolve.resolve(model, "main")


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(home: Path) -> None:
    source = write_tiny_gguf(home / "tiny.gguf")
    with pytest.raises(ModelError, match="models fetch"):
        resolve.find("tiny.gguf")
    first = resolve.resolve("tiny.gguf")
    assert resolve.resolve(str(source)) == first == resolve.find("tiny.gguf")
    write_tiny_gguf(source, pre="gpt-2")
    second = resolve.resolve("tiny.gguf")
    assert second != first
    assert len(store.entries()) == 2


def test_every_part_of_a_gguf_model_counts_wherever_links_lead(home: Path) -> None:
    (home / "blobs").mkdir()
    first = write_tiny_gguf(home / "m.gguf", part_tensors=12)
    parts = sorted(home.glob("m-0*"))
    for i, part in enumerate(parts):  # as in a hub's cache
        part.symlink_to(part.rename(home / "blobs" / f"{i}"))
    made = resolve.resolve(first.name)
    assert resolve.resolve(first.name) == made == resolve.find(first.name)
    os.utime(parts[-1])
    with pytest.raises(ModelError, match="models fetch"):
        resolve.find(first.name)
    parts[-1].unlink()
    with pytest.raises(ModelError, match=rf"are missing: {parts[-1].name}"):
        resolve.resolve(first.name)


def test_what_an_older_version_has_converted_is_converted_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have random weights in place of those that its file lacked."""
    write_tiny_gguf(home / "tiny.gguf")
    monkeypatch.setattr(resolve, "_GGUF_RECIPE", resolve._GGUF_RECIPE - 1)
    old = resolve.resolve("tiny.gguf")
    assert resolve.resolve(str(old)) == old
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_HOME", str(home / "home"))
    monkeypatch.chdir(home)
    with pytest.raises(ModelError, match=r"older version .* give the GGUF file, .*tiny\.gg"):
        resolve.resolve(str(old))
    new = resolve.resolve("tiny.gguf")
    assert new != old
    assert resolve.resolve(str(new)) == new


def test_weights_in_folders_are_not_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_repository = ["config.json", "tokenizer.json", "m.safetensors", "original/m.safetensors"]
    fetched: set[str] = set()

    def snapshot(hub_id: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        fetched.update(filter_repo_objects(in_repository, **patterns))
        return str(home)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    hub.snapshot("a/b", None)
    assert fetched == set(in_repository[:3])
    weight_map = {"a": "original/m.safetensors"}  # but if the index names them, they are the model
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hub.snapshot("a/b", None)
    assert fetched == set(in_repository)


def test_a_hub_id_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(hub_id: str, **options: object) -> NoReturn:
        asked.append((hub_id, options["revision"], options["allow_patterns"]))
        raise LocalEntryNotFoundError("no route to host\nmore words")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"cannot download a/b at revision v1.*no route to host\)"):
        resolve.resolve("a/b", "v1")
    (hub_id, revision, patterns) = asked[0]
    assert (hub_id, revision) == ("a/b", "v1")
    assert "*.py" not in patterns  # code comes only with trust_remote_code
    assert not any(pattern.endswith("bin") for pattern in patterns)
    with pytest.raises(ModelError, match="not in the hub's cache"):
        resolve.find("a/b")


class ReadError(Exception):
    """As HTTP libraries have it: no OSError, and often without a word."""


@pytest.mark.parametrize(
    ("given", "cause", "stated"),
    [
        (ReadError(), None, "ReadError"),
        (ReadError("403 Forbidden"), None, "403 Forbidden"),
        (LocalEntryNotFoundError("it is not there"), ReadError("name not known"), "name not known"),
    ],
)
def test_a_download_that_breaks_says_why(
    monkeypatch: pytest.MonkeyPatch, given: Exception, cause: Exception | None, stated: str
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise given from cause

    monkeypatch.setattr(hub, "snapshot_download", broken)
    with pytest.raises(
        ModelError, match=rf"cannot download a/b, .*\({stated}\); check the network"
    ):
        resolve.resolve("a/b")
