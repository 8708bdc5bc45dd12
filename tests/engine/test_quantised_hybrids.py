"""Hybrids in the formats in which they are published, and their MTP heads, quantised or not."""

from pathlib import Path

import pytest
import torch
from mtp import check_drafts, save_tiny_hybrid
from paged import PROMPT, run_prompt
from quantised import quantise
from tiny_models import DEVICE, save_tiny_model
from transformers import AutoModelForCausalLM
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models import checkpoint
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.loading import load_network
from outrider.engine.models.narrow_weight import Scaled
from outrider.engine.models.parts.delta_net import DeltaNet

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "scale": 0.1,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 32,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "moe_intermediate_size": 64,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 64,
    "scale": 0.1,
}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SMALL = ("in_proj_a", "in_proj_b")  # which nobody quantises, nor both in one
PUBLISHED = {
    "fp8 of blocks": SMALL,  # its head, too
    "gptq": ("attn", "mtp."),  # the MLPs alone
    "awq": (*SMALL, "mtp."),
    "ct 4 bits": SMALL,
    "ct fp8 of rows": (*SMALL, "mtp."),
    "modelopt mixed": (*SMALL, "mtp."),
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen3_next", "fp8 of blocks"),
        ("qwen3_5_text", "gptq"),
        *(
            pytest.param("qwen3_5_text", name, marks=pytest.mark.deep)
            for name in PUBLISHED
            if name != "gptq"
        ),
    ],
)
def test_a_hybrid_computes_what_its_codes_mean(
    architecture: str, name: str, tmp_path: Path
) -> None:
    """Those of the mixture, experts of its head among them, have matrices of their own."""
    torch.manual_seed(0)
    shape = SHAPE | EXPERTS if architecture == "qwen3_next" else SHAPE
    plain = save_tiny_hybrid(tmp_path / "plain", architecture, **shape)
    path = quantise(plain, tmp_path, name, leave=PUBLISHED[name])
    check_logits(path, tmp_path / "meant")
    check_drafts(path, tmp_path / "meant")


def check_logits(path: Path, meant: Path) -> None:
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    eager = AutoModelForCausalLM.from_pretrained(meant, attn_implementation="eager")
    with torch.inference_mode():
        expected = eager.to(DEVICE)(PROMPT[None]).logits[0]
    torch.testing.assert_close(run_prompt(network).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "architecture", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.deep)]
)
def test_a_hybrid_whose_inputs_are_rounded_computes_what_transformers_does(
    architecture: str, tmp_path: Path
) -> None:
    """Layer by layer, when it is loaded: on a GPU kernels give each other codes."""
    torch.manual_seed(0)
    shape = SHAPE | EXPERTS if architecture == "qwen3_next" else SHAPE
    plain = save_tiny_hybrid(tmp_path / "plain", architecture, **shape)
    path = quantise(plain, tmp_path, "fp8 of blocks, inputs too", leave=SMALL)
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    net = network.blocks[0].mixer
    assert isinstance(net, DeltaNet)
    assert net.inputs.weight.input_eps == net.output.weight.input_eps > 0
    if HAS_KERNELS:
        assert isinstance(net.output.weight, Scaled)
        assert net.gated_norm.rounds is not None
    assert run_prompt(network).logits.isfinite().all()


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_next"])
def test_the_inputs_of_a_delta_net_are_one_matrix_in_each_format(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which keeps their codes, whatever order the files have them in."""
    monkeypatch.setattr(checkpoint, "uses_triton", lambda _: True)
    torch.manual_seed(0)
    plain = save_tiny_hybrid(tmp_path / "plain", architecture, **SHAPE)
    path = quantise(plain, tmp_path, "ct 4 bits", leave=(*SMALL, "expert"))
    check_logits(path, tmp_path / "meant")
    network = load_network(ModelConfig(path=str(path), dtype="float32"), DEVICE)
    assert isinstance(network, Decoder)
    net = network.blocks[0].mixer
    assert isinstance(net, DeltaNet)
    given = torch.randn(3, net.inputs.weight.shape[1], device=DEVICE)
    heads = net.state.heads
    sizes = heads.num_channels, heads.num_value_heads * heads.value_dim, heads.all_scalars
    *of_codes, scalars = net.inputs.pieces_of_normed(given, None, None, sizes)
    assert of_codes[0].untyped_storage().data_ptr() == of_codes[1].untyped_storage().data_ptr()
    whole = net.inputs(given)
    assert torch.equal(torch.cat((*of_codes, scalars), 1), whole)
    # Pieces that have numbers of both matrices.
    across = net.inputs.pieces_of_normed(given, None, None, (7, whole.shape[1] - 10, 3))
    assert torch.equal(torch.cat([*across], 1), whole)
    assert [piece.shape[1] for piece in across] == [7, whole.shape[1] - 10, 3]


@pytest.mark.parametrize(
    ("name", "leave"),
    [
        ("modelopt mixed", ("q_proj", "k_proj", "v_proj", "o_proj")),  # as NVIDIA's
        *(
            pytest.param(name, (), marks=pytest.mark.deep)
            for name in ("fp8 of blocks", "awq", "ct 4 bits")
        ),
    ],
)
def test_mamba2_and_experts_without_gates_compute_what_their_codes_mean(
    name: str, leave: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = save_tiny_model(tmp_path / "plain", "nemotron_h", **NEMOTRON)
    check_logits(quantise(plain, tmp_path, name, leave=leave), tmp_path / "meant")
