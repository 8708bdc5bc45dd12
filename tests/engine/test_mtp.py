"""MTP heads: the targets that bring one, what is read of it, and what is refused.

What it drafts is held to its formulas in test_heads.py, beside the other heads.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from mtp import GLM_LAYER, LAYER, PlainMtp, save_tiny_mtp_model
from quantised import quantise
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, VOCAB, Tiny, change_config, change_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from verification import HAS_KERNELS

from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models.architectures import load_config
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.heads.config import HeadError
from outrider.engine.models.heads.loading import load_head
from outrider.engine.models.loading import load_network

K = 3


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tiny_mtp_model(tmp_path / "model")


def changed_draft(config: EngineConfig, **changes: Any) -> EngineConfig:
    assert config.draft is not None
    return replace(config, draft=replace(config.draft, **changes))


def test_mimo_is_a_qwen2_to_transformers(target: Path) -> None:
    stated = json.loads((target / "config.json").read_text()) | {"model_type": "qwen2"}
    weights = load_file(target / "model.safetensors")
    model = Qwen2ForCausalLM(Qwen2Config(**stated)).eval()
    theirs = {name: tensor for name, tensor in weights.items() if not name.startswith(LAYER)}
    model.load_state_dict(theirs)
    ids = torch.tensor(prompts([12], VOCAB))
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    engine = Engine(engine_config(target, target, k=K))
    assert type(engine.worker.pair.target) is Decoder
    assert tokens(run(engine, ids.tolist(), GREEDY)[0]) == expected[0, 12:].tolist()


def test_the_code_that_a_mimo_brings_is_not_run(target: Path) -> None:
    code = {"AutoConfig": "mimo_code.Config", "AutoModelForCausalLM": "mimo_code.Model"}
    change_config(target, auto_map=code)
    (target / "mimo_code.py").write_text("raise SystemExit('this code was run')")
    for trusts in (False, True):
        assert load_config(target, trust_remote_code=trusts).model_type == "mimo"
        config = ModelConfig(path=str(target), dtype="float32", trust_remote_code=trusts)
        assert type(load_network(config, DEVICE)) is Decoder


def test_nothing_but_the_head_need_be_named(target: Path) -> None:
    engine = Engine(engine_config(target, target))
    assert (engine.info.proposer, engine.info.draft_dtype) == ("mtp", "float32")
    head, network = engine.worker.pair.head, engine.worker.pair.target
    assert head is not None
    assert head.embedding is network.input_embedding
    assert head.output_layer is network.output_layer


def test_the_projection_is_one_of_its_weights(target: Path) -> None:
    network = load_network(ModelConfig(path=str(target), dtype="float32"), DEVICE)
    config = ModelConfig(path=str(target), dtype="float32", is_mtp=True)
    head = load_head(config, network, config.path)
    parts = (*head.blocks[0].linears, head.output_layer, head.fc)
    assert head.weight_bytes == sum(linear.weight.num_bytes for linear in parts)


@pytest.mark.parametrize(
    ("architecture", "is_tied"), [("mimo", False), ("mimo", True), ("glm4_moe", False)]
)
def test_greedy_answers_are_the_targets_own(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    target = save_tiny_mtp_model(tmp_path / "model", architecture, tie_word_embeddings=is_tied)
    engine = Engine(engine_config(target, target, k=K))
    mixed = prompts([5, 30, 1], VOCAB)
    expected = [generate(target, prompt, GREEDY.max_tokens) for prompt in mixed]
    assert [tokens(o) for o in run(engine, mixed, GREEDY)] == expected
    assert engine.stats().drafted_per_position[K - 1] > 0


def test_a_head_that_knows_the_next_token_is_always_right(target: Path) -> None:
    """Planted: the token behind another follows from that one alone, in the target and the head.

    Row t reads h_t and x_{t+1}, so its projection keeps the embedding alone, and its layer nothing.
    A swap of its inputs, or an embedding of x_t, would leave no draft right.
    """
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCAB, 32, generator=generator))
    follows = torch.randperm(VOCAB, generator=generator)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith("norm.weight"):
            tensor.fill_(1)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"][follows] = embedding
    tensors[f"{LAYER}.input_proj.weight"] = torch.cat([torch.zeros(32, 32), torch.eye(32)], 1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(engine_config(target, target, k=K))
    run(engine, prompts([5, 9, 17], VOCAB), GREEDY)
    stats = engine.stats()
    assert stats.drafted_per_position == stats.accepted_per_position
    assert stats.drafted_per_position[2] > 10


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("input_proj.weight", None, "its files hold no MTP head"),
        ("input_proj.weight", lambda t: t[:, :32].contiguous(), "weight is 32 x 32; by its config"),
        ("token_layernorm.weight", None, f"no tensor '{LAYER}.token_layernorm.weight'"),
        ("final_layernorm.weight", lambda t: t[:8].contiguous(), "weight is 8; by its config"),
        ("mlp.up_proj.weight", None, f"no tensor '{LAYER}.mlp.up_proj.weight'"),
        ("mlp.up_proj.weight", lambda t: t[:9].contiguous(), "is 9 x 32; by its config it must"),
        ("mlp.up_proj.weight", lambda t: t.to(torch.int8), "dtype torch.int8"),
        ("self_attn.q_proj.weight", lambda t: t[:16].contiguous(), "is 16 x 32; by its config"),
        ("input_layernorm.bias", torch.ones(32), f"has {LAYER}.input_layernorm.bias"),
    ],
)
def test_a_bad_tensor_is_reported_at_load(name: str, value: Any, says: str, target: Path) -> None:
    Engine(engine_config(target, target))
    change_tensor(target, f"{LAYER}.{name}", value)
    with pytest.raises(HeadError, match=says) as raised:
        Engine(engine_config(target, target))
    assert f"the MTP head of {target} cannot draft for {target}" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "bfloat16"}, "in its target's, which is float32"),
        ({"quantization": "int3"}, r"draft\.quantization is 'int3'; it may be fp8"),
        ({"head_layers": (1, 2)}, r"leave draft\.head_layers out"),
    ],
)
def test_a_bad_setting_is_reported_at_load(
    changes: dict[str, Any], says: str, target: Path
) -> None:
    with pytest.raises(HeadError, match=says):
        Engine(changed_draft(engine_config(target, target), **changes))


def test_a_target_of_another_kind_is_refused(tiny_model: Tiny) -> None:
    target = tiny_model("llama")
    config = engine_config(target, target)
    with pytest.raises(HeadError, match="no MTP head is known for models of type llama; known"):
        Engine(changed_draft(config, is_mtp=True))


def test_a_head_in_several_files_is_found(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    file_of = {name: f"{'mtp' if LAYER in name else 'model'}-1.safetensors" for name in tensors}
    for file in set(file_of.values()):
        part = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        save_file(part, target / file, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    assert Engine(engine_config(target, target)).info.proposer == "mtp"


@pytest.mark.parametrize("leave", [(), ("mtp_layers",)], ids=["whole", "head-left-out"])
def test_a_quantised_checkpoint_keeps_its_head(leave: tuple[str, ...], tmp_path: Path) -> None:
    """Quantised like the rest, or left plain, as most tools do."""
    plain = save_tiny_mtp_model(tmp_path / "plain")
    path = quantise(plain, tmp_path, "ct fp8 of rows", leave=leave)
    meant = PlainMtp(tmp_path / "meant").w
    config = ModelConfig(path=str(path), dtype="float32")
    network = load_network(config, DEVICE)
    head = load_head(replace(config, is_mtp=True), network, config.path)
    for linear, name in (
        (head.fc, "input_proj"),
        (head.blocks[0].mlp.down, "mlp.down_proj"),
        (head.blocks[0].mixer.output, "self_attn.o_proj"),
    ):
        expected = meant[f"{LAYER}.{name}.weight"].to(DEVICE)
        torch.testing.assert_close(linear.weight.dequantised(), expected)


@pytest.mark.skipif(HAS_KERNELS, reason="a GPU multiplies by them as they are")
def test_that_weights_are_unpacked_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = quantise(save_tiny_mtp_model(tmp_path / "plain"), tmp_path, "ct fp8 of rows")
    assert Engine(engine_config(path, path)).info.proposer == "mtp"
    assert caplog.text.count("the weights are unpacked to") == 1
    caplog.clear()
    plain = tmp_path / "plain"
    config = engine_config(plain, plain)
    assert Engine(changed_draft(config, quantization="fp8")).info.proposer == "mtp"
    assert caplog.text.count("the weights are unpacked to") == 1  # the head's, alone


@pytest.mark.parametrize(
    ("name", "leave"),
    [
        ("ct fp8 of rows", ()),
        ("ct fp8 of rows", (f"{GLM_LAYER}.",)),
        ("ct fp8 of rows, inputs too", ("eh_proj",)),
        ("ct 4 bits", ("eh_proj",)),
        ("awq", ("eh_proj",)),
    ],
)
def test_a_quantised_glm_keeps_its_head(name: str, leave: tuple[str, ...], tmp_path: Path) -> None:
    """Its experts and all else, quantised or left plain."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    plain = save_tiny_mtp_model(tmp_path / "plain", "glm4_moe", **sizes)
    path = quantise(plain, tmp_path, name, leave=leave)
    meant = load_file(tmp_path / "meant/model.safetensors")
    config = ModelConfig(path=str(path), dtype="float32")
    network = load_network(config, DEVICE)
    head = load_head(replace(config, is_mtp=True), network, config.path)
    assert head.output_layer is network.output_layer
    mlp = f"{GLM_LAYER}.mlp"
    experts = [meant[f"{mlp}.experts.{i}.down_proj.weight"] for i in range(8)]
    shared = meant[f"{mlp}.shared_experts.down_proj.weight"].chunk(2, 1)
    for layer, expected in (
        (head.fc, meant[f"{GLM_LAYER}.eh_proj.weight"]),
        (head.blocks[0].mixer.output, meant[f"{GLM_LAYER}.self_attn.o_proj.weight"]),
        (head.blocks[0].mlp.down, torch.cat((*experts, *shared))),
    ):
        torch.testing.assert_close(layer.weight.dequantised(), expected.to(DEVICE))


