"""Fused decoder layers: the logits of the unmodified model, and its own code where they differ."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged import check_against_eager
from tiny_models import DEVICE, TINY
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine import model_loader
from outrider.engine.attention import ATTENTION_NAME
from outrider.engine.config import ModelConfig
from outrider.engine.fused_layers import fuse_layers
from outrider.engine.model_loader import dry_run
from outrider.engine.paged_model import PagedModel

Tiny = Callable[..., Path]
FUSED = {"llama", "mistral", "qwen2", "qwen3"}


@pytest.fixture
def plain_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load on a CPU as on a GPU: with linear layers as they are."""
    monkeypatch.setattr(model_loader, "pack_linears", lambda model: 0)


@pytest.mark.parametrize("architecture", sorted(TINY))
@pytest.mark.usefixtures("plain_linears")
def test_layers_of_the_common_shape_are_fused(architecture: str, tiny_model: Tiny) -> None:
    path = tiny_model(architecture)
    model = PagedModel(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    num_fused = fuse_layers(model.model, model._layers)
    assert num_fused == (2 if architecture in FUSED else 0)
    if num_fused:
        check_against_eager(model, path)


@torch.inference_mode()
@pytest.mark.usefixtures("plain_linears")
def test_biases_are_kept(tiny_model: Tiny) -> None:
    path = tiny_model("llama", attention_bias=True, mlp_bias=True)
    model = PagedModel(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    layers = [module for module in model.model.modules() if hasattr(module, "self_attn")]
    for bias in (p for name, p in model.model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    for layer in layers:
        layer.__dict__.pop("forward", None)
    assert fuse_layers(model.model, model._layers) == 2


def test_a_layer_that_computes_something_else_keeps_its_own_code(tiny_model: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama"), dtype=torch.float32, attn_implementation=ATTENTION_NAME
    ).to(DEVICE)
    first, second = model.model.layers
    first.mlp.act_fn = nn.GELU()
    assert fuse_layers(model, dry_run(model)) == 1
    assert "forward" not in first.__dict__
    assert "forward" in second.__dict__


def test_merged_weights_are_shared_with_the_layers_own(tiny_model: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("llama"), dtype=torch.float32, attn_implementation=ATTENTION_NAME
    ).to(DEVICE)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fuse_layers(model, dry_run(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    attention = model.model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
