"""Models over our pages, ours and transformers', give the logits of their own eager attention."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from paged import PROMPT, check_against_eager, eager_logits, run_prompt
from tiny_models import DEVICE, TINY, change_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from outrider.engine.config import ModelConfig
from outrider.engine.models import families
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.architectures import load_config
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.hugging_face import HuggingFaceModel, PackedLinear
from outrider.engine.models.loading import load_network

# Only our decoder keeps their states.
HYBRIDS = {"granitemoehybrid", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
OURS = {
    "exaone4",
    "glm4_moe",
    "granitemoe",
    "granitemoehybrid",
    "llama",
    "mimo",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
}
EXPERTS = {"glm4_moe", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}


@pytest.mark.parametrize("architecture", sorted(TINY))
def test_logits_equal_eager_attention(architecture: str, tiny_model: Callable[..., Path]) -> None:
    """Known structures get our decoder, others their own code."""
    path = tiny_model(architecture)
    config = ModelConfig(path=str(path), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    assert type(model) is (Decoder if architecture in OURS else HuggingFaceModel)
    check_against_eager(model, path)


def test_without_windows_all_layers_of_exaone_have_rope(tiny_model: Callable[..., Path]) -> None:
    every = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    path = tiny_model("exaone4", **every)
    model = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert type(model) is Decoder
    check_against_eager(model, path)


def test_a_shared_expert_computes_on_rows_though_others_do_in_a_space_as_large(
    tiny_model: Callable[..., Path],
) -> None:
    path = tiny_model("nemotron_h", moe_latent_size=32)
    check_against_eager(load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE), path)


def test_rope_of_all_layers_beside_that_of_their_types_is_left_out_as_transformers_does(
    tiny_model: Callable[..., Path],
) -> None:
    try:
        path = tiny_model("olmo3", rope_parameters={"rope_type": "linear", "factor": 8.0})
    except AttributeError:
        pytest.skip("this version of transformers fails on such a config")
    model = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert type(model) is Decoder
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
        if architecture in HYBRIDS or architecture == "qwen2_moe":  # its window lives in the mask
            pytest.skip("refused")
        monkeypatch.setattr(families, "FAMILIES", {})
    path = tiny_model(architecture)
    config = ModelConfig(path=str(path), dtype=dtype)
    model = load_network(config, DEVICE, batch_invariant=None)
    waits = architecture == "gpt_oss" or (architecture in EXPERTS and not is_ours)
    if waits and dtype == "float32":  # transformers' experts wait for the GPU
        with pytest.raises(
            UnsupportedModelError, match=rf"{architecture} in torch\.float32 .*enforce_eager"
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


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("falcon", {"num_hidden_layers": 2}),
        ("gptj", {"n_layer": 2, "rotary_dim": 4}),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    ],
)
def test_a_model_that_picks_its_attention_from_a_table_is_refused(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **sizes, **settings)
    )
    if model.is_backend_compatible():
        pytest.skip("this version of transformers dispatches its attention")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.* its attention to a backend"):
        load_network(ModelConfig(path=str(tmp_path)), DEVICE)


@pytest.mark.parametrize(
    ("architecture", "owner", "method"),
    [
        ("gemma2", HuggingFaceModel, "_run"),  # it runs as transformers has it
        ("llama", LlamaModel, "forward"),  # our decoder is compared with it
    ],
)
def test_code_that_fails_is_a_reason_to_refuse(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    owner: type,
    method: str,
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise AttributeError("no such thing\nand more")

    monkeypatch.setattr(owner, method, broken)
    match = rf"{architecture}.*transformers' code fails \(AttributeError: no such thing\)"
    with pytest.raises(UnsupportedModelError, match=match):
        load_network(ModelConfig(path=str(tiny_model(architecture))), DEVICE)


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads .* 3 KV"),
        ("gemma2", {"num_key_value_heads": 8}, "4 query heads cannot share 8 KV heads"),
        ("mistral", {"sliding_window": 0}, "window of 0 tokens; it must have 1 or more"),
        ("gemma2", {"sliding_window": 0}, "window of 0 tokens; it must have 1 or more"),
        ("olmo3", {"sliding_window": None}, "a window, but its sliding_window is not set"),
        ("gemma2", {"sliding_window": None}, "a window, but its sliding_window is not set"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"] * 3},
            "none of its layers attends to tokens: they are linear_attention",
        ),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    architecture: str, settings: dict[str, object], reason: str, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(architecture, **settings)
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}.*{reason}") as refused:
        load_network(ModelConfig(path=str(path)), DEVICE)
    assert "nor by our own" not in str(refused.value)  # says it once


def test_a_model_that_nobody_holds_is_freed(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers keeps attention functions for ever: also those of a draft that is left out."""
    config = ModelConfig(path=str(tiny_model("gemma2")))
    network = load_network(config, DEVICE)
    assert isinstance(network, HuggingFaceModel)
    loaded = [weakref.ref(network.model)]
    del network
    run = HuggingFaceModel._run

    def broken(self: HuggingFaceModel, *args: Tensor) -> NoReturn:
        loaded.append(weakref.ref(self.model))
        run(self, *args)
        raise RuntimeError("no such thing")

    monkeypatch.setattr(HuggingFaceModel, "_run", broken)
    with pytest.raises(UnsupportedModelError, match="no such thing"):
        load_network(config, DEVICE)
    gc.collect()
    assert [each() for each in loaded] == [None, None]


