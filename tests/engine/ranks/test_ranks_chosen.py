"""How many GPUs share a target, if nobody says: on machines that are made up."""

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import engine_config
from heads import save_tiny_head
from mtp import save_tiny_hybrid, save_tiny_mtp_model
from quantised import quantise
from safetensors.torch import load_file, save_file
from tiny_models import Tiny, change_tensor

from outrider.engine.config import ConfigError, EngineConfig, ModelConfig
from outrider.engine.ranks import choice, fit, scales
from outrider.engine.ranks.admission import Sharing
from outrider.engine.ranks.choice import choose_ranks, pair_weights

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """GPUs with so many bytes, on which steps take nothing: the models here are tiny."""
    monkeypatch.setattr(fit, "_STEP_BYTES", 0)
    return partial(machine_of, monkeypatch)


def machine_of(monkeypatch: pytest.MonkeyPatch, *sizes: float) -> None:
    gpus = [SimpleNamespace(name="H100", total_memory=size) for size in sizes]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])


def on_gpu(target: Path, draft: Path | None = None, device: str = "cuda") -> EngineConfig:
    config = engine_config(target, draft)
    return replace(config, target=replace(config.target, dtype="bfloat16"), device=device)


def gpu_for(config: EngineConfig, num_gpus: int) -> float:
    """The memory of the smallest GPU of which so many hold the pair."""
    return pair_weights(config).of_first(num_gpus) / 0.8 + 1


def chosen(config: EngineConfig) -> int:
    return choose_ranks(config).target.tensor_parallel


def matrices(path: Path, *, in_layers: bool) -> int:
    """How many numbers the matrices of a model have."""
    tensors = load_file(path / "model.safetensors").items()
    return sum(t.numel() for name, t in tensors if t.ndim > 1 and (".layers." in name) == in_layers)


@pytest.mark.parametrize(
    ("visible", "needed", "number"),
    [(1, 1, 1), (4, 1, 1), (4, 2, 2), (4, 3, 4), (8, 4, 4)],
)
def test_the_fewest_gpus_that_hold_the_pair_share_the_target(
    visible: int, needed: int, number: int, tiny_model: Tiny, machine: Machine
) -> None:
    """Four heads: three GPUs cannot share them."""
    config = on_gpu(tiny_model())
    machine(*[gpu_for(config, needed)] * visible)
    assert chosen(config) == number


def test_with_less_room_for_the_cache_as_many_share_it_as_can(
    tiny_model: Tiny, machine: Machine
) -> None:
    """Three GPUs would have room for it, but cannot share it, and two hold it."""
    config = on_gpu(tiny_model())
    size = gpu_for(config, 2) * 0.95
    machine(*[size] * 3)
    assert chosen(config) == 2
    machine(*[size] * 4)
    assert chosen(config) == 4
    machine(gpu_for(config, 1) * 0.95)  # a server that has started so far still does
    assert chosen(config) == 1