def test_a_head_that_the_config_does_not_count_drafts_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some quantised copies set it to 0."""
    path = save_tiny_mtp_model(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=0)
    assert Engine(engine_config(path, path)).info.proposer == "mtp"
    assert (
        f"num_nextn_predict_layers is 0, but its files hold an MTP head ({GLM_LAYER}.eh_proj)"
        in (caplog.text)
    )


def test_a_head_that_the_config_counts_and_no_file_holds_is_refused(tiny_model: Tiny) -> None:
    path = tiny_model("glm4_moe")
    with pytest.raises(HeadError, match=rf"hold no MTP head \({GLM_LAYER}\.eh_proj\.weight\)"):
        Engine(engine_config(path, path))


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    path = save_tiny_mtp_model(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=2)
    with pytest.raises(HeadError, match="its MTP head has 2 layers; one is read here"):
        Engine(engine_config(path, path))


def test_a_head_can_be_rounded_to_fp8(target: Path) -> None:
    config = ModelConfig(path=str(target), dtype="float32")
    network = load_network(config, DEVICE)
    head = load_head(replace(config, is_mtp=True, quantization="fp8"), network, config.path)
    plain = PlainMtp(target).w
    for linear, name in ((head.fc, "input_proj"), (head.blocks[0].mlp.down, "mlp.down_proj")):
        meant = plain[f"{LAYER}.{name}.weight"].to(DEVICE)
        error = (linear.weight.dequantised() - meant).abs() / meant.abs().amax(1, keepdim=True)
        assert 1e-3 < error.max() < 0.05
        assert linear.weight.input_eps == 2**-8
    output_layer = head.output_layer.weight
    if DEVICE.type == "cpu":
        assert torch.equal(output_layer.dequantised(), plain["lm_head.weight"].to(DEVICE))
    else:
        assert output_layer.input_eps == 2**-8
        assert network.output_layer.weight is not output_layer