def test_code_that_reads_a_packed_weight_finds_it(tiny_model: Callable[..., Path]) -> None:
    """HunYuan's router looks at its dtype."""
    experts = {"num_experts": 4, "moe_topk": [2, 2], "num_key_value_heads": 2, "head_dim": 16}
    path = tiny_model("hunyuan_v1_moe", **experts)
    model = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(model, path)
    assert isinstance(model, HuggingFaceModel)
    packed = [layer for layer in model.model.modules() if isinstance(layer, PackedLinear)]
    assert all(not layer.is_read for layer in packed)


def test_code_that_views_what_attention_gives_finds_it_as_transformers_lays_it_out(
    tiny_model: Callable[..., Path],
) -> None:
    """AFMoE's does: a sequence alone in its batch has another layout on a CPU."""
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    path = tiny_model("afmoe", **sizes, moe_intermediate_size=24)
    model = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    logits = run_prompt(model, PROMPT).logits
    torch.testing.assert_close(logits, eager_logits(path), rtol=1e-4, atol=1e-4)


def test_a_window_in_the_mask_alone_is_refused_only_if_it_is_on(
    tiny_model: Callable[..., Path],
) -> None:
    experts = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4}
    path = tiny_model("phimoe", **experts)
    check_against_eager(load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE), path)
    # As Phi-3.5-MoE has it: one that no sequence is longer than hides nothing.
    path = tiny_model("phimoe", **experts, sliding_window=256)
    check_against_eager(load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE), path)
    path = tiny_model("phimoe", **experts, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match=r"phimoe.*window lives in the mask"):
        load_network(ModelConfig(path=str(path)), DEVICE)


def test_dynamic_rope_is_refused_with_the_reason(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    with pytest.raises(UnsupportedModelError, match=r"llama.*dynamic RoPE"):
        load_network(ModelConfig(path=str(path)), DEVICE)


@pytest.mark.parametrize(
    ("architecture", "stated"),
    [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
)
def test_attention_that_is_not_causal_is_refused(
    architecture: str, stated: dict[str, bool], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(architecture, **stated)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*attend to those behind them"):
        load_network(ModelConfig(path=str(path)), DEVICE)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        load_network(ModelConfig(path=str(tmp_path)), DEVICE)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("llama", {"head_dim": 0}, r"transformers' code fails \(ZeroDivisionError"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, r"fails \(TypeError"),
        ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
        ("glm4_moe", {"n_group": 0}, "do not form 0 groups"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "multiplies scores by"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "heads of no size, or none"),
        ("granitemoehybrid", {"mamba_n_groups": None}, "its mamba_n_groups is null"),
        ("granitemoehybrid", {"num_experts_per_tok": None}, "its num_experts_per_tok is null"),
    ],
)
def test_numbers_with_which_nothing_can_be_computed_are_refused(
    architecture: str,
    changes: dict[str, object],
    reason: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = Path(shutil.copytree(tiny_model(architecture), tmp_path / "model"))
    change_config(path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.*{reason}"):
        load_network(ModelConfig(path=str(path)), DEVICE)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_config_may_ask_for_tuples(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """`return_dict`, which concerns the callers of transformers' own code alone."""
    path = Path(shutil.copytree(tiny_model(architecture), tmp_path / "model"))
    change_config(path, return_dict=False)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder) == (architecture == "llama")


def test_a_config_that_transformers_cannot_compute_with_is_a_value_error(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    change_config(path, num_attention_heads=0)
    with pytest.raises(ValueError, match=r"config.json is damaged \(ZeroDivisionError"):
        load_config(path)


@pytest.mark.parametrize("field", ["sliding_window", "intermediate_size"])
def test_layers_that_differ_are_refused_unless_transformers_code_knows_them(
    field: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("mistral"), tmp_path / "model"))
    change_config(path, per_layer_config={"1": {field: 7}})
    with pytest.raises(UnsupportedModelError, match=rf"mistral.*{field}.* layers differ"):
        load_network(ModelConfig(path=str(path)), DEVICE)