def test_what_fits_on_no_number_of_gpus_is_refused_with_what_would(
    tiny_model: Tiny, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs of 80 GB, and a pair with the sizes of Llama-3.1-70B and 3.2-1B."""
    counted = choice._tensors

    def as_large(model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
        sizes = dict(counted(model, dtype))
        factor = 2.5e9 / sum(sizes.values())
        if model.path != str(draft):
            plain = dict(counted(replace(model, quantization=None), dtype))
            in_layers = sum(size for name, size in plain.items() if ".layers." in name)
            factor = 136.9e9 / in_layers
        for name, size in sizes.items():
            in_layer = model.path == str(draft) or ".layers." in name
            yield name, size * factor if in_layer else 2.1e9 * (size > 100)

    monkeypatch.setattr(choice, "_tensors", as_large)
    monkeypatch.setattr(choice, "_MOST_ADVISED", 4)
    machine_of(monkeypatch, 85.5e9, 85.5e9)
    config = on_gpu(tiny_model(), draft)
    with pytest.raises(ConfigError) as refused:
        choose_ranks(config)
    assert str(refused.value) == (
        "the weights of target and draft take 143.6 GB, of which 6.7 are on the first GPU however "
        "many share the target; visible GPUs: 2, of 86 GB, with room for 68.4. Take 4 GPUs of "
        'this size, no draft (--no-draft), target.quantization = "fp8", a checkpoint in fewer bits '
        "or a smaller model"
    )
    machine_of(monkeypatch, 150.1e9, 150.1e9)  # and of 141 GB
    assert chosen(config) == 2


def test_memory_of_the_first_gpus_decides(tiny_model: Tiny, machine: Machine) -> None:
    """Those that share a target are alike."""
    config = on_gpu(tiny_model())
    one, half = gpu_for(config, 1), gpu_for(config, 2)
    machine(half, half, one)
    assert chosen(config) == 2
    machine(one, half)
    assert chosen(config) == 1
    machine(half, one, one)
    with pytest.raises(ConfigError, match="2 GPUs cannot share it: the GPUs have 0, 0 GiB"):
        choose_ranks(config)


@pytest.mark.parametrize(("device", "number"), [("cuda", 2), ("cuda:0", None), ("cuda:1", None)])
def test_a_device_with_a_number_is_one_gpu(
    device: str, number: int | None, tiny_model: Tiny, machine: Machine
) -> None:
    config = on_gpu(tiny_model(), device=device)
    machine(*[gpu_for(config, 2)] * 2)
    if number is None:
        with pytest.raises(ConfigError, match=f"target.device names one GPU, {device}: set it to"):
            choose_ranks(config)
    else:
        assert chosen(config) == number
    machine(*[gpu_for(config, 1)] * 2)
    assert chosen(config) == 1


def test_the_memory_of_the_named_gpu_counts(tiny_model: Tiny, machine: Machine) -> None:
    config = on_gpu(tiny_model(), device="cuda:1")
    machine(1, gpu_for(config, 1))
    assert chosen(config) == 1


def test_what_cannot_be_shared_is_on_one_gpu_or_refused(tiny_model: Tiny, machine: Machine) -> None:
    config = on_gpu(tiny_model("gemma2"))
    machine(*[gpu_for(config, 1)] * 2)
    assert chosen(config) == 1
    machine(*[gpu_for(config, 2)] * 2)
    with pytest.raises(ConfigError, match=r"share it: the target runs as transformers .*\)\. Take"):
        choose_ranks(config)


def test_a_number_that_would_cut_scales_is_not_chosen(
    tiny_model: Tiny, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks would divide its heads and widths, too. Its layers are looked through once."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    torch.manual_seed(0)
    config = on_gpu(quantise(tiny_model(**sizes), tmp_path, "fp8 of blocks"))
    assert Sharing(config.target).why_not(4) is not None
    machine(*[gpu_for(config, 2)] * 4)
    assert chosen(config) == 2
    machine(*[gpu_for(config, 4)] * 4)
    looked, groups_in = [], scales._groups_in
    monkeypatch.setattr(scales, "_groups_in", lambda parts: looked.append(0) or groups_in(parts))
    with pytest.raises(ConfigError, match="with room for"):
        choose_ranks(config)
    assert len(looked) == 2 * 8


def test_a_gguf_file_is_counted_unpacked_and_not_shared(tmp_path: Path, machine: Machine) -> None:
    pytest.importorskip("gguf")  # `make gpu` has none
    from gguf import GGMLQuantizationType
    from tiny_gguf import llama_directory

    type_ = GGMLQuantizationType.Q4_0
    config = on_gpu(llama_directory(tmp_path, type_, type_))
    file_bytes = (tmp_path / "model.gguf").stat().st_size
    assert pair_weights(config).in_all > 3 * file_bytes
    machine(*[2 * file_bytes] * 4)
    with pytest.raises(ConfigError, match=r"is a GGUF file, which is read whole\. Take a checkpo"):
        choose_ranks(config)
    machine(*[gpu_for(config, 1)] * 4)
    assert chosen(config) == 1


def test_rounding_to_fp8_halves_the_layers(tiny_model: Tiny, machine: Machine) -> None:
    path = tiny_model(num_hidden_layers=8)
    plain = on_gpu(path)
    rounded = replace(plain, target=replace(plain.target, quantization="fp8"))
    all_, fewer = pair_weights(plain), pair_weights(rounded)
    assert all_.in_all - fewer.in_all == matrices(path, in_layers=True)
    assert all_.whole == fewer.whole
    machine(*[gpu_for(rounded, 1)] * 2)
    assert (chosen(rounded), chosen(plain)) == (1, 2)
    machine(gpu_for(rounded, 1))
    with pytest.raises(
        ConfigError, match=r'Take 2 GPUs of this size, target.quantization = "fp8", a che'
    ):
        choose_ranks(plain)


def test_plain_numbers_count_in_the_dtype_that_they_are_loaded_in(tiny_model: Tiny) -> None:
    path = tiny_model()
    config = on_gpu(path)
    own = replace(config, target=replace(config.target, dtype="auto"))  # float32, in the file
    assert pair_weights(own).in_all == 2 * pair_weights(config).in_all
    norm = 32
    assert pair_weights(config).whole == 2 * (matrices(path, in_layers=False) + norm)


def test_quantised_numbers_count_as_they_are(tiny_model: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_model() / "model.safetensors").read_bytes())
    before = pair_weights(on_gpu(tmp_path)).in_all
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        change_tensor(tmp_path, "model.layers.0.mlp.up_proj.weight", lambda t, d=dtype: t.to(d))
        assert before - pair_weights(on_gpu(tmp_path)).in_all == 32 * 64


def test_parts_for_images_do_not_count(tiny_model: Tiny, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model(), tmp_path / "with_images")
    of_text, tensors = pair_weights(on_gpu(path)), load_file(path / "model.safetensors")
    tensors["model.visual.blocks.0.mlp.fc1.weight"] = torch.ones(32, 32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert pair_weights(on_gpu(path)) == of_text


def test_rounding_is_not_advised_for_what_is_quantised(
    tiny_model: Tiny, tmp_path: Path, machine: Machine
) -> None:
    """It would be refused, though its attention is still plain."""
    path = quantise(
        tiny_model(num_hidden_layers=8), tmp_path, "fp8 of tensors", leave=("self_attn",)
    )
    plain = on_gpu(path)
    machine(gpu_for(replace(plain, target=replace(plain.target, quantization="fp8")), 1))
    with pytest.raises(ConfigError, match="Take 2 GPUs of this size, a checkpoint in fewer bits"):
        choose_ranks(plain)


def test_a_draft_that_takes_a_second_gpu_is_named(
    tiny_model: Tiny, draft: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """It lies on the first GPU, whole."""
    caplog.set_level(logging.INFO, "outrider")
    config = on_gpu(tiny_model(num_hidden_layers=8), draft)
    alone = replace(config, draft=None)
    added = pair_weights(config).whole - pair_weights(alone).whole
    assert added == 4 * sum(t.numel() for t in load_file(draft / "model.safetensors").values())
    machine(*[gpu_for(alone, 1)] * 2)
    assert chosen(alone) == 1
    assert caplog.text == ""
    assert chosen(config) == 2
    assert "target.tensor_parallel: 2 GPUs share the target: the weights of target" in caplog.text
    assert "fewer are enough with no draft (--no-draft)" in caplog.text
    idle = replace(config.speculation, num_speculative_tokens=0)
    assert pair_weights(replace(config, speculation=idle)) == pair_weights(alone)


def test_a_draft_that_nobody_named_is_left_out_where_its_target_alone_fits(
    tiny_model: Tiny, draft: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    named = on_gpu(tiny_model(num_hidden_layers=8), draft)
    assert named.draft is not None
    optional = replace(named.draft, is_optional=True, instead="texts draft")
    config = replace(named, draft=optional)
    machine(pair_weights(replace(named, draft=None)).in_all / 0.9 + 1)
    with pytest.raises(ConfigError, match=r"GPUs of this size, no draft \(--no-draft\)"):
        choose_ranks(named)
    assert choose_ranks(config).loaded_draft is None
    assert "with room for" in caplog.text
    assert ", so there is no draft model: texts draft" in caplog.text
    machine(gpu_for(config, 1))
    assert choose_ranks(config) == config


@pytest.mark.parametrize("pickled", [False, True])
def test_a_head_counts_in_the_dtype_of_its_target(
    pickled: bool, tiny_model: Tiny, tmp_path: Path
) -> None:
    target = tiny_model(num_hidden_layers=4)
    head = save_tiny_head(tmp_path, target, pickled=pickled)
    config = on_gpu(target, head)
    added = pair_weights(config).whole - pair_weights(replace(config, draft=None)).whole
    stored_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    share = 1.0 if pickled else 0.5  # a file of torch.save counts as it is
    assert 0.8 * share * stored_bytes < added < 1.02 * share * stored_bytes


@pytest.mark.parametrize("architecture", ["mimo", "glm4_moe", "qwen3_5_text"])
def test_an_mtp_head_counts_if_it_drafts(architecture: str, tmp_path: Path) -> None:
    """The layers of the target do not include it."""
    save = save_tiny_hybrid if architecture == "qwen3_5_text" else save_tiny_mtp_model
    config = on_gpu(save(tmp_path, architecture), tmp_path)
    assert config.draft is not None
    assert config.draft.is_mtp
    with_head, alone = pair_weights(config), pair_weights(replace(config, draft=None))
    assert with_head.in_all - with_head.whole == alone.in_all - alone.whole
    names = {"mimo": ".mtp_layers.", "glm4_moe": ".layers.3.", "qwen3_5_text": "mtp."}
    tensors = load_file(tmp_path / "model.safetensors").items()
    of_head = sum(t.numel() for name, t in tensors if names[architecture] in name)
    assert with_head.whole - alone.whole == 2 * of_head > 0


def test_files_that_cannot_be_read_are_left_to_the_loader(
    tmp_path: Path, machine: Machine, tiny_model: Tiny
) -> None:
    machine(1, 1)
    config = on_gpu(tmp_path)
    assert choose_ranks(config) == config
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert choose_ranks(config) == config
