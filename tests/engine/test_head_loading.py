"""Heads on disk: which there are, what they read of a target, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from block_heads import save_tiny_block_head
from engines import engine_config
from heads import save_tiny_head, tensors_of
from safetensors.torch import save_file
from tiny_models import DEVICE, VOCAB, Tiny, change_config, change_tensor

from outrider.engine.config import ConfigError, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.gpu_memory import OutOfDeviceMemoryError
from outrider.engine.models.families.base import window_of
from outrider.engine.models.heads import loading
from outrider.engine.models.heads.block_head import BlockHead
from outrider.engine.models.heads.config import HeadConfig, HeadError, head_kind
from outrider.engine.models.heads.loading import load_head
from outrider.engine.models.loading import load_network
from outrider.engine.models.narrow_weight import Scaled, in_fp8
from outrider.engine.models.weights import Dense, Layer, Linear, RoundedInputs, Weight


@pytest.fixture
def target(tiny_model: Tiny) -> Path:
    return tiny_model("llama", num_hidden_layers=6)


def load(target: Path, head: Path) -> None:
    Engine(engine_config(target, head))


def check_refused(target: Path, head: Path, says: str) -> None:
    """Assert that the head cannot be loaded, and that the error names both models."""
    with pytest.raises(HeadError, match=says) as raised:
        load(target, head)
    assert str(target) in str(raised.value)
    assert str(head) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("fc.weight", lambda t: t[:, :64].contiguous(), "fc.weight is 32 x 64; for 3"),
        ("fc.weight", None, "no tensor 'fc.weight'"),
        ("midlayer.mlp.up_proj.weight", None, "no tensor 'midlayer.mlp.up_proj.weight'"),
        ("midlayer.mlp.up_proj.weight", lambda t: t.to(torch.int8), "dtype torch.int8"),
        ("lm_head.weight", lambda t: t[:40].contiguous(), "lm_head.weight is 40 x 32"),
        ("norm.weight", lambda t: t[:8].contiguous(), "norm.weight is 8; by its"),
        ("mask_hidden", lambda t: t[..., :9].contiguous(), "mask_hidden has 9 numbers; for 3"),
        ("d2t", None, "drafts 50 of 97 tokens, but its file has no map"),
        ("d2t", lambda t: t.float(), "d2t is of dtype torch.float32"),
        ("d2t", lambda t: t[:9].contiguous(), "d2t has 9 entries for a draft vocabulary of 50"),
        ("d2t", lambda t: t + 90, "d2t leads to token ids from .*; the target's are 0 to 96"),
        ("d2t", lambda t: -torch.arange(50), "the same id of the target"),
        ("t2d", lambda t: ~t, "t2d and d2t disagree"),
        ("layers.1.mlp.up_proj.weight", torch.ones(48, 32), "has layers.1.mlp.up_proj.weight"),
        ("midlayer.self_attn.k_proj.bias", torch.ones(16), "has midlayer.self_attn.k_proj.bias"),
    ],
)
def test_a_bad_tensor_is_reported_at_load_with_both_models(
    name: str, value: Any, says: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path / "head", target, draft_vocab=50, parallel=name == "mask_hidden")
    load(target, head)
    change_tensor(head, name, value)
    check_refused(target, head, says)


@pytest.mark.parametrize("name", ["fc", "midlayer.self_attn.q_proj", "midlayer.mlp.down_proj"])
def test_a_bias_of_another_length_is_reported_at_load(
    name: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path / "head", target)
    tensors = tensors_of(head)
    others = ["k_proj", "v_proj"] if "q_proj" in name else []
    for each in (name, *(name.replace("q_proj", other) for other in others)):
        tensors[f"{each}.bias"] = torch.zeros(9)
    save_file(tensors, head / "model.safetensors")
    check_refused(target, head, f"{name}.bias .*is {27 if others else 9}; by its config it must be")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 200, "draft_vocab_size": 97}, "of 200 tokens, the target has 97"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}, "after layers 2, 5, 7, but"),
        ({"eagle_aux_hidden_state_layer_ids": [2, "a", 4]}, "they must be integers"),
        ({"target_layer_ids": 5}, "its layer ids are 5; they must be integers, in a list"),
        ({"eagle_config": "x"}, "its eagle_config is 'x'; it must be an object"),
        ({"layer_types": ["full_attention"] * 3}, "its config describes no layer: .*layer_types"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, "after layers 2, 2, 4"),
        ({"hidden_act": "relu"}, "its activation is relu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "its RoPE is dynamic"),
        ({"fc_norm": True}, "no tensor 'fc_norm.0.weight'"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "of kind lilicorr; of heads, eagle3, peagle"),
        ({"architectures": ["MedusaModel"]}, "of kind medusa; of heads, eagle3, peagle, dflash"),
        ({"num_hidden_layers": 0}, "its config describes no layer: .*num_hidden_layers is 0"),
        ({"num_key_value_heads": 0}, r"config.json is damaged \(ZeroDivisionError"),
        ({"rope_theta": "x"}, r"config.json is damaged \(TypeError"),
        ({"draft_vocab_size": "x"}, "config.json is damaged"),
    ],
)
def test_a_bad_config_is_reported_at_load(
    changes: dict[str, Any], says: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path / "head", target)
    change_config(head, **changes)
    check_refused(target, head, says)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("markov_head.markov_w1.weight", lambda t: t[:40].contiguous(), "w1.weight is 40 x 6"),
        ("markov_head.markov_w2.weight", lambda t: t[:, :4].contiguous(), "w2.weight is 97 x 4"),
        ("markov_head.markov_w1.weight", None, "no tensor 'markov_head.markov_w1.weight'"),
        ("confidence_head.proj.weight", lambda t: t[:, :9].contiguous(), "is 1 x 9; by its"),
        ("hidden_norm.weight", None, "no tensor 'hidden_norm.weight'"),
        ("layers.1.self_attn.k_proj.weight", lambda t: t[:8].contiguous(), "is 8 x 32"),
    ],
)
def test_a_bad_tensor_of_a_block_head_is_reported_at_load(
    name: str, value: Any, says: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_block_head(tmp_path / "head", target, markov="vanilla", confidence="token")
    load(target, head)
    change_tensor(head, name, value)
    check_refused(target, head, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask_token_id": None}, "names no mask token"),
        ({"mask_token_id": 97}, "its mask token is 97, but there are 97 embeddings"),
        ({"target_layer_ids": None}, "names no layers of the target"),
        ({"target_layer_ids": [1, 6]}, "after layers 2, 7, but the target has 6"),
        ({"target_layer_ids": [1]}, "for 1 hidden states of this target"),
        ({"block_size": 0}, "its block_size is 0, which leaves no row"),
        ({"block_size": 3}, "num_speculative_tokens is 4, but the dspark head .* drafts 3 tokens"),
        ({"markov_head_type": "gated"}, "its Markov head is of type gated; only vanilla"),
        ({"draft_vocab_size": 50}, "no lm_head of its own, and the target's is 97 x 32 where"),
        ({"vocab_size": 90, "draft_vocab_size": 97}, "of 90 tokens, the target has 97"),
        ({"causal_head": True}, "it is a causal head"),
        ({"dflash_config": {"projector_type": "domino"}}, "of kind domino; of heads"),
    ],
)
def test_a_bad_config_of_a_block_head_is_reported_at_load(
    changes: dict[str, Any], says: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_block_head(tmp_path / "head", target, markov="vanilla", nested=False)
    change_config(head, **changes)
    with pytest.raises(HeadError, match=says):
        load(target, head)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv_kernel_size": None}, "its conv_kernel_size is None; it must be 1 to 5"),
        ({"conv_kernel_size": 6}, "its conv_kernel_size is 6; it must be 1 to 5"),
        ({"conv_group_size": 5}, "its conv_group_size is 5, which must divide 32"),
        ({"selector_top_k": 98}, "its selector_top_k is 98; it must be 1 to 97"),
        ({"selector_rank": 7}, r"hidden_projection.weight is 6 x 32; .* must be 7 x 32"),
        ({"conv_group_size": 4}, r"kernel_projection.weight is 16 x 32; .* must be 32 x 32"),
        ({"markov_rank": 4}, "it has a selector, and a Markov or confidence head beside it"),
        ({"enable_confidence_head": True}, "it has a selector, and a Markov or confidence"),
        ({"draft_vocab_size": 50}, "no lm_head of its own, and the target's is 97 x 32"),
        ({"attention_mode": "mla"}, "its attention is mla; gqa is known here"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
          "partial_rotary_factor": 0.25}}, "its RoPE rotates 0.25 of a head"),
        (
            {"architectures": ["DFlashDraftModel"], "selector_rank": None},
            "its file has layers.0.attention_conv.base_kernel, which a dflash head has not",
        ),
    ],
)  # fmt: skip
def test_a_bad_dflash2_config_is_reported_at_load(
    changes: dict[str, Any], says: str, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_block_head(tmp_path / "head", target, selector=(6, 9), nested=False)
    change_config(head, **changes)
    with pytest.raises(HeadError, match=says):
        load(target, head)


def test_a_selector_among_some_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    head = save_tiny_block_head(tmp_path / "head", target, selector=(6, 9), draft_vocab=50)
    check_refused(target, head, "it selects among 50 of 97 tokens; known here are selectors")


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, 15),
        ({"architectures": ["DFlashDraftModel"], "block_size": None}, 15),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, 7),
        ({"speculators_model_type": "dflash", "block_size": None}, 7),
        ({"speculators_model_type": "dspark", "block_size": 8}, 7),
        ({"speculators_model_type": "dspark", "sample_from_anchor": True, "block_size": 8}, 8),
    ],
)
def test_each_format_counts_the_rows_of_a_block_in_its_own_way(
    changes: dict[str, Any], most: int, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_block_head(tmp_path / "head", target)
    change_config(head, **({"architectures": []} | changes))
    engine = Engine(engine_config(target, head))
    assert engine.worker.pair.head is not None
    assert engine.worker.pair.head.max_drafts == most


def test_the_target_hands_out_nothing_for_a_head_that_is_left_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails where the target knows it already."""

    def fail(*_args: object) -> NoReturn:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(BlockHead, "change_linears", fail)
    config = engine_config(target, save_tiny_block_head(tmp_path / "head", target))
    assert config.draft is not None
    engine = Engine(replace(config, draft=replace(config.draft, is_optional=True)))
    assert engine.worker.pair.head is None
    assert engine.worker.pair.target.tapped_layers == ()


