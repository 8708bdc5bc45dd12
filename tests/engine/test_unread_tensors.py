"""What a checkpoint has beyond the model that its config describes is named at load."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from mtp import save_tiny_mtp_model
from safetensors.torch import load_file, save_file
from tiny_gguf import llama_directory, write_llama
from tiny_models import DEVICE, Tiny, change_config, change_tensor

from outrider.engine.config import ModelConfig
from outrider.engine.models.checkpoint import Checkpoint
from outrider.engine.models.loading import load_network


@pytest.fixture
def own_copy(tmp_path: Path, tiny_model: Tiny) -> Callable[[str], Path]:
    return lambda architecture: Path(shutil.copytree(tiny_model(architecture), tmp_path / "model"))


def warnings(model: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "outrider"):
        load_network(ModelConfig(path=str(model), dtype="float32"), DEVICE)
    return [text for text in caplog.messages if "not read" in text]


@pytest.mark.parametrize(
    ("architecture", "first"),
    [("llama", "model.layers.1.input_layernorm.weight"), ("gemma2", "model.layers.1.input_lay")],
)
def test_layers_that_the_config_leaves_out_are_named(
    architecture: str, first: str, own_copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = own_copy(architecture)
    assert warnings(model, caplog) == []
    changes = {"layer_types": ["full_attention"]} if architecture == "gemma2" else {}
    change_config(model, num_hidden_layers=1, **changes)
    (warning,) = warnings(model, caplog)
    assert "of layers 1 to 1, and its config counts 1; they are not read: " in warning
    assert first in warning


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_tensor_without_a_place_is_named(
    architecture: str, own_copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = own_copy(architecture)
    change_tensor(model, "model.layers.0.new_part.weight", torch.ones(2))
    (warning,) = warnings(model, caplog)
    assert warning.startswith(
        f"{model}: 1 of its tensors have no place in the model that its config"
    )
    assert warning.endswith("they are not read: model.layers.0.new_part.weight")


@pytest.mark.parametrize(("architecture", "num_counted"), [("llama", 0), ("gemma2", 1)])
def test_what_is_left_out_on_purpose_is_not_named(
    architecture: str,
    num_counted: int,
    own_copy: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = own_copy(architecture)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():  # an MTP layer after the last, as GLM and DeepSeek have it
        if name.startswith("model.layers.1."):
            change_tensor(model, name.replace("layers.1.", "layers.2."), tensor)
    change_tensor(model, "model.layers.2.eh_proj.weight", torch.ones(2, 2))
    change_tensor(model, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2))
    change_config(model, num_nextn_predict_layers=num_counted)
    assert warnings(model, caplog) == []


def test_an_mtp_head_in_the_targets_files_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(save_tiny_mtp_model(tmp_path / "model"), caplog) == []


def test_layers_of_a_gguf_file_that_are_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama_directory(tmp_path, Type.Q8_0, Type.Q8_0)
    assert warnings(model, caplog) == []
    write_llama(model / "model.gguf", Type.Q8_0, Type.Q8_0, num_layers=3)
    (warning,) = warnings(model, caplog)
    assert "9 of its tensors are of layers 2 to 2, and its config counts 2; they" in warning
    assert ": blk.2." in warning


def test_biases_left_out_are_asked_for_by_layer(tmp_path: Path) -> None:
    biases = {f"layers.{i}.{name}.bias": torch.ones(2) for i in (1, 11) for name in ("a", "b")}
    weights = {key.replace("bias", "weight"): torch.ones(2, 2) for key in biases}
    save_file(biases | weights, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, DEVICE, lambda *_: None)
    for name in weights:
        checkpoint.tensor(name)
    checkpoint.tensor("layers.1.a.bias")
    assert checkpoint.biases_left_out("layers.1.") == ["layers.1.b.bias"]
    assert checkpoint.biases_left_out() == [
        "layers.1.b.bias", "layers.11.a.bias", "layers.11.b.bias"
    ]  # fmt: skip
