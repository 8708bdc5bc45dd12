"""How hybrids are read, and what of them is refused."""

import json
import logging
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engines import engine_config
from mtp import as_published
from paged import PROMPT, check_against_eager, run_prompt
from tiny_models import DEVICE, Tiny, change_config, change_tensor, save_tiny_model
from transformers import AutoModelForCausalLM

from outrider.engine.config import ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.architectures import load_config
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.heads.config import HeadError
from outrider.engine.models.heads.loading import load_head
from outrider.engine.models.loading import load_network
from outrider.engine.models.parts import delta_net, mamba2
from outrider.engine.models.weight_files import stored_tensors


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3_5_text")


@pytest.fixture
def own(target: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(target, tmp_path / "own")


def test_a_quantised_text_keeps_its_format(target: Path, tmp_path: Path) -> None:
    path = as_published(target, tmp_path / "published")
    change_config(path, quantization_config={"quant_method": "unheard-of"})
    assert load_config(path).quantization_config["quant_method"] == "unheard-of"
    with pytest.raises(UnsupportedModelError, match="unheard-of"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_norms_are_one_more_than_stored(is_tied: bool, tmp_path: Path) -> None:
    """Also in 16 bits, where 1 + w would lose most of a small w."""
    path = save_tiny_model(tmp_path, "qwen3_5_text", tie_word_embeddings=is_tied)
    change_tensor(path, "model.norm.weight", torch.full((32,), 2.0**-12))
    network = load_network(ModelConfig(path=str(path), dtype="bfloat16"), DEVICE)
    assert isinstance(network, Decoder)
    assert network.norm.weight.unique().tolist() == [1 + 2.0**-12]
    assert network.dtype == torch.bfloat16


def test_no_package_is_advised_that_we_have_no_use_for(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers' own
    of_transformers = logging.getLogger("transformers")
    of_transformers.addHandler(caplog.handler)
    try:
        load_network(ModelConfig(path=str(target), dtype="float32"), DEVICE)
    finally:
        of_transformers.removeHandler(caplog.handler)
    assert "install" not in caplog.text


def test_as_a_draft_it_is_refused(target: Path, tiny_model: Tiny) -> None:
    with pytest.raises(UnsupportedModelError, match="as a draft model it would go back"):
        Engine(engine_config(tiny_model("llama"), target))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_ssm_dtype": "bfloat16"}, "its state is kept in bfloat16"),
        ({"mamba_ssm_cache_dtype": "float16"}, "its state is kept in float16"),
        ({"linear_num_key_heads": 3}, "4 value heads cannot share 3 key heads"),
        ({"attn_output_gate": False}, "its attention has no gate"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"linear_key_head_dim": 11}, r"A_log|in_proj_qkv|conv1d"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    changes: dict[str, object], says: str, own: Path
) -> None:
    check_refused(own, changes, says)


@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}]
)
def test_what_transformers_does_not_read_of_a_config_may_not_differ_from_what_it_does(
    changes: dict[str, object], tiny_model: Tiny, tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("qwen3_5_moe_text"), tmp_path / "own")
    (name,) = changes
    as_it_is = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    change_config(path, **as_it_is)
    load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    change_config(path, **changes)
    says = f"served: its {name} is .*; models of type qwen3_5_moe_text have "
    with pytest.raises(UnsupportedModelError, match=says):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


def test_a_bias_that_no_convolution_here_has_is_refused_by_name(own: Path) -> None:
    name = "model.layers.0.linear_attn.conv1d.bias"
    change_tensor(own, name, torch.ones(80))
    with pytest.raises(UnsupportedModelError, match=f"served: .* its files have {name}"):
        load_network(ModelConfig(path=str(own), dtype="float32"), DEVICE)


def check_refused(path: Path, changes: dict[str, object], says: str) -> None:
    change_config(path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"only our own decoder keeps.*{says}"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "its state is kept in bfloat16"),
        ({"n_groups": 3}, "4 heads of Mamba2 cannot share 3 groups"),
        ({"time_step_limit": [0.01, 10.0]}, r"its time steps are limited to \(0\.01, 10\.0\)"),
        ({"moe_latent_size": 16}, "mixer.fc1_latent_proj.weight"),
        ({"residual_in_fp32": True}, "its config has residual_in_fp32"),
        ({"mlp_hidden_act": "silu"}, "its activation is silu"),
        ({"ssm_state_size": 11}, r"conv1d\.weight is 80 x 1 x 4"),
        ({"mamba_head_dim": 16}, r"conv1d\.weight is 80 x 1 x 4"),
    ],
)
def test_what_is_not_served_of_mamba2_is_refused_by_name(
    changes: dict[str, object], says: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("nemotron_h"), tmp_path / "own")
    check_refused(path, changes, says)


@pytest.mark.parametrize(
    ("architecture", "part"), [("qwen3_5_text", delta_net), ("nemotron_h", mamba2)]
)
def test_a_state_that_differs_from_transformers_is_refused(
    architecture: str, part: ModuleType, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the comparison allows for a layer that enlarges rounding."""
    ours, path = part.gated_norm, tiny_model(architecture)

    def off(*args: Any, **options: Any) -> torch.Tensor:
        y: torch.Tensor = ours(*args, **options)
        return y * (1 + 1e-4)

    monkeypatch.setattr(part, "gated_norm", off)
    with pytest.raises(UnsupportedModelError, match="computes layer 0 at position 0 differently"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


def test_nemotron_is_read_as_it_is_published(
    tiny_model: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layers are a pattern, and its MTP head, which is not read, lies in the same files."""
    path = shutil.copytree(tiny_model("nemotron_h"), tmp_path / "own")
    config = json.loads((path / "config.json").read_text())
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "ME*M-", "num_hidden_layers": 5}
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (path / "config.json").write_text(json.dumps(config | {"time_step_limit": [0.0, torch.inf]}))
    change_tensor(path, "mtp.layers.0.eh_proj.weight", torch.ones(4, 8))
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, tiny_model("nemotron_h"))
    assert "not read" not in caplog.text
    with pytest.raises(HeadError, match="no MTP head is known for models of type nemotron_h"):
        load_head(ModelConfig(path=str(path), is_mtp=True), network, str(path))


def test_experts_may_compute_in_a_smaller_space(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "nemotron_h", moe_latent_size=12)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, path)


@pytest.mark.parametrize("rope", [None, "rope"])
def test_granites_hybrids_may_have_no_experts(rope: str | None, tmp_path: Path) -> None:
    options = {"num_local_experts": 0, "position_embedding_type": rope}
    path = save_tiny_model(tmp_path, "granitemoehybrid", **options)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    check_against_eager(network, path)


@torch.inference_mode()
def test_time_steps_of_mamba2_have_no_least(tmp_path: Path) -> None:
    """As transformers computes one token after the other, though it does not compute prompts so."""
    path = save_tiny_model(tmp_path, "nemotron_h", time_step_min=0.1)
    for name in stored_tensors(path):
        if name.endswith("dt_bias"):
            change_tensor(path, name, torch.tensor([-6.0, 0.0, -3.0, -4.0]))
    ours = run_prompt(load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)).logits
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").to(DEVICE)
    assert (eager(PROMPT[None]).logits[0] - ours).norm() > 0.01 * ours.norm()
    for module in eager.modules():  # the first token has no state yet, so it is a prompt, too
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, torch.inf)
    cache, expected = None, []
    for token in PROMPT:
        output = eager(token.view(1, 1), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        expected.append(output.logits[0, 0])
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_another_model_with_a_state_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    change_config(path, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match=r"qwen3.*state.* layers of type linear"):
        load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