@pytest.mark.parametrize("is_optional", [False, True])
def test_a_k_beyond_the_head_is_refused_whoever_chose_the_head(
    is_optional: bool, target: Path, tmp_path: Path
) -> None:
    config = engine_config(target, save_tiny_block_head(tmp_path / "head", target), k=9)
    assert config.draft is not None
    config = replace(config, draft=replace(config.draft, is_optional=is_optional))
    with pytest.raises(ConfigError, match=r"is 9, but the dflash head .* at most; lower it"):
        Engine(config)


def test_a_target_with_several_states_of_a_token_is_refused(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    """The head failed in every step, and nothing was drafted."""
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3, "laurel_rank": 8}
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    sparse = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 3}
    types = {"layer_types": ["full_attention"] * 3, "pad_token_id": 0}
    target = tiny_model("gemma3n_text", **sizes, **own, **sparse, **types)
    head = save_tiny_head(tmp_path / "head", target, boundaries=(0, 1, 2))
    check_refused(target, head, "several states of a token")


def test_a_head_for_a_wider_target_is_refused(
    target: Path, tiny_model: Tiny, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path, tiny_model("llama", num_hidden_layers=6, hidden_size=64))
    check_refused(target, head, r"each 32 wide, it must be 64 x 96")


def test_a_target_too_shallow_for_the_usual_layers_is_refused(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    target = tiny_model("llama")
    head = save_tiny_head(tmp_path, target)
    change_config(head, eagle_aux_hidden_state_layer_ids=None)
    check_refused(target, head, "as heads do whose config names none")


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_cut_short_is_refused(pickled: bool, target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target, pickled=pickled)
    (file,) = (path for path in head.iterdir() if path.name != "config.json")
    file.write_bytes(file.read_bytes()[:-3000])
    check_refused(target, head, "damaged or cut short")


def test_a_gpu_without_memory_for_a_head_does_not_make_its_file_damaged(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loading, "_read_head", fail)
    with pytest.raises(OutOfDeviceMemoryError, match=r"do not fit on the GPU.*Tried to allocate"):
        load(target, save_tiny_head(tmp_path, target))


def test_a_head_without_weights_is_refused(target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target)
    (head / "model.safetensors").unlink()
    check_refused(target, head, r"model\.safetensors")


def test_a_model_of_its_own_is_no_head(target: Path, tmp_path: Path) -> None:
    assert head_kind(target) is None
    assert head_kind(tmp_path) is None
    shutil.copy(target / "config.json", tmp_path)
    change_config(tmp_path, architectures=["LlamaForCausalLMEagle3"])
    assert head_kind(tmp_path) == "eagle3"
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"], speculators_model_type="dspark")
    assert head_kind(tmp_path) == "dspark"
    for damaged in (-1, True, {"a": 1}, "LlamaForCausalLM"):
        change_config(tmp_path, architectures=damaged, speculators_model_type=None)
        assert head_kind(tmp_path) is None, damaged


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 20, 30]}, (3, 20, 30)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, (2, 18, 33)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, (2, 18, 33)),
        ({"target_layer_ids": [-1, 9, 18, 27, 34]}, (0, 10, 19, 28, 35)),
    ],
)
def test_each_format_counts_layers_in_its_own_way(
    changes: dict[str, Any], expected: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path, target)
    change_config(head, **({"eagle_aux_hidden_state_layer_ids": None} | changes))
    assert HeadConfig.load(head).boundaries_of(36) == expected


