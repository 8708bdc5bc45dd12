"""A shared expert is stacked behind the others where its size and its format allow it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PROMPT, check_against_eager, eager_logits, run_prompt
from quantised import FORMATS, quantise
from tiny_models import DEVICE, Tiny
from torch import nn
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.one_prompt import one_prompt
from outrider.engine.models.parts.experts import ExpertMLP


def load(path: Path) -> Any:
    config = ModelConfig(path=str(path), dtype="float32")
    return load_network(config, DEVICE, batch_invariant=None)


def mixture_of(model: Any) -> ExpertMLP:
    assert type(model) is Decoder
    parts = [part for block in model.blocks for part in block.parts]
    mixtures = [part for part in parts if isinstance(part, ExpertMLP)]
    assert len({mlp.router.num_shared for mlp in mixtures}) == 1
    return mixtures[-1]


QWEN2, NEMOTRON = "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"


@pytest.mark.parametrize(
    ("architecture", "change", "num_shared"),
    [
        ("qwen2_moe", {QWEN2: 24}, 1),
        ("qwen2_moe", {QWEN2: 40}, 0),
        ("qwen2_moe", {QWEN2: 12}, 0),
        ("glm4_moe", {"n_shared_experts": 1}, 1),
        ("nemotron_h", {NEMOTRON: 72}, 3),
        ("nemotron_h", {NEMOTRON: 40}, 0),
        ("nemotron_h", {"moe_latent_size": 16}, 0),
        ("granitemoehybrid", {"shared_intermediate_size": 64}, 1),
        ("granitemoehybrid", {"shared_intermediate_size": 40}, 0),
    ],
)
def test_one_as_wide_as_several_is_several(
    architecture: str, change: dict[str, int], num_shared: int, tiny_model: Tiny
) -> None:
    """Any other is a layer by itself; both compute what transformers does."""
    path = tiny_model(architecture, **change)
    model = load(path)
    mlp = mixture_of(model)
    assert mlp.router.num_shared == num_shared
    assert (mlp.shared is None) == (num_shared > 0)
    check_against_eager(model, path)


@pytest.mark.parametrize(
    ("name", "leave", "change", "is_stacked"),
    [
        ("fp8 of blocks", (), {}, True),
        ("fp8 of blocks", (), {QWEN2: 128}, True),
        ("fp8 of tensors", (), {QWEN2: 128}, True),
        ("ct fp8 of rows", (), {QWEN2: 128}, True),
        ("ct int8", (), {}, True),
        ("awq", (), {QWEN2: 128}, True),
        ("gptq", (), {}, True),
        ("ct mxfp4", (), {QWEN2: 128}, True),
        ("modelopt nvfp4", (), {QWEN2: 128}, True),
        ("gptq", ("shared_expert.",), {}, False),  # as some are published
        ("ct mxfp4", ("shared_expert.down",), {}, False),
        ("fp8 of blocks", ("shared_expert.gate",), {}, False),
    ],
)
def test_one_in_the_format_of_the_others_is_stacked(
    name: str,
    leave: tuple[str, ...],
    change: dict[str, int],
    is_stacked: bool,
    tiny_model: Tiny,
    tmp_path: Path,
) -> None:
    """On a CPU each expert may have a format of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, QWEN2: 64, "intermediate_size": 64}
    plain = tiny_model("qwen2_moe", scale=0.1, **sizes | change)
    model = load(quantise(plain, tmp_path, name, leave=leave))
    mlp = mixture_of(model)
    assert (mlp.shared is None) == (is_stacked or not HAS_KERNELS)
    if HAS_KERNELS:
        assert all(layer.weight.format for layer in (mlp.first, mlp.down))
    expected = eager_logits(tmp_path / "meant", FORMATS[name].inputs)
    torch.testing.assert_close(run_prompt(model).logits, expected, rtol=1e-3, atol=1e-3)


def test_no_second_copy_is_kept(tiny_model: Tiny) -> None:
    mlp = mixture_of(load(tiny_model("qwen2_moe")))
    assert mlp.linears.keys() == {"router_layer", "first", "down"}
    assert mlp.first.weight.shape == ((6 + 2) * 2 * 24, 32)
    assert mlp.down.weight.shape == ((6 + 2) * 32, 24)
    assert mlp.router_layer.weight.shape == (16, 32)  # with its gate, and made even
    assert mlp.first.weight.num_bytes == (2 + 2) * 2 * 24 * 32 * 4  # of the experts of a row


@pytest.mark.parametrize("size", [48, 40])
def test_one_that_differs_is_noticed(
    size: int, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as theirs

    path = tiny_model("qwen2_moe", **{QWEN2: size})
    forward = theirs.Qwen2MoeMLP.forward
    monkeypatch.setattr(
        theirs.Qwen2MoeMLP, "forward", lambda self, x: forward(self, x) * (1 + 1e-3)
    )
    with pytest.raises(UnsupportedModelError, match="computes layer 0 at position 0 differently"):
        load(path)
    monkeypatch.undo()
    linear = nn.Linear.forward

    def of_gate(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(self, x) + 1e-2 * (self.out_features == 1)

    monkeypatch.setattr(nn.Linear, "forward", of_gate)
    with pytest.raises(UnsupportedModelError, match="computes layer 0 at position 0 differently"):
        load(path)


# On a GPU the library multiplies a router's float32, and not alike in any company.
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a promise of the CPU's own path")
@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["qwen2_moe", "glm4_moe"])
def test_a_row_comes_out_the_same_in_any_company(architecture: str, tiny_model: Tiny) -> None:
    mlp = mixture_of(load(tiny_model(architecture)))
    x = torch.randn(len(PROMPT), 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def outputs(rows: slice) -> torch.Tensor:
        y = x[rows].clone()
        mlp(y, None, None, one_prompt(PROMPT[rows]))
        return y

    whole = outputs(slice(None))
    for rows in (slice(0, 1), slice(3, 5), slice(7, 24), slice(1, 40)):
        assert torch.equal(outputs(rows), whole[rows])
