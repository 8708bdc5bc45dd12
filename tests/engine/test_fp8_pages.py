"""Keys and values in FP8: half the bytes, and the answers of a model that rounds them."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, prompts, run, tokens
from paged import PROMPT, run_prompt
from safetensors.torch import load_file, save_file
from tiny_models import DEVICE, VOCAB, Tiny
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verification import HAS_KERNELS

from outrider.engine.api import ignore_progress
from outrider.engine.config import ConfigError, ModelConfig
from outrider.engine.engine import Engine
from outrider.engine.models import pair
from outrider.engine.models.loading import load_network
from outrider.engine.models.network import Network

DTYPES = ("auto", "model")
ON_GPU = DEVICE.type == "cuda"
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU or Triton's interpreter")


def logits_with_fp8_pages(network: Network) -> torch.Tensor:
    network.cache_dtype = torch.float8_e4m3fn
    logits: torch.Tensor = run_prompt(network).logits
    return logits


@needs_kernels
# The interpreter rounds 1.95 to 1 in FP8: there torch has to write the pages, as for gpt_neox.
@pytest.mark.parametrize("architecture", ["gpt_neox", *(["llama", "qwen3"] if ON_GPU else [])])
@torch.inference_mode()
def test_logits_are_those_of_rounded_keys_and_values(architecture: str, tiny_model: Tiny) -> None:
    plain = tiny_model(architecture)
    network = load_network(ModelConfig(path=str(plain), dtype="float32"), DEVICE)
    exact = run_prompt(network).logits
    got = logits_with_fp8_pages(network)

    def rounded(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        kept = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        return sdpa_attention_forward(module, query, *kept, *args, **more)

    AttentionInterface.register("rounded", rounded)
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="rounded").to(DEVICE)
    expected = model(PROMPT[None]).logits[0]
    difference = (exact - expected).norm()
    assert difference > 5e-3 * exact.norm()  # or the test would prove nothing
    # Which of two numbers is nearest may hang on the last bit.
    assert (got - expected).norm() < 0.1 * difference


@needs_kernels
@pytest.mark.parametrize("names", ["{0}_scale", "{0}_proj.output_scale"])
def test_scales_are_the_checkpoints(names: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """Powers of two: numbers that are neither too large nor too small are rounded as without."""
    path = tiny_model("llama")
    config = ModelConfig(path=str(path), dtype="float32")
    network = load_network(config, DEVICE)
    expected = logits_with_fp8_pages(network)
    scaled = with_scales(path, tmp_path / "scaled", names, torch.tensor([4.0]), torch.tensor(0.25))
    network = load_network(replace(config, path=str(scaled)), DEVICE)
    assert [layer.k_scale for layer in network.attentions] == [4.0, 4.0]
    got = logits_with_fp8_pages(network)
    assert (got - expected).norm() < 0.01 * expected.norm()
    assert not torch.equal(got, expected)


def test_a_scale_for_each_head_is_not_read(tiny_model: Tiny, tmp_path: Path) -> None:
    scales = torch.ones(2, 1, 1)
    path = with_scales(tiny_model("llama"), tmp_path / "heads", "{0}_scale", scales, scales)
    config = ModelConfig(path=str(path), dtype="float32", quantization="fp8")
    with pytest.raises(ValueError, match="k_scale has 2 scales; one for all heads is read"):
        load_network(config, DEVICE)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_a_scale_that_is_no_positive_number_is_not_read(
    scale: float, tiny_model: Tiny, tmp_path: Path
) -> None:
    scales = torch.ones(1), torch.tensor(scale)
    path = with_scales(tiny_model("llama"), tmp_path / "scaled", "{0}_scale", *scales)
    config = ModelConfig(path=str(path), dtype="float32", quantization="fp8")
    with pytest.raises(ValueError, match=f"v_scale is {scale}; it must be a positive number"):
        load_network(config, DEVICE)


def with_scales(
    path: Path, folder: Path, names: str, key: torch.Tensor, value: torch.Tensor
) -> Path:
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    for i in range(2):
        for which, scale in (("k", key), ("v", value)):
            tensors[f"model.layers.{i}.self_attn.{names.format(which)}"] = scale.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_token_takes_a_byte_a_number(tiny_model: Tiny) -> None:
    network = load_network(ModelConfig(path=str(tiny_model()), dtype="float32"), DEVICE)
    layers = network.attentions
    num_numbers = sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers)
    assert sum(map(network.bytes_per_token, network.attentions)) == 4 * num_numbers
    network.cache_dtype = torch.float8_e4m3fn
    assert sum(map(network.bytes_per_token, network.attentions)) == num_numbers
    network.bind_cache(num_pages=3, page_size=4)
    pages = layers[0].bound_pages
    assert pages.keys.nbytes == 3 * 4 * layers[0].num_kv_heads * layers[0].head_dim


@pytest.mark.skipif(HAS_KERNELS, reason="says what a CPU refuses")
@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("fp8", "cache.dtype is fp8, which is read on a GPU only"),
        ("int8", "may be auto, fp8 or model"),
    ],
)
def test_what_is_not_served_is_refused(dtype: str, reason: str, tiny_model: Tiny) -> None:
    config = engine_config(tiny_model(), k=0)
    with pytest.raises(ConfigError, match=reason):
        Engine(replace(config, cache=replace(config.cache, dtype=dtype)))


@pytest.mark.parametrize(
    ("file", "stated", "is_rounded"),
    [
        ("config.json", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ("config.json", {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, False),
        ("config.json", {"kv_cache_scheme": None}, False),
        ("hf_quant_config.json", {"kv_cache_quant_algo": "FP8"}, True),
        ("hf_quant_config.json", {"kv_cache_quant_algo": None}, False),
    ],
)
def test_a_checkpoint_may_say_so(
    file: str, stated: dict[str, Any], is_rounded: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given: dict[str, Any] = {"config.json": {"text_config": {}}}
    if file == "config.json":
        given[file] = {"text_config": {"quantization_config": stated}}
    else:
        given[file] = {"quantization": {"quant_algo": "NVFP4", **stated}}
    for name, content in given.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = engine_config(tmp_path, k=0)
    modes = {dtype: replace(config, cache=replace(config.cache, dtype=dtype)) for dtype in DTYPES}
    found = []
    for has_fp8 in (True, False):
        monkeypatch.setattr(pair, "uses_triton", lambda tensor, has_fp8=has_fp8: has_fp8)
        cpu = torch.device("cpu")
        found += [pair._cache_dtype(modes[name], cpu) for name in ("auto", "model")]
    assert found == [torch.float8_e4m3fn if is_rounded else None, None, None, None]


def test_why_a_cache_is_not_in_fp8_is_logged_once_for_target_and_draft(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pair, "rounds_cache", lambda folder: True)
    monkeypatch.setattr(pair, "uses_triton", lambda tensor: False)
    caplog.set_level(logging.INFO)
    pair.ModelPair(engine_config(tiny_model(), tiny_model(seed=1), k=2), ignore_progress)
    assert caplog.text.count("keeps keys and values in FP8; here") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_answers_are_equal_with_and_without_drafts(tiny_model: Tiny) -> None:
    shape = {"hidden_size": 192, "num_attention_heads": 6, "scale": 0.06}
    target, draft = tiny_model("llama", **shape), tiny_model("llama", **shape | {"scale": 0.066})
    answers = []
    for k in (0, 3):
        config = engine_config(target, draft, k=k, page_size=16, max_num_seqs=8)
        models = {
            role: replace(model, dtype="bfloat16")
            for role in ("target", "draft")
            if (model := getattr(config, role)) is not None
        }
        cache = replace(config.cache, dtype="fp8")
        engine = Engine(replace(config, cache=cache, batch_invariant=True, **models))
        assert engine.worker.pair.target.attentions[0].bound_pages.keys.element_size() == 1
        draft = engine.worker.pair.draft
        if draft is not None:
            assert draft.attentions[0].bound_pages.keys.element_size() == 1
        answers.append(
            [tokens(outputs) for outputs in run(engine, prompts((3, 40), VOCAB), GREEDY)]
        )
    assert answers[0] == answers[1]
