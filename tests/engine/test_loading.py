"""In which dtype a model runs, and how long its sequences may be."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import engine_config
from tiny_models import change_config
from transformers import LlamaConfig

from outrider.engine.config import ConfigError, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import admission
from outrider.engine.models.admission import UnsupportedModelError, max_positions, resolve_dtype
from outrider.engine.models.hugging_face import HuggingFaceModel
from outrider.engine.models.loading import load_network
from outrider.kernels.model.batch_invariant_linear import library_rows


@pytest.mark.parametrize(
    ("has_bfloat16", "asked", "device", "given"),
    [
        (True, "auto", "cpu", torch.bfloat16),
        (False, "auto", "cpu", torch.float32),
        (False, "bfloat16", "cpu", torch.bfloat16),
        (True, "auto", "cuda", torch.float16),
        (True, "bfloat16", "cuda:1", torch.bfloat16),
    ],
)
def test_dtype_auto_follows_the_processor_or_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, asked: str, device: str, given: torch.dtype
) -> None:
    monkeypatch.setattr(admission, "_cpu_has_bfloat16", lambda: has_bfloat16)
    config = LlamaConfig(dtype=torch.float16)
    assert resolve_dtype(asked, config, torch.device(device)) == given


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'int4'.*auto, float32, bfloat16"):
        resolve_dtype("int4", LlamaConfig(), torch.device("cpu"))


def test_longrope_is_served_up_to_its_original_length() -> None:
    config = LlamaConfig(
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
            "original_max_position_embeddings": 512,
        },
    )
    assert max_positions(config) == 512


def test_longer_sequences_than_the_target_has_positions_for_are_refused_before_weights_are_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model("llama", max_position_embeddings=256)
    shutil.copy(path / "config.json", tmp_path)  # and no weights
    config = engine_config(tmp_path, k=0)
    with pytest.raises(ConfigError, match=r"max_model_len is 257, .* positions for 256 .* at most"):
        Engine(replace(config, max_model_len=257))
    config = engine_config(path, k=0)
    assert Engine(replace(config, max_model_len=256)).info.max_model_len == 256


@pytest.mark.parametrize("model_type", ["bloom", "xlnet"])
def test_a_model_that_does_not_say_how_many_positions_it_has_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=rf"{model_type}.* how many positions it has"):
        load_network(ModelConfig(path=str(tmp_path)), torch.device("cpu"), max_model_len=64)


def test_longer_sequences_than_the_cache_holds_are_refused_as_settings(
    tiny_model: Callable[..., Path],
) -> None:
    config = engine_config(tiny_model("llama"), k=0, num_pages=9, page_size=4)
    says = r"^engine\.max_model_len is 33 tokens, but the KV cache holds 32: set it to that at most"
    with pytest.raises(ConfigError, match=says):
        Engine(replace(config, max_model_len=33))


def test_a_cache_that_holds_no_sequence_is_said_to_be_too_small(
    tiny_model: Callable[..., Path],
) -> None:
    """Nobody has set a length that could be lowered."""
    config = engine_config(tiny_model("llama"), k=0, num_pages=2, page_size=1)
    with pytest.raises(ConfigError, match=r"^the KV cache holds 1 tokens, .*: give it more pages"):
        Engine(config)


def test_weights_are_counted_as_they_come(tiny_model: Callable[..., Path]) -> None:
    reported = stages_of(ModelConfig(path=str(tiny_model("llama"))))
    num_weights = 2 * 9 + 3  # of two layers; the embeddings, the last norm and the head
    counts = [(done, num_weights) for done in range(1, num_weights + 1)]
    assert reported["loading the target"] == [(0, 0), *counts]


@pytest.mark.parametrize("is_draft", [False, True])
def test_checks_are_stages_of_their_own_and_end(
    is_draft: bool, tiny_model: Callable[..., Path]
) -> None:
    config = ModelConfig(path=str(tiny_model("llama")), dtype="float32")
    role = "draft" if is_draft else "target"
    reported = stages_of(config, is_draft=is_draft, batch_invariant=None)
    assert list(reported) == [
        f"loading the {role}",
        f"comparing the {role} with transformers",
        f"checking how the {role} rounds",
    ]
    layers, rounds = list(reported.values())[1:]
    assert [done for done, _ in layers] == [*range(layers[-1][1] + 1)]
    assert [done for done, _ in rounds] == [*range(rounds[-1][1] + 1)]


def stages_of(config: ModelConfig, **options: Any) -> dict[str, list[tuple[int, int]]]:
    """What is reported while a model is loaded, by stage."""
    stages: dict[str, list[tuple[int, int]]] = {}

    def report(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, []).append((done, total))

    load_network(config, torch.device("cpu"), report, **options)
    return stages


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
    ],
)
def test_a_checkpoint_that_is_not_quantised_as_it_says_is_refused(
    reported: dict[str, object], name: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change_config(model, **reported)
    reason = "none of" if name != "compression_config" else "is none of"
    with pytest.raises(
        UnsupportedModelError, match=rf"llama.*\({name}.*{reason}.*quantised from.*GGUF"
    ):
        load_network(ModelConfig(path=str(model)), torch.device("cpu"))


def test_models_that_do_not_keep_their_bits_on_a_gpu_are_refused(
    tiny_model: Callable[..., Path],
) -> None:
    config = ModelConfig(path=str(tiny_model("gpt2")))
    with pytest.raises(UnsupportedModelError, match=r"batch_invariant .*no decoder here.* leave"):
        load_network(config, torch.device("cuda"), batch_invariant=True)
    weight = torch.zeros(8, 8)
    with pytest.raises(ValueError, match=r"float32.* 16 bits"):
        library_rows(weight, None)


def test_a_model_of_transformers_needs_no_accelerate_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    for module in (transformers.modeling_utils, transformers.integrations.accelerate):
        monkeypatch.setattr(module, "is_accelerate_available", lambda: False)
    config = ModelConfig(path=str(tiny_model("gpt2")))
    assert isinstance(load_network(config, torch.device("cpu")), HuggingFaceModel)


def test_a_model_that_is_not_of_text_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(UnsupportedModelError, match=r"llava.* text alone with no model of this"):
        load_network(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
