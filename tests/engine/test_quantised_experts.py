"""Mixtures of experts in quantised checkpoints, or rounded while they load."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged import eager_logits, run_prompt
from quantised import FORMATS, quantise, quantise_stacked
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, Tiny, change_tensor, with_stacked_experts
from torch import Tensor
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models import weights as weights_module
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.expert_weights import SeparateExperts, StackedExperts
from outrider.engine.models.loading import load_network
from outrider.engine.models.weights import Dense, RoundedInputs
from outrider.kernels.model.expert_matrix import SILU
from outrider.kernels.model.narrow_matrix import RowFormat
from outrider.kernels.model.routing import Router, route
from outrider.kernels.model.row_codes import rounded_rows


def load(path: Path) -> Any:
    return load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)


PUBLISHED = {  # for what models
    "awq": "qwen3_moe",
    "gptq": "qwen3_moe",
    "gptq, zero points": "qwen3_moe",
    "fp8 of blocks, inputs too": "qwen3_moe",
    "fp8 of tensors": "mixtral",
    "ct fp8 of rows, inputs too": "glm4_moe",
    "ct 4 bits": "glm4_moe",
    "ct 4 bits, zero points": "qwen3_moe",
    "ct int8": "qwen3_moe",
    "ct mxfp4": "qwen3_moe",
    "ct nvfp4": "glm4_moe",
    "modelopt mixed": "qwen3_moe",
}
WIDE = {"hidden_size": 192, "head_dim": 32, "num_hidden_layers": 2}
INNER = {"moe_intermediate_size": 192, "intermediate_size": 320, "n_shared_experts": 1}


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_in_any_format_are_those_that_the_codes_mean(
    name: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Inputs are rounded if the format says so; those of experts only in blocks of FP8."""
    torch.manual_seed(0)
    architecture = PUBLISHED[name]
    inner = {"intermediate_size": 192} if architecture == "mixtral" else INNER
    plain = tiny_model(architecture, scale=0.1, **WIDE, **inner)
    network = load(quantise(plain, tmp_path, name))
    assert type(network) is Decoder
    got = run_prompt(network).logits
    rounds = name == "fp8 of blocks, inputs too"
    expected = eager_logits(tmp_path / "meant", FORMATS[name].inputs, of_experts=rounds)
    if "inputs too" in name:  # the least difference may turn a code to the next one
        rounding = (expected - eager_logits(tmp_path / "meant")).norm()
        # Without rounding it is 1. Noise of a millionth makes 0.2 to 0.5, and a GPU has more.
        turned = 0.7 if DEVICE.type == "cuda" else 0.2
        assert (got - expected).norm() < turned * rounding
        assert 0.2 * rounding < 0.04 * expected.norm()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    mlp = next(block.mlp for block in network.blocks if block.mlp.chooser)
    weights = [mlp.first.weight, mlp.down.weight]
    assert all((weight.input_eps > 0) == rounds for weight in weights)
    assert mlp.norm is not None
    assert (mlp.norm.rounds is not None) == (rounds and HAS_KERNELS)
    if HAS_KERNELS:
        assert all(type(weight) is StackedExperts and weight.format for weight in weights)
        num_shared = mlp.router.num_shared
        num_experts = mlp.router_layer.weight.shape[0] + num_shared  # none has a gate
        taken = (mlp.router.top_k + num_shared) / num_experts
        num_numbers = sum(weight.shape[0] * weight.shape[1] for weight in weights) * taken
        bits = 8 * sum(weight.num_bytes for weight in weights) / num_numbers
        # Of the mixed ones, those that do not widen are in FP8.
        assert bits < 9 if "8" in name or "mixed" in name else bits <= 6


