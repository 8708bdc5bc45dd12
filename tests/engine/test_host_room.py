"""Models that are too large for a CPU's memory are refused before they are read."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_config
from quantised import quantise_experts
from safetensors.torch import load_file
from tiny_gguf import llama_directory
from tiny_models import DEVICE, Tiny, change_config, save_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine.config import ConfigError, EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.models import host_room
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model.packed_linear import has_products

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="about a CPU's memory")
Leave = Callable[[int], None]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """`leave(num_bytes)`: so many are left."""
    return lambda num_bytes: monkeypatch.setattr(host_room, "obtainable_bytes", lambda: num_bytes)


def parameter_bytes(path: Path) -> int:
    """In float32; transformers counts a matrix that two layers share once."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return sum(weight.nbytes for weight in model.parameters())


def check_needs(config: EngineConfig, num_bytes: int, leave: Leave, words: str) -> None:
    leave(num_bytes)
    host_room.check_host_room(config)
    leave(num_bytes - 1)
    with pytest.raises(ConfigError, match=words):
        host_room.check_host_room(config)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weights_that_are_copied_count_in_the_dtype_of_the_model(
    name: str, tiny_model: Tiny, leave: Leave
) -> None:
    config, size = engine_config(tiny_model(name)), parameter_bytes(tiny_model(name))
    check_needs(config, size, leave, r'target needs .* GGUF .* target.dtype = "bfloat16"')
    target = replace(config.target, dtype="bfloat16")
    check_needs(replace(config, target=target), size // 2, leave, r"bits, a smaller model, or")


def test_a_matrix_that_two_layers_share_counts_once(tmp_path: Path, leave: Leave) -> None:
    path = save_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    check_needs(engine_config(path), parameter_bytes(path), leave, "target needs")


def test_a_draft_counts_beside_its_target(tiny_model: Tiny, leave: Leave) -> None:
    target, draft = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    both = parameter_bytes(target) + parameter_bytes(draft)
    config = engine_config(target, draft)
    check_needs(config, both, leave, r"^target and draft need about .* GB .* GB are left: take")
    leave(both - 1)
    with pytest.raises(ConfigError, match="target and draft"):
        Engine(config)


def test_experts_that_stay_in_mxfp4_count_so(tmp_path: Path, leave: Leave) -> None:
    options = {"hidden_size": 64, "intermediate_size": 64}
    path = quantise_experts(save_tiny_model(tmp_path / "plain", "gpt_oss", **options), tmp_path)
    tensors = load_file(path / "model.safetensors").values()
    size = sum(each.nbytes if each.dtype == torch.uint8 else 4 * each.numel() for each in tensors)
    check_needs(engine_config(path), size, leave, "target needs")
    leave(size)
    Engine(engine_config(path))


@pytest.mark.skipif(compiled() is None, reason="no layers were compiled here")
def test_a_gguf_file_counts_as_it_is(tmp_path: Path, leave: Leave) -> None:
    from gguf import GGMLQuantizationType as Type

    folder = llama_directory(tmp_path / "model", Type.Q4_0, Type.Q4_0)
    size = (folder / "model.gguf").stat().st_size
    check_needs(engine_config(folder), size, leave, r"bits, a smaller model, or a GPU")


@pytest.mark.skipif(not has_products(torch.float32), reason="nothing is packed here")
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_pages_of_files_that_transformers_maps_do_not_count(
    name: str, tiny_model: Tiny, leave: Leave
) -> None:
    """But linear layers, which are packed; of GPT-2 the output layer alone is one."""
    path = tiny_model(name)
    config = engine_config(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    packed = [each.weight for each in model.modules() if type(each) is nn.Linear]
    assert name != "gpt2" or len(packed) == 1
    check_needs(config, 4 * sum(each.numel() for each in packed), leave, "target needs")
    target = replace(config.target, dtype="bfloat16")  # not the files' own: all is copied
    size = parameter_bytes(path) // 2
    check_needs(replace(config, target=target), size, leave, "target needs")


def test_what_cannot_be_counted_is_left_to_loading(
    tiny_model: Tiny, tmp_path: Path, leave: Leave
) -> None:
    leave(1)
    broken = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change_config(broken, model_type="no-such-type")
    host_room.check_host_room(engine_config(broken))
