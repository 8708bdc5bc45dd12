"""Our own decoder: what it is built for, how it proves itself, and what it hands out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from paged import PROMPT, check_against_eager, run_prompt
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, TINY, VOCAB, Tiny, change_tensor
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine.config import ModelConfig
from outrider.engine.models import admission, families, loading
from outrider.engine.models.blocks import Block
from outrider.engine.models.compiled_decoder import CompiledDecoder
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.families import base
from outrider.engine.models.families.llama import Llama
from outrider.engine.models.hugging_face import HuggingFaceModel
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Network
from outrider.engine.models.proof import CHECKED_LENGTHS
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.slots import Slots
from outrider.kernels.cpu.layers import compiled
from outrider.kernels.model import linear as linear_module
from outrider.kernels.model.rms_norm import rms_norm_reference


def load(
    path: Path, dtype: str = "float32", quantization: str | None = None, **options: Any
) -> Network:
    config = ModelConfig(path=str(path), dtype=dtype, quantization=quantization)
    return load_network(config, DEVICE, **options)


@pytest.fixture
def own_copy(tmp_path: Path, tiny_model: Tiny) -> Tiny:
    """A tiny model that the test may change."""

    def get(architecture: str, **overrides: Any) -> Path:
        return Path(shutil.copytree(tiny_model(architecture, **overrides), tmp_path / "model"))

    return get


@torch.inference_mode()
def eager(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").to(DEVICE)
    return model(PROMPT[None], output_hidden_states=True)


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=["biases", "tied", "multi_head", "linear_rope"],
)
def test_variants_of_a_known_structure(overrides: dict[str, Any], own_copy: Tiny) -> None:
    path = own_copy("llama", **overrides)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("bias")]:
        nn.init.normal_(tensors[name])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(path=str(path), dtype="float32")
    model = load_network(config, DEVICE, batch_invariant=None)
    assert isinstance(model, Decoder)
    check_against_eager(model, path)


@pytest.mark.parametrize("differs", [False, True])
def test_an_output_layer_beside_a_tied_embedding_counts_if_it_differs(
    differs: bool, own_copy: Tiny
) -> None:
    path = own_copy("llama", tie_word_embeddings=True)
    matrix = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensor(path, "lm_head.weight", matrix.flip(0) if differs else matrix)
    network = load(path)
    assert isinstance(network, Decoder)
    torch.testing.assert_close(
        run_prompt(network).logits, eager(path).logits[0], rtol=1e-3, atol=1e-3
    )


def test_what_says_nothing_of_the_forward_pass_changes_nothing(tiny_model: Tiny) -> None:
    stated = {
        "_model_name_or_path": "Any",
        "eos_token_id": [1, 2],
        "bos_token_id": 3,
        "pad_token_id": 2,
        "rope_theta": 1e4,
        "unsloth_fixed": True,
    }
    assert isinstance(load(tiny_model("qwen3", tokenizer_class="Any", **stated)), Decoder)


def test_a_window_that_transformers_does_not_read_is_none(tiny_model: Tiny) -> None:
    network = load(tiny_model("llama", sliding_window=20))
    assert isinstance(network, Decoder)
    assert [attention.window for attention in network.attentions] == [None, None]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        ("hidden_act", "gelu"),
    ],
)
def test_what_the_config_says_beyond_the_known_is_left_to_transformers(
    key: str, value: Any, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "check_config", lambda config: None)
    assert isinstance(load(tiny_model("llama", **{key: value})), HuggingFaceModel)


def test_a_declared_field_that_is_not_implemented_is_left_to_transformers(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Llama, "fields", Llama.fields - {"mlp_bias"})
    assert isinstance(load(tiny_model("llama")), Decoder)
    assert isinstance(load(tiny_model("llama", mlp_bias=True)), HuggingFaceModel)


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias"),
    ],
)
def test_a_checkpoint_without_a_tensor_is_refused(
    architecture: str, missing: str, own_copy: Tiny
) -> None:
    """transformers would draw the tensor at random."""
    path = own_copy(architecture)
    change_tensor(path, missing, None)
    with pytest.raises(admission.UnsupportedModelError, match=f"lack {missing}, .* get the model"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "name", "quantization"),
    [
        ("llama", "model.embed_tokens.weight", None),
        ("llama", "lm_head.weight", None),
        ("llama", "lm_head.weight", "fp8"),
        ("gemma2", "model.embed_tokens.weight", None),
    ],
)
def test_a_vocabulary_of_another_size_than_the_configs_is_refused(
    architecture: str, name: str, quantization: str | None, own_copy: Tiny
) -> None:
    path = own_copy(architecture)
    change_tensor(path, name, lambda tensor: tensor[:-7].clone())
    with pytest.raises(
        admission.UnsupportedModelError, match=f"{name} is 90 x 32; by its config it must be 97 x"
    ):
        load(path, quantization=quantization)


@pytest.mark.parametrize("added", [("self_attn.o_proj.bias", 32), ("self_attn.q_norm.weight", 8)])
def test_a_checkpoint_with_tensors_that_transformers_ignores_is_left_to_it(
    added: tuple[str, int], own_copy: Tiny
) -> None:
    path = own_copy("llama")
    expected = eager(path).logits[0]
    name, size = added
    for each in {name, name.replace("q_norm", "k_norm")}:
        change_tensor(path, f"model.layers.0.{each}", torch.randn(size))
    network = load(path)
    assert isinstance(network, HuggingFaceModel)
    torch.testing.assert_close(run_prompt(network).logits, expected, rtol=1e-3, atol=1e-3)


def test_a_bias_of_another_length_is_left_to_transformers(own_copy: Tiny) -> None:
    path = own_copy("llama")
    change_tensor(path, "lm_head.bias", torch.randn(90))
    assert isinstance(load(path), HuggingFaceModel)


def test_a_bias_of_zeros_does_no_harm(own_copy: Tiny) -> None:
    """Old checkpoints in GPTQ have one in every layer."""
    path = own_copy("llama")
    change_tensor(path, "model.layers.0.self_attn.o_proj.bias", torch.zeros(32))
    assert isinstance(load(path), Decoder)


@pytest.mark.parametrize("shape", [(16, 31), (16, 1), (16,)])
def test_a_layer_of_another_width_than_its_neighbour_is_refused(
    shape: tuple[int, ...], own_copy: Tiny
) -> None:
    path = own_copy("llama")
    change_tensor(path, "model.layers.0.self_attn.k_proj.weight", torch.randn(shape))
    stated = " x ".join(map(str, shape))
    with pytest.raises(
        admission.UnsupportedModelError,
        match=rf"0\.self_attn\.k_proj\.weight is {stated}; .* 16 x 32",
    ):
        load(path)
    with pytest.raises(
        admission.UnsupportedModelError, match=rf"k_proj\.weight is {stated}; .* 16 x 32"
    ):
        load(path, quantization="fp8")


@pytest.mark.parametrize("is_listed", [False, True])
def test_ministral_3_is_left_to_transformers(
    is_listed: bool, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scales queries from a position on: both the lists and the proof must see it."""
    rope = {**TINY["ministral3"]["rope_parameters"], "original_max_position_embeddings": 64}  # type: ignore[dict-item]
    path = tiny_model("ministral3", rope_parameters=rope)
    if is_listed:
        monkeypatch.setitem(families.FAMILIES, "ministral3", families.FAMILIES["mistral"])
        monkeypatch.setattr(base, "_ROPE", base._ROPE | {"llama_4_scaling_beta"})
    assert isinstance(load(path), HuggingFaceModel)


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param(lambda positions: positions.max() >= 16_384, id="far away"),
        *(
            pytest.param(lambda positions, n=n: len(positions) == n, id=f"{n} rows")
            for n in CHECKED_LENGTHS
        ),
    ],
)
def test_a_decoder_that_computes_something_else_only_in_some_passes_is_not_used(
    differs: Callable[[torch.Tensor], bool], tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far away, as ministral3's scale of queries, or where other kernels run."""
    path = tiny_model("llama", max_position_embeddings=20_000)
    assert isinstance(load(path), Decoder)
    call = Block.__call__

    def other(self: Block, x: torch.Tensor, *args: Any) -> Any:
        normed = call(self, x, *args)
        if differs(args[-1].rows.positions):
            x *= 1.16
        return normed

    monkeypatch.setattr(Block, "__call__", other)
    assert isinstance(load(path), HuggingFaceModel)


@pytest.mark.parametrize("part", ["norm", "get_output_embeddings"])
def test_every_part_of_the_original_is_compared(
    part: str, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    norm, linear = modeling_llama.LlamaRMSNorm.forward, nn.Linear.forward
    path = tiny_model("llama")

    def other_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return norm(self, x) * 1.01

    def other_linear(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = linear(self, x)
        return y * 1.01 if y.shape[-1] == VOCAB else y

    if part == "norm":
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", other_norm)
    else:
        monkeypatch.setattr(nn.Linear, "forward", other_linear)
    assert isinstance(load(path), HuggingFaceModel)


def test_shards_are_read_by_their_index(own_copy: Tiny) -> None:
    path = own_copy("llama")
    expected = run_prompt(load(path)).logits
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in names if file_of[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    network = load(path)
    assert isinstance(network, Decoder)
    assert torch.equal(run_prompt(network).logits, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_taps_are_the_residual_stream_behind_their_layers(
    architecture: str, tiny_model: Tiny
) -> None:
    path = tiny_model(architecture, num_hidden_layers=4)
    network, expected = load(path), eager(path)
    assert run_prompt(network).taps is None
    network.tap([0, 2, 4])  # 4: behind the last norm
    passed = run_prompt(network)
    states = torch.stack([expected.hidden_states[b][0] for b in (1, 3, 4)], 1)
    torch.testing.assert_close(passed.taps, states, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(passed.logits, expected.logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    compiled() is None or DEVICE.type != "cpu", reason="the CPU's layers are not compiled"
)
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_compiled_layers_tap_the_same(
    has_bfloat16: bool, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_cpu_has_bfloat16", lambda: has_bfloat16)
    network = load(tiny_model("qwen3", num_hidden_layers=4), "auto", is_draft=True)
    assert isinstance(network, CompiledDecoder)
    assert network.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
    network.tap([0, 3, 4])
    first, last, normed = run_prompt(network).taps.float().unbind(1)
    assert not torch.allclose(first, last, atol=0.1)
    expected = rms_norm_reference(last, network.norm._replace(weight=network.norm.weight.float()))
    torch.testing.assert_close(normed, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(
    compiled() is None or DEVICE.type != "cpu", reason="the CPU's layers are not compiled"
)
@torch.inference_mode()
@pytest.mark.usefixtures("short_tables")
def test_a_compiled_pass_looks_its_rows_up_as_others_do(tiny_model: Tiny) -> None:
    config = ModelConfig(path=str(tiny_model("qwen3", num_hidden_layers=4)))
    model = load_network(config, DEVICE, is_draft=True)
    assert isinstance(model, CompiledDecoder)
    model.tap([0, 3])
    model.bind_cache(num_pages=64, page_size=4)
    for attention in model.attentions:
        for pages in attention.bound_pages:
            pages.normal_()
    slots = Slots(3, 48, 6, 4, DEVICE, VOCAB)
    generator = torch.Generator().manual_seed(0)
    slots.token_ids.random_(0, VOCAB, generator=generator)
    slots.block_tables[0, :3] = torch.randperm(63, generator=generator)[:48].view(3, 16).int() + 1
    slots.num_tokens[:3] = torch.tensor([4, 9, 30])
    model.bind_slots(slots)
    for starts, lens, num_logits in (
        ([0, -3, -1], [7, 2, 1], [0, 1, 1]),
        ([7, -1, -9], [1, 6, 34], [1, 6, 5]),
        ([8, 5, 4], [0, 1, 1], [0, 1, 1]),
    ):
        batch = HostBatch.build(*map(np.array, ([2, 0, 1], starts, lens, num_logits)))
        got = model.forward(batch)
        got = got._replace(logits=got.logits.clone())
        assert got.shape == batch.shape
        packed = batch.packed(3, slots.dummy)
        expected = model.run(torch.from_numpy(packed), batch.shape)
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.taps, expected.taps)
        assert all(map(torch.equal, got.rows, expected.rows))


def test_a_layer_that_is_not_there_cannot_be_tapped(tiny_model: Tiny) -> None:
    with pytest.raises(ValueError, match=r"cannot tap layers \[0, 3\]: there are 0 to 1"):
        load(tiny_model("llama")).tap([0, 3])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU's packed weights normalise for themselves")
def test_a_part_normalises_for_the_next(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama")
    network = load(path)
    called = Mock(wraps=linear_module.rms_norm)
    monkeypatch.setattr(linear_module, "rms_norm", called)
    logits = run_prompt(network).logits
    torch.testing.assert_close(logits, eager(path).logits[0], rtol=1e-3, atol=1e-3)
    assert called.call_count == 1  # in front of the first layer


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_logits_of_any_rows_begin_at_one_place(architecture: str, tiny_model: Tiny) -> None:
    network = load(tiny_model(architecture))
    expected = [run_prompt(network, PROMPT[:n]).logits.clone() for n in (2, 5, 6)]
    network.reserve_logits(5)
    few, more, most = (run_prompt(network, PROMPT[:n]).logits for n in (2, 5, 6))
    assert few.data_ptr() == more.data_ptr() != most.data_ptr()
    torch.testing.assert_close(more, expected[1])
    torch.testing.assert_close(most, expected[2])
    torch.testing.assert_close(run_prompt(network, PROMPT[:2]).logits, expected[0])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU reads weights as they are")
@pytest.mark.parametrize("rounds", [False, True])
def test_a_pass_reads_the_bytes_that_its_weights_take(rounds: bool, tiny_model: Tiny) -> None:
    path = tiny_model("llama")
    network = load(path, "auto" if rounds else "bfloat16", is_draft=rounds)
    tensors = load_file(path / "model.safetensors")
    num_weights = sum(
        t.numel() for name, t in tensors.items() if t.ndim == 2 and "embed" not in name
    )
    if rounds:  # with scales, and tiles that are filled up
        assert num_weights <= network.weight_bytes <= 1.2 * num_weights
    else:
        assert network.weight_bytes == 2 * num_weights
