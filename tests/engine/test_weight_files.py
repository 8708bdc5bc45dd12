"""Which file gives a tensor: the same for our decoder and for a model as transformers has it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged import run_prompt
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, Tiny, change_config, split_weights, write_index

from outrider.engine.config import ConfigError, ModelConfig
from outrider.engine.models import weight_files
from outrider.engine.models.loading import load_network
from outrider.engine.models.weight_files import (
    Stored,
    WeightFileError,
    stored_tensors,
    unread_files,
)

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"
# Our own decoder, and one that runs as transformers has it.
ARCHITECTURES = pytest.mark.parametrize("architecture", ["llama", "gpt2"])


@pytest.fixture
def own_copy(tmp_path: Path, tiny_model: Tiny) -> Callable[[str], Path]:
    return lambda architecture: Path(shutil.copytree(tiny_model(architecture), tmp_path / "model"))


def logits(model: Path) -> torch.Tensor:
    config = ModelConfig(path=str(model), dtype="float32")
    found: torch.Tensor = run_prompt(load_network(config, DEVICE)).logits
    return found


def check_refused(model: Path, match: str) -> None:
    with pytest.raises(WeightFileError, match=match):
        stored_tensors(model)
    with pytest.raises(ConfigError, match=match):  # which the engine reports without a traceback
        logits(model)


@ARCHITECTURES
@pytest.mark.parametrize("has_index", [True, False])
def test_parts_are_read_with_an_index_and_without(
    has_index: bool, architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    expected = logits(model)
    split_weights(model, has_index=has_index)
    assert torch.equal(logits(model), expected)


@ARCHITECTURES
def test_a_file_beside_the_index_does_not_win(
    architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    expected, single = logits(model), model / "model.safetensors"
    other = {name: tensor + 1 for name, tensor in load_file(single).items()}
    split_weights(model)
    save_file(other, single, metadata={"format": "pt"})
    assert torch.equal(logits(model), expected)
    assert unread_files(model) == ["model.safetensors"]


@ARCHITECTURES
def test_a_stale_copy_in_another_part_is_refused_by_name(
    architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    tensors = load_file(model / "model.safetensors")
    name = sorted(tensors)[0]  # of the first part
    split_weights(model, stale={name: tensors[name] + 1})
    check_refused(model, f"{name} is in {FIRST} and, with other numbers, in {SECOND}")


@ARCHITECTURES
def test_an_equal_copy_in_another_part_does_no_harm(
    architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    expected, tensors = logits(model), load_file(model / "model.safetensors")
    name = sorted(tensors)[0]
    split_weights(model, stale={name: tensors[name]})
    assert torch.equal(logits(model), expected)
    assert stored_tensors(model)[name].path.name == FIRST


@pytest.mark.parametrize("changed", [lambda t: t.half(), lambda t: t.reshape(-1)])
def test_a_copy_of_another_dtype_or_shape_is_refused(
    changed: Callable[[torch.Tensor], torch.Tensor], own_copy: Callable[[str], Path]
) -> None:
    model = own_copy("llama")
    tensors = load_file(model / "model.safetensors")
    name = sorted(tensors)[0]
    split_weights(model, stale={name: changed(tensors[name])}, has_index=False)
    check_refused(model, f"{name} is in {FIRST} and, with other numbers, in {SECOND}")


@ARCHITECTURES
@pytest.mark.parametrize("place", ["./{}", "sub/{}", "./sub/../{}", "/{}"])
def test_paths_in_an_index_are_followed_inside_the_directory(
    place: str, architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    expected = logits(model)
    split_weights(model)
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    write_index(model, {name: place.format(file) for name, file in weight_map.items()})
    if place == "sub/{}":
        (model / "sub").mkdir()
        for file in (FIRST, SECOND):
            (model / file).rename(model / "sub" / file)
    if ".." in place or place == "/{}":
        check_refused(model, r"names .*-of-00002\.safetensors, which is outside the model's")
    else:
        assert torch.equal(logits(model), expected)


@ARCHITECTURES
@pytest.mark.parametrize("has_index", [True, False])
def test_a_part_that_is_missing_is_named(
    has_index: bool, architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    split_weights(model, has_index=has_index)
    (model / FIRST).unlink()
    check_refused(model, f"1 of 2 weight files are missing, {FIRST} the first")


@ARCHITECTURES
def test_a_tensor_that_is_not_where_the_index_says_is_named(
    architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    split_weights(model)
    tensors = load_file(model / FIRST)
    missing = min(tensors)
    save_file({n: t for n, t in tensors.items() if n != missing}, model / FIRST)
    check_refused(model, f"index.json says that {missing} is in {FIRST}, which does not have it")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(index: str, own_copy: Callable[[str], Path]) -> None:
    model = own_copy("gpt2")
    (model / INDEX).write_text(index)
    check_refused(model, r"model\.safetensors\.index\.json is damaged")


@ARCHITECTURES
@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_is_cut_short_is_named(
    length: int, architecture: str, own_copy: Callable[[str], Path]
) -> None:
    model = own_copy(architecture)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:length])
    check_refused(model, r"model\.safetensors is damaged or cut short")


def test_weights_by_other_names_are_listed(own_copy: Callable[[str], Path]) -> None:
    model = own_copy("gpt2")
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    check_refused(model, r"neither model\.safetensors nor .* are consolidated\.safetensors")


CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_read_by_the_same_rule(
    own_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(tmp_path / "hf")
    model = own_copy("llama")
    expected = logits(model)
    (model / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_config(model, model_type="own_llama", auto_map=auto_map)
    split_weights(model)
    save_file(load_file(model / FIRST), model / "model.safetensors")  # in vain
    config = ModelConfig(path=str(model), dtype="float32", trust_remote_code=True)
    network = load_network(config, DEVICE)
    assert type(network.model).__name__ == "OwnForCausalLM"  # type: ignore[attr-defined]
    torch.testing.assert_close(run_prompt(network).logits, expected, rtol=1e-4, atol=1e-4)


def test_headers_are_read_once_until_a_file_changes(
    own_copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = own_copy("llama"), list[str]()
    split_weights(model)
    header = weight_files._header

    def noted(path: Path) -> dict[str, Stored]:
        read.append(path.name)
        return header(path)

    monkeypatch.setattr(weight_files, "_header", noted)
    first = stored_tensors(model)
    logits(model)
    assert stored_tensors(model) is first
    assert read == [FIRST, SECOND]
    tensors = load_file(model / SECOND)
    save_file(tensors, model / SECOND, metadata={"format": "pt", "now": "longer"})
    name = next(iter(tensors))
    assert stored_tensors(model)[name].start > first[name].start
    (model / SECOND).unlink()
    check_refused(model, "1 of 2 weight files are missing")