@pytest.mark.parametrize("name", ["fp8 of blocks", "modelopt nvfp4"])
def test_experts_of_a_layer_may_share_their_tensors_in_any_format(
    name: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = tiny_model("qwen3_moe", scale=0.1, hidden_size=64, moe_intermediate_size=48)
    path = quantise_stacked(plain, tmp_path, name)
    network = load(path)
    assert type(network) is Decoder
    expected = eager_logits(tmp_path / "meant")
    torch.testing.assert_close(run_prompt(network).logits, expected, rtol=1e-3, atol=1e-3)
    assert (eager_logits(plain) - expected).norm() > 1e-2 * expected.norm()
    whole = "model.layers.0.mlp.experts.gate_up_proj"
    change_tensor(path, whole, lambda tensor: tensor[:5].clone())
    with pytest.raises(UnsupportedModelError, match=f"of experts of {whole} is 5; .* must be 6"):
        load(path)
    change_tensor(path, whole, lambda tensor: torch.cat((tensor, tensor[:1])))
    scale = f"{whole}_{'scale_inv' if 'fp8' in name else 'weight_scale_2'}"
    change_tensor(path, scale, lambda tensor: tensor.flatten()[0].clone())
    with pytest.raises(UnsupportedModelError, match=rf"{scale} is \(\), which has no entry 0"):
        load(path)


def test_plain_experts_that_share_a_tensor_are_rounded_on_the_way(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    plain = tiny_model("qwen3_moe", scale=0.1)
    path = Path(shutil.copytree(plain, tmp_path / "stacked"))
    tensors = with_stacked_experts(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    each, together = (
        load_network(ModelConfig(path=str(of), dtype="float32", quantization="fp8"), DEVICE)
        for of in (plain, path)
    )
    expected = each.blocks[0].mlp.first.weight.dequantised()
    assert torch.equal(together.blocks[0].mlp.first.weight.dequantised(), expected)
    whole = tensors["model.layers.0.mlp.experts.gate_up_proj"].flatten(0, 1).to(DEVICE)
    assert 1e-3 < (expected - whole).norm() / whole.norm() < 0.05


@pytest.mark.parametrize("is_draft", [False, True])
def test_plain_experts_are_rounded_on_the_way_but_not_their_router(
    is_draft: bool, tiny_model: Tiny
) -> None:
    path = tiny_model("glm4_moe", scale=0.1)
    config = ModelConfig(path=str(path), dtype="float32", quantization="fp8")
    network = load_network(config, DEVICE, is_draft=is_draft)
    assert type(network) is Decoder
    plain = load(path).blocks[-1].mlp
    mlp = network.blocks[-1].mlp
    assert torch.equal(
        mlp.router_layer.weight.dequantised(), plain.router_layer.weight.dequantised()
    )
    rounded, whole = mlp.down.weight.dequantised(), plain.down.weight.dequantised()
    assert 1e-3 < (rounded - whole).norm() / whole.norm() < 0.05


@pytest.mark.skipif(HAS_KERNELS, reason="of a CPU")
def test_a_row_is_rounded_once_for_all_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, row_format = torch.randn(4, 64, 128), RowFormat(torch.float8_e4m3fn, 128, 1, 128)
    experts = SeparateExperts([RoundedInputs(Dense(each), row_format) for each in matrices], 2)
    rounded: list[tuple[int, ...]] = []

    def counted(x: Tensor, format_: RowFormat) -> Tensor:
        rounded.append(tuple(x.shape))
        return rounded_rows(x, format_)

    monkeypatch.setattr(weights_module, "rounded_rows", counted)
    x, routing = torch.randn(5, 128), route(torch.randn(5, 4), Router(2))
    got = experts.activations(x, routing, None, SILU, None)
    assert rounded == [(5, 128)]
    assert isinstance(got, Tensor)
    gate, up = (
        matrices[routing.ids.flatten().long()]
        @ rounded_rows(x, row_format).repeat_interleave(2, 0)[..., None]
    )[..., 0].chunk(2, 1)
    torch.testing.assert_close(got, F.silu(gate) * up, rtol=1e-4, atol=1e-4)