def test_a_mask_token_of_null_is_none(target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target, parallel=True)
    change_config(head, mask_token_id=None, ptd_token_id=5)
    assert HeadConfig.load(head).mask_token_id == 5
    load(target, head)


def test_rope_is_the_heads_own(target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target)
    change_config(head, rope_theta=None)
    assert HeadConfig.load(head).layers.rope_parameters["rope_theta"] == 10000.0
    assert HeadConfig.load(head).draft_vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"use_sliding_window": False}, None),
        ({"use_sliding_window": True}, 8),
        ({"layer_types": ["sliding_attention"]}, 8),
        ({"layer_types": ["full_attention"], "use_sliding_window": True}, None),
    ],
)
def test_a_window_holds_only_if_a_layer_is_said_to_have_one(
    changes: dict[str, Any], expected: int | None, target: Path, tmp_path: Path
) -> None:
    head = save_tiny_head(tmp_path, target)
    change_config(head, sliding_window=8, **changes)
    assert window_of(HeadConfig.load(head).layers, 0) == expected


@pytest.mark.parametrize("chain", [{"markov": "vanilla"}, {"selector": (6, 5)}])
def test_a_head_names_every_layer_that_it_changes(
    chain: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(target), dtype="float32")
    path = save_tiny_block_head(tmp_path / "head", target, **chain)
    head = load_head(replace(config, path=str(path)), load_network(config, DEVICE), config.path)
    assert isinstance(head, BlockHead)
    assert head.chain is not None
    named, changed = head.linears, []

    def unchanged(layer: Layer[Weight]) -> Layer[Weight]:
        changed.append(layer)
        return layer

    head.change_linears(unchanged)
    parts = [layer.kv for layer in head.context]  # of layers that are named
    assert list(map(id, changed)) == list(map(id, [*named, *parts]))


