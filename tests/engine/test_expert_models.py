"""Mixtures of experts run in our decoder: plain, or gpt-oss in MXFP4; or are refused by name."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, is_greedy, prompts, run, tokens
from heads import save_tiny_head
from paged import PROMPT, check_against_eager, run_prompt
from quantised import quantise_experts
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, VOCAB, Tiny, change_config, change_tensor, with_stacked_experts
from transformers import AutoModelForCausalLM
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.hugging_face import HuggingFaceModel
from outrider.engine.models.loading import load_network
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model.routing import route

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "scale": 0.15,
}


@pytest.fixture
def plain(tiny_model: Tiny) -> Path:
    return tiny_model("gpt_oss", **SHAPE)


@pytest.fixture
def quantised(plain: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return quantise_experts(plain, tmp_path)


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    config = ModelConfig(path=str(path), dtype=dtype)
    return load_network(config, DEVICE, **options)


def test_logits_are_those_of_the_matrices_that_the_codes_mean(
    quantised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = load(quantised)
    assert isinstance(network, Decoder)
    got = run_prompt(network).logits
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", attn_implementation="eager")
    with torch.inference_mode():
        expected = eager.to(DEVICE)(PROMPT[None]).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert network.weight_formats == "fp4"
    assert ("unpacked one at a time" in caplog.text) == (not HAS_KERNELS)


def test_steps_of_every_kind(quantised: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(quantised), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    assert isinstance(model, Decoder)
    check_against_eager(model, tmp_path / "meant")


@pytest.mark.skipif(DEVICE.type == "cpu" and HAS_KERNELS, reason="too slow when interpreted")
@pytest.mark.parametrize("k", [0, 3])
def test_answers_with_a_head_are_the_targets(k: int, tiny_model: Tiny, tmp_path: Path) -> None:
    target = quantise_experts(tiny_model("gpt_oss", **SHAPE, num_hidden_layers=5), tmp_path)
    head = save_tiny_head(tmp_path / "head", target, speculators=True, draft_vocab=50)
    asked = prompts((3, 17, 40), VOCAB)
    answers = run(Engine(engine_config(target, head, k=k)), asked, GREEDY)
    for prompt, outputs in zip(asked, answers, strict=True):
        assert is_greedy(tmp_path / "meant", prompt, tokens(outputs))


def test_experts_take_the_bytes_of_their_file(quantised: Path) -> None:
    network = load(quantised)
    tensors = load_file(quantised / "model.safetensors")
    for i, block in enumerate(network.blocks):
        name = f"model.layers.{i}.mlp.experts."
        stored = sum(
            tensor.numel() * (1 if tensor.dtype == torch.uint8 else network.dtype.itemsize)
            for key, tensor in tensors.items()
            if key.startswith(name) and not key.endswith("bias")
        )
        weights = block.mlp.first.weight, block.mlp.down.weight
        assert sum(weight.num_bytes for weight in weights) == stored * 3 // 6  # a row has 3 of 6


@pytest.mark.skipif(DEVICE.type == "cpu" and HAS_KERNELS, reason="too slow when interpreted")
def test_bfloat16_proves_itself_though_choices_between_equals_may_fall_otherwise(
    quantised: Path,
) -> None:
    assert isinstance(load(quantised, "bfloat16"), Decoder)


def test_plain_experts_are_left_to_transformers(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(load(plain), HuggingFaceModel)
    assert "only experts in MXFP4 have a decoder here" in caplog.text


def test_a_router_or_gate_that_differs_is_noticed(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    gate = theirs.GptOssExperts._apply_gate
    monkeypatch.setattr(
        theirs.GptOssExperts, "_apply_gate", lambda self, x: gate(self, x) * (1 + 1e-3)
    )
    with pytest.raises(UnsupportedModelError, match="computes layer 0 at position 0 differently"):
        load(quantised)
    monkeypatch.undo()
    forward = theirs.GptOssTopKRouter.forward

    def worst(self: Any, x: torch.Tensor) -> Any:
        logits, weights, ids = forward(self, x)
        return logits, weights, (ids + 1) % self.num_experts

    monkeypatch.setattr(theirs.GptOssTopKRouter, "forward", worst)
    with pytest.raises(UnsupportedModelError, match="computes the router of layer 0 differently"):
        load(quantised)


EXPERTS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("tensor", "change", "reason"),
    [
        ("down_proj_scales", None, "there is no .*layers.1.*down_proj_scales"),
        ("gate_up_proj_bias", None, "there is no .*gate_up_proj_bias"),
        ("down_proj_blocks", None, "there is no .*down_proj_blocks"),
        (
            "gate_up_proj_scales",
            torch.zeros(6, 256, 3, dtype=torch.uint8),
            "gate_up_proj_scales is 6 x 256 x 3; by its config it must be 6 x 256 x 2",
        ),
        (
            "down_proj_blocks",
            torch.zeros(4, 64, 4, 16, dtype=torch.uint8),
            "down_proj_blocks is 4 x 64 x 4 x 16; by its config it must be 6 x 64 x 4 x 16",
        ),
        ("down_proj_blocks", torch.zeros(6, 64, 4, 16), "down_proj_blocks is not of dtype uint8"),
        (
            "down_proj_scales",
            torch.full((6, 64, 4), 193, dtype=torch.uint8),
            "down_proj_scales has an exponent of 193; up to 192 are served",
        ),
        ("gate_up_proj_blocks", None, r"there is no .*\.gate_up_proj_blocks"),
    ],
)
def test_broken_experts_are_refused_by_name(
    tensor: str, change: torch.Tensor | None, reason: str, quantised: Path
) -> None:
    change_tensor(quantised, EXPERTS + tensor, change)
    with pytest.raises(UnsupportedModelError, match=f"mxfp4: .*{reason}"):
        load(quantised)


def test_a_dtype_or_a_width_that_the_format_does_not_fit_is_refused(
    quantised: Path, tiny_model: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"float16 cannot hold .* take bfloat16"):
        load(quantised, "float16")
    narrow = tiny_model("gpt_oss", **SHAPE | {"intermediate_size": 96})
    path = quantise_experts(narrow, tmp_path / "narrow")
    with pytest.raises(UnsupportedModelError, match="down_proj has 96 inputs, no multiple of 64"):
        load(path)


def test_the_published_configuration_is_known(quantised: Path) -> None:
    """Its fields beside those that transformers writes itself."""
    file = quantised / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    for name in ("swiglu_alpha", "swiglu_limit"):
        config.pop(name, None)
    stated = {
        "experts_per_token": 3,
        "initial_context_length": 4096,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "transformers_version": "4.55.0.dev0",
    }
    file.write_text(json.dumps(config | stated))
    assert isinstance(load(quantised), Decoder)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_plain_experts_give_the_logits_of_transformers(
    norm_topk_prob: bool, is_stacked: bool, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Each expert has tensors of its own in published files; some files have them in one."""
    path = plain = tiny_model("qwen3_moe", norm_topk_prob=norm_topk_prob)
    if is_stacked:
        path = Path(shutil.copytree(plain, tmp_path / "stacked"))
        tensors = with_stacked_experts(load_file(path / "model.safetensors"))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(path=str(path), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    assert type(model) is Decoder
    assert [block.mlp.chooser is None for block in model.blocks] == [False, True, False]
    assert HAS_KERNELS or model.batch_invariant
    check_against_eager(model, plain)


def test_what_a_router_gives_may_come_in_either_order(tiny_model: Tiny) -> None:
    mlp = load(tiny_model("granitemoe"), "float32").blocks[0].mlp
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits = mlp.router_layer(x)
    routing = route(logits, mlp.router)
    for given in (
        (logits, routing.weights, routing.ids),
        (routing.ids, routing.weights, logits),
    ):
        assert mlp.chooses(x, *given)
        assert torch.equal(mlp.choosing(x, *given).choice.ids, routing.ids)


def test_a_float32_router_is_one_in_a_model_of_bfloat16(tiny_model: Tiny) -> None:
    """Two experts that are alike in bfloat16."""
    model = load(tiny_model("glm4_moe"), "bfloat16")
    assert type(model) is Decoder
    mlp = model.blocks[-1].mlp
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    logits = mlp.router_layer(x)
    assert logits.dtype == torch.float32
    exact = x.double() @ mlp.router_layer.weight.dequantised().double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_local_experts": 4}, "gate.weight is 6 x 32; by its config it must be 4 x 32"),
        ({"num_local_experts": 7}, "gate.weight is 6 x 32; by its config it must be 7 x 32"),
        ({"num_experts_per_tok": 7}, "a row takes 7 of 6 experts"),
        (
            {"moe_intermediate_size": 16},
            "gate_proj.weight is 24 x 32; by its config it must be 16 x 32",
        ),
        ("experts.3.up_proj.weight", "it lacks model.layers.0.mlp.experts.3.up_proj.weight$"),
        ("gate.weight", "it lacks model.layers.0.mlp.gate.weight$"),
    ],
)
def test_experts_that_differ_from_the_config_are_refused_by_name(
    change: dict[str, object] | str, reason: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model"))
    if isinstance(change, str):
        change_tensor(path, f"model.layers.0.mlp.{change}", None)
    else:
        change_config(path, **change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(path)


@pytest.mark.parametrize(
    "name",
    [
        "gate.bias",
        "gate.e_score_correction_bias",
        "experts.3.up_proj.bias",
        "experts.gate_up_proj_bias",
    ],
)
def test_a_bias_that_no_router_or_expert_here_has_is_refused_by_name(
    name: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model"))
    if name.startswith("experts.gate_up"):
        tensors = with_stacked_experts(load_file(path / "model.safetensors"))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    full = f"model.layers.0.mlp.{name}"
    change_tensor(path, full, torch.zeros(6))  # as some quantisers add them
    assert isinstance(load(path), Decoder)
    change_tensor(path, full, torch.ones(6))
    with pytest.raises(UnsupportedModelError, match=f"served: its files have {full}"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 0}, "a row takes 0 of 6 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "a row takes 7 of 6 experts"),
        ("glm4_moe", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("glm4_moe", {"topk_group": 1}, "a row takes 3 of 2 experts"),
        ("gpt_oss", {"num_experts_per_tok": 0}, "a row takes 0 of 2 experts"),
        (
            "qwen3_moe",
            {"scoring_func": "sigmoid"},
            "its scoring_func is sigmoid; models of type qwen3_moe have softmax",
        ),
        (
            "glm4_moe",
            {"scoring_func": "softmax"},
            "its scoring_func is softmax; models of type glm4_moe have sigmoid",
        ),
        (
            "qwen3_5_moe_text",
            {"topk_method": "noaux_tc"},
            "its topk_method is noaux_tc; models of type qwen3_5_moe_text have greedy",
        ),
    ],
)
def test_a_router_that_cannot_choose_or_is_another_is_refused(
    architecture: str, changes: dict[str, Any], reason: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Whatever transformers' code makes of it."""
    path = Path(shutil.copytree(tiny_model(architecture), tmp_path / "model"))
    change_config(path, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"cannot be served: {reason}$"):
        load(path)


@pytest.mark.parametrize(
    ("model", "given", "names"),
    [
        ("qwen3_moe", {"num_experts": 8}, "num_experts 8 and num_local_experts 6"),
        ("glm4_moe", {"num_local_experts": 9}, "num_local_experts 9 and n_routed_experts 8"),
    ],
)
def test_two_numbers_of_experts_are_refused_by_name(
    model: str, given: dict[str, int], names: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny_model(model), tmp_path / "model"))
    (other,) = given
    stated = json.loads((path / "config.json").read_text())
    right = stated["num_local_experts" if model == "qwen3_moe" else "n_routed_experts"]
    change_config(path, **{other: right})
    load(path)
    change_config(path, **given)
    with pytest.raises(ValueError, match=f"config.json has {names}, which mean the same"):
        load(path)


@pytest.mark.skipif(HAS_KERNELS, reason="a CPU's draft")
def test_a_drafts_experts_are_rounded_to_8_bits_like_its_other_layers(tiny_model: Tiny) -> None:
    config = ModelConfig(path=str(tiny_model("qwen3_moe", moe_intermediate_size=32)))
    draft = load_network(config, DEVICE, is_draft=True)
    plain = load_network(replace(config, dtype="float32"), DEVICE)
    got, expected = run_prompt(draft).logits.float(), run_prompt(plain).logits
    if compiled() is not None:
        assert draft.weight_bytes < 0.4 * plain.weight_bytes
    assert (got - expected).norm() < 0.1 * expected.norm()


@pytest.mark.skipif(DEVICE.type == "cpu" and HAS_KERNELS, reason="too slow when interpreted")
@pytest.mark.parametrize("k", [0, 3])
def test_answers_of_a_mixture_are_greedy(k: int, tiny_model: Tiny) -> None:
    target, draft = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", num_hidden_layers=1)
    asked = prompts((3, 17, 40), VOCAB)
    answers = run(Engine(engine_config(target, draft, k=k)), asked, GREEDY)
    for prompt, outputs in zip(asked, answers, strict=True):
        assert is_greedy(target, prompt, tokens(outputs))


def test_a_mixtures_router_or_experts_that_differ_are_noticed(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    path, forward = tiny_model("qwen3_moe"), theirs.Qwen3MoeTopKRouter.forward

    def worst(self: Any, x: torch.Tensor) -> Any:
        logits, weights, ids = forward(self, x)
        return logits, weights, (ids + 1) % self.num_experts

    monkeypatch.setattr(theirs.Qwen3MoeTopKRouter, "forward", worst)
    assert isinstance(load(path), HuggingFaceModel)
    assert "computes the router of layer 0 differently" in caplog.text
    monkeypatch.undo()
    experts = theirs.Qwen3MoeExperts.forward
    monkeypatch.setattr(
        theirs.Qwen3MoeExperts, "forward", lambda self, *args: experts(self, *args) * (1 + 1e-3)
    )
    assert isinstance(load(path), HuggingFaceModel)
    assert "computes layer 0 at position 0 differently" in caplog.text
