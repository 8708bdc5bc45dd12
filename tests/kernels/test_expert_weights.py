"""Experts of a quantised checkpoint, stacked for the kernels, multiply as their codes mean."""

from pathlib import Path

import pytest
import torch
from quantised import FORMATS, quantise
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from torch import Tensor
from verification import DEVICE, HAS_KERNELS

from outrider.engine.api import ignore_progress
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.checkpoint import Checkpoint
from outrider.engine.models.expert_weights import ExpertWeights, StackedExperts, read_experts
from outrider.engine.models.formats import FORMATS as READERS
from outrider.kernels.model.expert_matrix import SILU
from outrider.kernels.model.experts import ExpertProduct, activations_by_expert, add_by_expert
from outrider.kernels.model.routing import Router, route

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")
EXPERTS = "model.layers.0.mlp.experts"
WIDTH, INNER = 192, 160  # blocks of 128 end within a matrix
SHAPE = {"hidden_size": WIDTH, "moe_intermediate_size": INNER, "head_dim": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("plain"),
        "qwen3_moe",
        scale=0.1,
        num_hidden_layers=1,
        mlp_only_layers=[],
        **SHAPE,
    )


def read(path: Path, name: str, stored: str, sizes: dict[str, int], num_in: int) -> ExpertWeights:
    config = FORMATS[name].config
    reader = READERS[config["quant_method"]](config)
    tensors = Checkpoint(path, torch.float32, DEVICE, ignore_progress, read=reader)
    layer = read_experts(
        tensors, EXPERTS, stored, sizes, num_experts=6, num_inputs=num_in, axis="outputs"
    )
    return layer.stacked(tensors, Router(2)).weight


@pytest.mark.parametrize(
    "name",
    ["fp8 of blocks, inputs too", "ct fp8 of rows, inputs too", "ct 4 bits, zero points", "gptq"],
)
def test_stacked_experts_are_those_that_the_codes_mean(
    name: str, plain: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = quantise(plain, tmp_path, name)
    rounds = name == "fp8 of blocks, inputs too"
    both = {"gate_proj": INNER, "up_proj": INNER}
    gate_up = read(path, name, "gate_up_proj", both, WIDTH)
    down = read(path, name, "down_proj", {"down_proj": WIDTH}, INNER)
    assert type(gate_up) is StackedExperts
    meant = load_file(tmp_path / "meant/model.safetensors")

    def product(*parts: str) -> ExpertProduct:
        def multiply(expert: int, rows: Tensor) -> Tensor:
            matrices = [meant[f"{EXPERTS}.{expert}.{part}.weight"].to(rows) for part in parts]
            rows = FORMATS[name].inputs(rows) if rounds else rows
            return rows @ torch.cat(matrices).t()

        return multiply

    generator = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(5, n, generator=generator).to(DEVICE) for n in (WIDTH, 6))
    routing = route(logits, Router(2))
    got, expected = torch.zeros_like(x), torch.zeros_like(x)
    gated = gate_up.activations(x, routing, None, SILU, down.row_format)
    down.add_to(got, gated, routing, None, None)
    gated = activations_by_expert(x, routing, product("gate_proj", "up_proj"), INNER, SILU)
    add_by_expert(expected, gated, routing, product("down_proj"))
    # The least difference may turn a code to the next one.
    assert (got - expected).norm() < (1e-3 if rounds else 1e-5) * expected.norm()


@pytest.mark.parametrize(
    ("name", "leave", "reason"),
    [
        ("gptq, act-order", (), r"an order of their own \(act-order, desc_act\)"),
        ("ct fp8 of rows", ("experts.3",), "several formats"),
    ],
)
def test_experts_that_no_kernel_takes_are_refused_by_name(
    name: str, leave: tuple[str, ...], reason: str, plain: Path, tmp_path: Path
) -> None:
    path = quantise(plain, tmp_path, name, leave=leave)
    with pytest.raises(UnsupportedModelError, match=f"layers.0.mlp.experts: .*{reason}"):
        read(path, name, "down_proj", {"down_proj": WIDTH}, INNER)
