"""What ranks cannot share, and where: refused before weights are read."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import engine_config
from heads import save_tiny_head
from quantised import quantise, quantise_experts
from tiny_models import DEVICE, Tiny
from two_ranks import shared, with_shared_draft

from outrider.engine.config import ConfigError, EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.models import pair
from outrider.engine.ranks import admission, followers


@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs no GPU")
def test_an_engine_beside_another_of_the_process_is_refused(
    tiny_model: Tiny, start: Callable[[EngineConfig], Engine]
) -> None:
    config = engine_config(tiny_model())
    engine = start(config)
    with pytest.raises(ConfigError, match=r"torch\.distributed is in use in this process.*close"):
        Engine(shared(config))
    engine.worker.close()
    start(config)


@pytest.mark.parametrize(
    ("size", "architecture", "reason"),
    [
        (3, "llama", r"does not divide .*num_key_value_heads 2: set it to 1, 2 or 4$"),
        (
            2,
            "gpt_oss",
            r"runs as transformers has it \(only experts in MXFP4 have .*: leave it out",
        ),
        (2, "granitemoehybrid", r"does not divide mamba_n_groups 1: set it to 1$"),
        (2, "gemma2", "runs as transformers has it .*: leave it out, or run a replica on each GPU"),
        (0, "llama", "target.tensor_parallel is 0; it is at least 1"),
    ],
)
def test_a_target_that_cannot_be_shared_is_refused_at_once(
    size: int,
    architecture: str,
    reason: str,
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a process is started, or a weight is read."""
    monkeypatch.setattr(followers, "Followers", None)
    monkeypatch.setattr(pair, "load_network", None)
    with pytest.raises(ConfigError, match=reason):
        Engine(shared(engine_config(tiny_model(architecture)), size))


def test_groups_of_experts_in_mxfp4_are_not_cut(tiny_model: Tiny, tmp_path: Path) -> None:
    target = quantise_experts(tiny_model("gpt_oss"), tmp_path)
    reason = r"does not divide intermediate_size 64 in groups of 32: set it to 1 or 2$"
    with pytest.raises(ConfigError, match=reason):
        Engine(shared(engine_config(target), 4))


def test_numbers_of_ranks_that_would_work_cut_neither_heads_nor_scales(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three would share these groups of 128 inputs, but not the two KV heads."""
    monkeypatch.setattr(followers, "Followers", None)
    sizes = {"num_attention_heads": 6, "hidden_size": 384, "intermediate_size": 768, "head_dim": 64}
    path = quantise(tiny_model("qwen3", **sizes), tmp_path, "fp8 of blocks")
    reason = r"o_proj cannot be shared by 2: 128 inputs .* 192 inputs would cut: set it to 1$"
    with pytest.raises(ConfigError, match=reason):
        Engine(shared(engine_config(path)))


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([("H100", 80), ("H100", 80)], None),
        (
            [("H100", 80), ("A100", 80)],
            "the GPUs are A100 and H100, but ranks need GPUs of one model: ",
        ),
        ([("H100", 80), ("H100", 64)], "the GPUs have 80, 64 GiB, and all get shares of the same"),
        ([("H100", 80)], "1 GPU is visible: set it to 1 at most"),
    ],
)
def test_ranks_have_gpus_of_one_kind(
    gpus: list[tuple[str, int]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the kernels for its own."""
    made = [SimpleNamespace(name=name, total_memory=gib << 30) for name, gib in gpus]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: made[i])
    found = admission.why_not_these_gpus(2, torch.device("cuda"))
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)


@pytest.mark.parametrize(
    ("ranks", "size", "draft", "reason"),
    [
        (1, 2, {}, "target.tensor_parallel is 1, and a draft is whole on the first of its ranks"),
        (4, 2, {}, "target.tensor_parallel is 4, .* leave it out, or set both to one number"),
        (2, 4, {}, "target.tensor_parallel is 2, .* leave it out, or set both to one number"),
        (2, 2, {"architecture": "gemma2"}, "the draft runs as transformers has it .*: leave it"),
        (2, 2, {"intermediate_size": 63}, "does not divide intermediate_size 63: leave it out"),
        (2, 2, None, "only a draft model can be shared, and this is a head: leave it out"),
    ],
)
def test_a_draft_that_cannot_be_shared_is_refused_at_once(
    ranks: int,
    size: int,
    draft: dict[str, Any] | None,
    reason: str,
    tiny_model: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followers, "Followers", None)
    monkeypatch.setattr(pair, "load_network", None)
    target = tiny_model(num_key_value_heads=4)
    path = save_tiny_head(tmp_path, target) if draft is None else tiny_model(**draft)
    config = with_shared_draft(shared(engine_config(target, path), ranks), size)
    with pytest.raises(ConfigError, match=rf"^draft\.tensor_parallel is {size}, but .*{reason}"):
        Engine(config)
