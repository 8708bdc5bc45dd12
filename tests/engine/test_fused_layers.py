"""Fused decoder layers: the logits of the unmodified model, and its own code where they differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from paged import check_against_eager
from tiny_models import DEVICE, TINY
from torch import nn
from transformers import AutoModelForCausalLM
from verification import HAS_KERNELS

from outrider.engine.attention import ATTENTION_NAME, PagedContext, attention_context
from outrider.engine.config import ModelConfig
from outrider.engine.fused_layers import FusedLayer, FusedRotary, fuse_layers, one_prompt
from outrider.engine.fused_model import FusedModel, fuse_model
from outrider.engine.model_loader import dry_run, run_model
from outrider.engine.paged_model import PagedModel
from outrider.kernels import linear as linear_module
from outrider.kernels.packed_linear import PackedWeight

Tiny = Callable[..., Path]
FUSED = {"llama", "mistral", "qwen2", "qwen3"}
PRODUCTS = ("_qkv", "_o", "_gate_up", "_down")


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as it comes, but for its attention."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=ATTENTION_NAME
    ).to(DEVICE)


@pytest.mark.parametrize("architecture", sorted(TINY))
def test_layers_of_the_common_shape_are_fused(architecture: str, tiny_model: Tiny) -> None:
    path = tiny_model(architecture)
    model = PagedModel(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    fused = [m for m in model.model.modules() if isinstance(m.__dict__.get("forward"), FusedLayer)]
    assert len(fused) == (2 if architecture in FUSED else 0)
    assert isinstance(model._compute, FusedModel) == (bool(fused) and DEVICE.type == "cpu")
    if fused:
        check_against_eager(model, path)


@torch.inference_mode()
def test_biases_are_kept(tiny_model: Tiny) -> None:
    model = load(tiny_model("llama", attention_bias=True, mlp_bias=True))
    for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    assert fuse_layers(model, dry_run(model)) == 2


@pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
@torch.inference_mode()
def test_a_layer_normalises_for_the_next(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = load(tiny_model("llama")), load(tiny_model("llama"))
    own.set_attn_implementation("eager")
    assert fuse_layers(model, dry_run(model)) == 2
    called = Mock(wraps=linear_module.rms_norm)
    monkeypatch.setattr(linear_module, "rms_norm", called)
    positions = torch.arange(40, device=DEVICE)
    with attention_context(PagedContext(one_prompt(positions))):
        got = run_model(model, positions, positions, positions)
    torch.testing.assert_close(got, own(positions[None]).logits[0], rtol=1e-3, atol=1e-3)
    assert called.call_count == 1  # in front of the first layer


def test_a_layer_that_computes_something_else_keeps_its_own_code(tiny_model: Tiny) -> None:
    model = load(tiny_model("llama"))
    first, second = model.model.layers
    first.mlp.act_fn = nn.GELU()
    assert fuse_layers(model, dry_run(model)) == 1
    assert "forward" not in first.__dict__
    assert "forward" in second.__dict__


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic"])
def test_tables_that_depend_on_lengths_are_left_to_the_model(
    rope_type: str, tiny_model: Tiny
) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
    model = load(tiny_model("llama", rope_parameters=rope))
    fuse_layers(model, dry_run(model))
    fused = isinstance(model.model.rotary_emb.__dict__.get("forward"), FusedRotary)
    assert fused == (rope_type != "dynamic")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU keeps the models' own code")
def test_a_model_that_does_more_than_its_layers_keeps_its_own_code(tiny_model: Tiny) -> None:
    model = load(tiny_model("llama"))
    layers = dry_run(model)
    fuse_layers(model, layers)
    assert isinstance(fuse_model(model, layers), FusedModel)
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 1.01 * output.logits
        return output

    model.forward = scaled
    assert not isinstance(fuse_model(model, layers), FusedModel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_layer_holds_its_weights_once(dtype: torch.dtype, tiny_model: Tiny) -> None:
    model = load(tiny_model("llama"), dtype)
    layers = model.model.layers
    before = sum(p.numel() for p in layers.parameters())
    fuse_layers(model, dry_run(model))
    norms = sum(p.numel() for p in layers.parameters())
    merged = [getattr(layer.forward, name)[0] for layer in layers for name in PRODUCTS]
    weights = [w.reordered if isinstance(w, PackedWeight) else w for w in merged]
    assert norms + sum(weight.numel() for weight in weights) == before
