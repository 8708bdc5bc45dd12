"""GGUF files of Qwen3 and its kin keep their width on a CPU, and mean what the file says."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_models import save_gguf
from mtp import check_drafts, save_tiny_hybrid
from paged import PROMPT, run_prompt
from tiny_models import DEVICE, save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.compiled_decoder import CompiledDecoder
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.expert_weights import SeparateExperts
from outrider.engine.models.gguf_architectures import HybridFile, architecture_of
from outrider.engine.models.gguf_checkpoint import missing_tensors, why_misread, why_unpacked
from outrider.engine.models.gguf_file import GgufFile
from outrider.engine.models.heads.config import HeadError, mtp_names
from outrider.engine.models.loading import load_network
from outrider.engine.models.narrow_weight import Stacked
from outrider.engine.models.parts.experts import ExpertMLP
from outrider.engine.models.weights import Tiles
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.cpu.packing import Codes
from outrider.kernels.model.routing import routing_of

needs_layers = pytest.mark.skipif(
    compiled() is None or DEVICE.type != "cpu" or HAS_KERNELS,
    reason="no layers were compiled here, or they are not asked",
)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "scale": 0.1}
EXPERTS = {"moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": WIDE,
    "qwen3_moe": WIDE | EXPERTS | {"mlp_only_layers": []},
    "qwen3_5_text": WIDE | DELTA,
    "qwen3_5_moe_text": WIDE | EXPERTS | SHARED | DELTA,
}
TYPES = (Type.Q4_1, Type.Q8_0, Type.Q4_0)


def save(folder: Path, architecture: str, **changes: Any) -> Path:
    plain = save_tiny_model(folder / "plain", architecture, **SHAPES[architecture])
    return save_gguf(plain, folder, TYPES, **changes)


def load(path: Path, dtype: str = "float32") -> Any:
    return load_network(ModelConfig(path=str(path), dtype=dtype), DEVICE)


def logits_of(path: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").to(DEVICE)
    with torch.inference_mode():
        logits: Tensor = model(PROMPT[None]).logits[0]
    return logits


@pytest.mark.parametrize("architecture", SHAPES)
def test_logits_are_those_of_the_unpacked_model(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value heads of the hybrids lie in another order in the file, since they outnumber the key
    heads.
    """
    path = save(tmp_path, architecture)
    network = load(path)
    assert isinstance(network, Decoder)
    expected = logits_of(tmp_path / "meant")
    error = (run_prompt(network).logits - expected).norm() / expected.norm()
    assert error < 3e-4
    assert (logits_of(tmp_path / "plain") - expected).norm() > 0.1 * expected.norm()
    if compiled() is None or DEVICE.type != "cpu" or HAS_KERNELS:
        return
    assert isinstance(network, CompiledDecoder) == (architecture == "qwen3")
    kept = (Tiles, Stacked, SeparateExperts)
    assert all(isinstance(linear.weight, kept) for linear in network.linears)
    file = GgufFile(path / "model.gguf")
    assert why_unpacked(file) is None
    assert (missing_tensors(file), why_misread(file)) == ([], None)
    for block in network.blocks:
        if isinstance(mlp := block.mlp, ExpertMLP):
            assert 8 * mlp.down.weight.num_bytes / (64 * 32 * mlp.router.top_k) <= 9
            check_reads_only_chosen(mlp, monkeypatch)


def check_reads_only_chosen(mlp: ExpertMLP, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[Tiles] = []
    product = Tiles._product

    def counting(self: Tiles, x: Tensor, bias: Tensor | None) -> Tensor:
        multiplied.append(self)
        return product(self, x, bias)

    weight = mlp.down.weight
    assert isinstance(weight, SeparateExperts)
    with monkeypatch.context() as patch:
        patch.setattr(Tiles, "_product", counting)
        ids = torch.tensor([[3, 1]], dtype=torch.int32)
        routing = routing_of(ids, torch.ones(1, 2), 6)
        weight.add_to(torch.zeros(1, 64), torch.ones(2, 32), routing, None, None)
    assert multiplied == [weight._weights[1], weight._weights[3]]


def test_bfloat16_proves_itself(tmp_path: Path) -> None:
    assert type(load(save(tmp_path, "qwen3_5_moe_text"), "bfloat16")) is Decoder


def test_an_mtp_head_in_the_file_drafts_what_its_codes_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = save_tiny_hybrid(tmp_path / "plain", "qwen3_5_text", **SHAPES["qwen3_5_text"])
    path = save_gguf(plain, tmp_path, (Type.Q8_0,))
    assert why_misread(GgufFile(path / "model.gguf")) is None
    caplog.set_level(logging.WARNING)
    check_drafts(path, tmp_path / "meant")
    assert "not read" not in caplog.text
    with pytest.raises(HeadError, match="its files hold no MTP head"):
        mtp_names(save(tmp_path / "none", "qwen3_5_text"))
    (path / "model.gguf").write_bytes(b"no GGUF file")
    with pytest.raises(HeadError, match="no GGUF file"):
        mtp_names(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blk.0.ssm_a": torch.ones(4)}, "blk.0.ssm_a must be below 0"),
        (
            {"blk.0.ssm_out.weight": torch.ones(64, 96)},
            "out_proj.weight is 64 x 96; by its config it must be 64 x 128",
        ),
        (
            {"blk.0.attn_qkv.weight": torch.ones(160, 64)},
            "in_proj_qkv.weight is 160 x 64; by its config it must be 192 x 64",
        ),
        ({"blk.0.ssm_dt.bias": torch.ones(3)}, "ssm_dt.bias has 3 columns; .* must have 4"),
        ({"blk.1.attn_q_norm.weight": None}, "lacks: model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_a_broken_hybrid_is_refused_by_name(
    change: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    path = save(tmp_path, "qwen3_5_text", **change)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(path)


def test_another_number_of_experts_than_the_files_own_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3_moe", **{"blk.0.ffn_up_exps.weight": torch.ones(7, 32, 64)})
    with pytest.raises(
        UnsupportedModelError, match=r"blk\.0\.ffn_up_exps\.weight has 7 experts; .* must have 6"
    ):
        load(path)


def test_tensors_that_a_file_lacks_or_has_too_many_of_are_named(tmp_path: Path) -> None:
    names = ("blk.0.ssm_a", "blk.1.attn_k.weight", "blk.2.ffn_up_exps.weight")
    changes = dict.fromkeys(names)
    path = save(
        tmp_path, "qwen3_5_moe_text", **changes, **{"blk.0.exp_probs_b.bias": torch.ones(6)}
    )
    file = GgufFile(path / "model.gguf")
    assert {*missing_tensors(file)} == {*names}
    assert why_misread(file) == "blk.0.exp_probs_b.bias"


def test_groups_that_value_heads_would_tear_apart_are_unpacked() -> None:
    metadata = {
        "general.architecture": "qwen35", "qwen35.ssm.group_count": 2,
        "qwen35.ssm.time_step_rank": 4, "qwen35.ssm.state_size": 8, "qwen35.ssm.inner_size": 64,
    }  # fmt: skip
    architecture = architecture_of(metadata)
    assert isinstance(architecture, HybridFile)
    generator = torch.Generator().manual_seed(0)
    codes = Codes(torch.randint(0, 16, (3, 64), generator=generator), torch.rand(3, 2))
    got = architecture.restored(
        architecture.place("model.layers.0.linear_attn.out_proj.weight"), codes
    )
    assert got.scale is None
    heads = codes.dequantised().view(3, 2, 2, 16)  # of the file: value heads, then key heads
    assert torch.equal(got.codes, heads.transpose(1, 2).flatten(1))