def test_a_head_can_be_rounded_to_fp8(target: Path, tmp_path: Path) -> None:
    path = save_tiny_head(tmp_path, target)
    config = ModelConfig(path=str(target), dtype="float32")
    network = load_network(config, DEVICE)
    quantised = replace(config, path=str(path), quantization="fp8", dtype="auto")
    head = load_head(quantised, network, config.path)
    plain = {name: tensor.to(DEVICE) for name, tensor in tensors_of(path).items()}
    for linear, name in (
        (head.fc, "fc"),
        (head.output_layer, "lm_head"),
        (head.blocks[0].mlp.down, "midlayer.mlp.down_proj"),
    ):
        weight, meant = linear.weight.dequantised(), plain[f"{name}.weight"]
        error = (weight - meant).abs() / meant.abs().amax(1, keepdim=True)
        assert 1e-3 < error.max() < 0.05
    with pytest.raises(HeadError, match=r"draft\.quantization is 'int3'; it may be fp8"):
        load_head(replace(quantised, quantization="int3"), network, config.path)


@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype", "has_fp8", "expected"),
    [
        ("bfloat16", "auto", True, True),
        ("bfloat16", "auto", False, False),
        ("bfloat16", "bfloat16", True, False),
        ("float32", "auto", True, False),
    ],
)
def test_a_head_is_rounded_to_fp8_by_itself_where_a_gpu_has_it(
    target_dtype: str,
    draft_dtype: str,
    has_fp8: bool,
    expected: bool,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "converts_fp8", lambda device: has_fp8)
    path = save_tiny_head(tmp_path, target)
    network = load_network(ModelConfig(path=str(target), dtype=target_dtype), DEVICE)
    head = load_head(ModelConfig(path=str(path), dtype=draft_dtype), network, str(target))
    # On a CPU it is unpacked, but its inputs are rounded as on a GPU.
    assert isinstance(head.fc.weight, RoundedInputs | Scaled) is expected


