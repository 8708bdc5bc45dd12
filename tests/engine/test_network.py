"""Models over our pages, ours and transformers', give the logits of their own eager attention."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged import check_against_eager
from tiny_models import DEVICE, TINY

from outrider.engine.config import ModelConfig
from outrider.engine.models import families
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.hugging_face import HuggingFaceModel
from outrider.engine.models.loading import load_network

OURS = {"llama", "mimo", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3"}


@pytest.mark.parametrize("architecture", sorted(TINY))
def test_logits_equal_eager_attention(architecture: str, tiny_model: Callable[..., Path]) -> None:
    """Known structures get our decoder, others their own code."""
    path = tiny_model(architecture)
    config = ModelConfig(path=str(path), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    assert type(model) is (Decoder if architecture in OURS else HuggingFaceModel)
    check_against_eager(model, path)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("architecture", sorted(TINY))
def test_logits_through_graphs_equal_eager_attention(
    architecture: str,
    is_ours: bool,
    dtype: str,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_ours:
        monkeypatch.setattr(families, "FAMILIES", {})
    path = tiny_model(architecture)
    config = ModelConfig(path=str(path), dtype=dtype)
    model = load_network(config, DEVICE, batch_invariant=None)
    if (architecture, dtype) == ("gpt_oss", "float32"):  # its experts wait for the GPU
        with pytest.raises(
            UnsupportedModelError, match=r"gpt_oss in torch\.float32 .*enforce_eager"
        ):
            check_against_eager(model, path, graphs=True)
        return
    num_replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal num_replays
        num_replays += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    check_against_eager(model, path, graphs=True)
    assert num_replays == 3


def test_a_model_that_never_calls_our_attention_is_refused(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(
        BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    ).save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, ValueError), match=r"(?i)bloom"):
        load_network(ModelConfig(path=str(tmp_path)), DEVICE)


def test_dynamic_rope_is_refused_with_the_reason(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    with pytest.raises(UnsupportedModelError, match=r"llama.*dynamic RoPE"):
        load_network(ModelConfig(path=str(path)), DEVICE)


@pytest.mark.parametrize(
    ("architecture", "told"),
    [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
)
def test_attention_that_is_not_causal_is_refused(
    architecture: str, told: dict[str, bool], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(architecture, **told)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*attend to those behind them"):
        load_network(ModelConfig(path=str(path)), DEVICE)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        load_network(ModelConfig(path=str(tmp_path)), DEVICE)
