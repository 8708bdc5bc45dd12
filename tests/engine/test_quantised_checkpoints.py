"""Checkpoints in every quantised format compute what their plain models would, or are refused."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import check_against_eager, eager_logits, run_prompt
from quantised import FORMATS, quantise
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, Tiny, change_config, change_tensor
from verification import HAS_KERNELS

from outrider.engine.config import ModelConfig
from outrider.engine.models import narrow_weight
from outrider.engine.models.admission import UnsupportedModelError
from outrider.engine.models.checkpoint import Checkpoint
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.formats import fp8
from outrider.engine.models.loading import load_network
from outrider.engine.models.narrow_weight import Narrow, Scaled, Stacked, check_fp8
from outrider.engine.models.weights import Dense, Linear
from outrider.kernels.model.narrow_matrix import round_to_fp8

# Blocks of 128 end within a matrix, and the merged q, k, v begin within one.
KINDS = ("fp8", "int8", "int4", "fp4", "nvfp4", "fp8, mixed, nvfp4")
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture
def plain(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3", scale=0.1, **SHAPE)


def load(path: Path, **options: Any) -> Any:
    config = ModelConfig(path=str(path), dtype="float32", **options)
    return load_network(config, DEVICE)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_matrices_that_the_codes_mean(
    name: str, plain: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = quantise(plain, tmp_path, name)
    network = load(path)
    assert isinstance(network, Decoder)
    got = run_prompt(network).logits
    expected = eager_logits(tmp_path / "meant", FORMATS[name].inputs)
    rounds_inputs = "inputs too" in name
    if rounds_inputs:  # the least difference may turn a code to the next one, here and there
        rounding = (expected - eager_logits(tmp_path / "meant")).norm()
        # A GPU's tensor cores add e4m3 with 14 bits; other codes would be 1.4 away.
        assert (got - expected).norm() < 0.7 * rounding < 0.14 * expected.norm()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    difference = (expected - eager_logits(plain)).norm() / expected.norm()
    assert difference > 1e-2  # the formats round, or the test would prove nothing
    weights = [linear.weight for linear in network.blocks[0].linears]
    assert all((weight.input_eps > 0) == rounds_inputs for weight in weights)
    kinds = [f"{kind} (inputs too)" if rounds_inputs else kind for kind in KINDS]
    assert network.weight_formats in (kinds if HAS_KERNELS else [""])
    if HAS_KERNELS:
        kept = Scaled if rounds_inputs else Stacked if "mixed" in name else Narrow
        assert all(type(weight) in (kept, Narrow) for weight in weights)
        meant = load_file(tmp_path / "meant/model.safetensors")
        num_weights = sum(len(t.flatten()) for key, t in meant.items() if "_proj" in key)
        head = network.output_layer.weight.num_bytes
        most = 1.3 if "8" in name or "int8" in name else 0.8
        assert network.weight_bytes - head < most * num_weights


@pytest.mark.parametrize("name", ["fp8 of blocks", "gptq, act-order", "ct 4 bits"])
def test_layers_that_were_left_out_stay_plain(name: str, plain: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = quantise(plain, tmp_path, name, leave=("k_proj", "up_proj", "1.mlp.down_proj"))
    network = load(path)
    got = run_prompt(network).logits
    expected = eager_logits(tmp_path / "meant")
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    if HAS_KERNELS:
        assert isinstance(network.blocks[0].mixer.qkv.weight, Stacked)
        assert network.weight_formats == ("fp8" if name == "fp8 of blocks" else "int4") + ", mixed"
        assert type(network.blocks[0].mlp.down.weight) is Narrow


def test_steps_of_every_kind(plain: Path, tmp_path: Path) -> None:
    path = quantise(plain, tmp_path, "ct fp8 of rows")
    config = ModelConfig(path=str(path), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    check_against_eager(model, tmp_path / "meant")


@pytest.mark.parametrize(
    ("width", "rounds_inputs"), [(128, True), (256, True), (384, False), (640, True)]
)
def test_inputs_are_rounded_where_blocks_are_as_wide_as_the_kernels_take(
    width: int, rounds_inputs: bool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(16, 640, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(1, -(-640 // width), generator=generator)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    stated = {"weight_block_size": [128, width], "activation_scheme": "dynamic"}
    checkpoint = Checkpoint(
        tmp_path, torch.float32, DEVICE, lambda *_: None, read=fp8.reader(stated)
    )
    weight = checkpoint.linear(640, {"a": 16}).weight
    assert (weight.input_eps > 0) == rounds_inputs
    x = torch.randn(3, 640, generator=generator).to(DEVICE)
    expected = x @ weight.dequantised().t()
    assert (weight.multiply(x, None) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("is_draft", [False, True])
def test_a_plain_checkpoint_is_rounded_on_the_way(
    architecture: str, is_draft: bool, tiny_model: Tiny
) -> None:
    path = tiny_model(architecture, tie_word_embeddings=True)
    config = ModelConfig(path=str(path), dtype="float32", quantization="fp8")
    network = load_network(config, DEVICE, is_draft=is_draft)
    assert isinstance(network, Decoder)
    got = run_prompt(network).logits
    expected = eager_logits(path)
    error = (got - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.2
    # The embedding is looked up as it was; the head is rounded in a draft, which may be wrong.
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"].to(DEVICE)
    assert torch.equal(network.embedding, embedding)
    same = torch.equal(network.output_layer.weight.dequantised(), embedding)
    assert same != is_draft
    assert (network.blocks[0].mlp.down.weight.input_eps > 0) != is_draft


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is none of awq, compressed-tensors, fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4: none of its layers is kept in that way"),
        ({"quant_method": "modelopt"}, "modelopt: quant_algo of the model is None; FP8, .* NVFP4"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.7.mlp": {"quant_algo": "W4A8_AWQ"}},
            },
            "modelopt: quant_algo of model.layers.7.mlp is W4A8_AWQ; FP8, .* NVFP4",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "awq: version is 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "awq: it has 3 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format is 'marlin-24'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            r"sparse \(sparse-24\)",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "rotated",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    stated: dict[str, object], reason: str, plain: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    change_config(path, quantization_config=stated)
    with pytest.raises(UnsupportedModelError, match=f"(?s){reason}.*quantised from.*GGUF"):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "reason"),
    [
        ("fp8 of blocks", "weight_scale_inv", None, "in FP8 without a weight_scale_inv"),
        ("fp8 of tensors", "weight_scale", torch.ones(3, 5), "scales of the shape"),
        ("fp8 of tensors", "weight", torch.zeros(128, 100), "q_proj.weight is 128 x 100; .* 128 x"),
        ("awq", "qzeros", None, "has no qzeros"),
        ("awq", "scales", torch.zeros(5, 128), "q_proj: 192 inputs are in 5 groups"),
        (
            "gptq, act-order",
            "g_idx",
            torch.zeros(192, dtype=torch.int32),
            "q_proj: its groups are not of 32 inputs each",
        ),
        ("gptq, act-order", "g_idx", None, "q_proj has no g_idx, though desc_act is true"),
        (
            "gptq",
            "g_idx",
            torch.arange(191) // 32,
            "q_proj.g_idx is 191; by its config it must be 192",
        ),
        (
            "gptq",
            "qzeros",
            torch.full((5, 16), 0x77777777, dtype=torch.int32),
            r"q_proj: its zero points have the shape \(5, 128\)",
        ),
        (
            "gptq, zero points",
            "qzeros",
            torch.full((3, 16), -1, dtype=torch.int32),
            "a zero point of 16",
        ),
        # Half as many bits in words half as wide would have the same shapes.
        (
            "gptq, zero points",
            "qweight",
            torch.zeros(24, 128, dtype=torch.int16),
            r"packed into torch\.int16; words of int32 are read",
        ),
        ("ct nvfp4", "weight_global_scale", None, "has 4 bits, but no weight_global_scale"),
        ("ct nvfp4", "weight_global_scale", torch.zeros(()), "one number, finite and not 0"),
        (
            "modelopt nvfp4",
            "weight_scale",
            torch.zeros(128, 6),
            "q_proj.weight_scale is 128 x 6 of float8_e4m3fn; in NVFP4 it is 128 x 12",
        ),
        ("modelopt nvfp4", "weight_scale", torch.full((128, 12), torch.nan), "is not 0 or more"),
        ("modelopt nvfp4", "weight_scale_2", torch.ones(3), "weight_scale_2 must be one number"),
        ("modelopt nvfp4", "pre_quant_scale", torch.ones(192), "scales its inputs"),
        (
            "modelopt nvfp4",
            "weight",
            torch.zeros(128, 80),
            "q_proj.weight_scale is 128 x 12 of float8_e4m3fn; in NVFP4 it is 128 x 10",
        ),
        (
            "modelopt mxfp8",
            "weight_scale",
            torch.zeros(128, 3, dtype=torch.uint8),
            r"q_proj: its scales have the shape \(3, 128\), not \(6, 128\)",
        ),
        ("ct 4 bits", "weight_shape", torch.tensor([128, 200]), "neither 4 nor 8 bits"),
        ("ct 4 bits", "weight_shape", torch.tensor([192]), "q_proj: .*unpack"),
        (
            "ct 4 bits",
            "weight_scale",
            torch.zeros(127, 3),
            "q_proj: it has 128 outputs, and 127 x 3 scales",
        ),
        ("ct int8", "weight_scale", torch.zeros(100), "q_proj: it has 128 outputs, and 100 scales"),
        (
            "ct 4 bits, zero points",
            "weight_zero_point",
            None,
            "q_proj has no weight_zero_point, though its config says that it is not symmetric",
        ),
    ],
)
def test_a_broken_layer_is_refused_by_name(
    name: str, tensor: str, change: torch.Tensor | None, reason: str, plain: Path, tmp_path: Path
) -> None:
    path = quantise(plain, tmp_path, name)
    key = f"model.layers.0.self_attn.q_proj.{tensor}"
    stored = load_file(path / "model.safetensors")
    if change is not None and key in stored and change.is_floating_point():
        change = change.to(stored[key].dtype)
    change_tensor(path, key, change)
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*take the checkpoint"):
        load(path)


def test_modelopts_own_file_counts_if_the_config_says_nothing(plain: Path, tmp_path: Path) -> None:
    path = quantise(plain, tmp_path, "modelopt nvfp4")
    change_config(path, quantization_config=None)
    own = path / "hf_quant_config.json"
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    expected = eager_logits(tmp_path / "meant")
    torch.testing.assert_close(run_prompt(load(path)).logits, expected, rtol=1e-3, atol=1e-3)
    own.write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json is damaged: KeyError"):
        load(path)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
@pytest.mark.parametrize("name", ["fp8 of tensors", "fp8 of blocks", "ct int8"])
def test_codes_that_the_config_does_not_name_are_refused(
    name: str, architecture: str, tiny_model: Tiny, tmp_path: Path
) -> None:
    """transformers would take them for the weights, without their scales."""
    path = quantise(tiny_model(architecture, **SHAPE), tmp_path, name)
    change_config(path, quantization_config=None)
    with pytest.raises(UnsupportedModelError, match=r"quantised \(model\..*weight_scale.* not say"):
        load(path)


def test_only_our_decoder_reads_quantised_layers(tiny_model: Tiny, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match="stay plain: its architecture has no decoder"):
        load(path, quantization="fp8")
    change_config(path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="fp8: its architecture has no decoder"):
        load(path)


def test_a_quantised_checkpoint_is_not_quantised_again(plain: Path, tmp_path: Path) -> None:
    path = quantise(plain, tmp_path, "awq")
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(awq\)"):
        load(path, quantization="fp8")
    with pytest.raises(UnsupportedModelError, match="quantization is 'int3'"):
        load(plain, quantization="int3")


def test_a_layer_of_several_forms_keeps_its_bits_if_each_of_them_can() -> None:
    narrow = Narrow(round_to_fp8(torch.randn(16, 32)), torch.float32)
    linear = Linear(narrow, None).as_batch_invariant()
    assert torch.equal(linear.weight.dequantised(), narrow.dequantised())
    stacked = Stacked([narrow, narrow])
    kept = Linear(stacked, torch.zeros(32)).as_batch_invariant().weight
    assert (stacked.batch_invariant, kept.batch_invariant) == (False, True)
    assert torch.equal(kept.dequantised(), stacked.dequantised())
    with pytest.raises(ValueError, match="16 bits"):
        Linear(Stacked([narrow, Dense(torch.randn(16, 32))]), None).as_batch_invariant()


@pytest.mark.parametrize(
    ("kind", "capability", "is_refused"),
    [("fp8", (8, 6), True), ("fp8", (8, 9), False), ("int8", (8, 0), False)],
)
def test_fp8_is_refused_on_gpus_without_it(
    kind: str, capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow_weight, "converts_fp8", lambda device: capability >= (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    refused = pytest.raises(UnsupportedModelError, match="A GPU has no instructions")
    with refused if is_refused else nullcontext():
        check_fp8(kind, torch.device("cuda"))