def test_a_copy_of_a_shared_output_layer_is_rounded_to_fp8() -> None:
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plain = Linear(Dense(matrix), None)
    layer = in_fp8(plain)
    error = (layer.weight.dequantised() - matrix).abs() / matrix.abs().amax(1, keepdim=True)
    assert 1e-3 < error.max() < 0.05
    assert layer.weight.input_eps == 2**-8
    assert layer.weight.num_bytes < plain.weight.num_bytes / 3
    assert in_fp8(layer) is layer


def test_the_layers_that_it_reads_can_be_set(target: Path, tmp_path: Path) -> None:
    head = save_tiny_head(tmp_path, target, boundaries=(1, 2, 4))
    config = engine_config(target, head)
    assert config.draft is not None
    draft = replace(config.draft, head_layers=(5, 0, 3))
    engine = Engine(replace(config, draft=draft))
    assert engine.worker.pair.target.tapped_layers == (-1, 2, 4)
    with pytest.raises(HeadError, match="after layers 2, 5, 9"):
        Engine(replace(config, draft=replace(draft, head_layers=(9, 2, 5))))


def test_another_dtype_than_the_targets_is_refused(target: Path, tmp_path: Path) -> None:
    config = engine_config(target, save_tiny_head(tmp_path, target))
    assert config.draft is not None
    draft = replace(config.draft, dtype="bfloat16")
    with pytest.raises(HeadError, match="in its target's, which is float32"):
        Engine(replace(config, draft=draft))
