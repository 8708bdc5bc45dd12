"""A draft that cannot be used: what becomes of the server's start."""

from collections.abc import Callable
from pathlib import Path

import pytest
from heads import save_tiny_head
from mtp import save_tiny_hybrid
from tiny_models import change_config, change_tensor
from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoTokenizer

from outrider.engine.config import ConfigError
from outrider.engine.engine import Engine
from outrider.server.config.pair_settings import MTP
from outrider.server.config.settings_loader import load_settings
from outrider.server.models import known_drafts
from outrider.server.models.known_drafts import KnownDraft
from outrider.server.models.pair import engine_config, prepare_pair
from outrider.server.models.store import ModelError


def _two_layers(target: Path) -> str:
    change_config(target, mtp_num_hidden_layers=2)
    return MTP


def _no_projection(target: Path) -> str:
    change_tensor(target, "mtp.fc.weight", None)
    return MTP


def _no_tensor(target: Path) -> str:
    change_tensor(target, "mtp.layers.0.mlp.up_proj.weight", None)
    return MTP


def _head_of_another_shape(target: Path) -> str:
    head = save_tiny_head(target.parent / "head", target, boundaries=(1, 2, 3))
    change_tensor(head, "fc.weight", lambda fc: fc[:, 1:].contiguous())
    return str(head)


def _damaged_model(target: Path) -> str:
    draft = save_tiny_model_with_tokenizer(target.parent / "draft", num_hidden_layers=1)
    change_tensor(draft, "model.layers.0.mlp.up_proj.weight", lambda up: up[1:].contiguous())
    return str(draft)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_two_layers, "its MTP head has 2 layers; one is read here"),
        (_no_projection, "its files hold no MTP head"),
        (_no_tensor, "its file has no tensor 'mtp.layers.0.mlp.up_proj.weight'"),
        (_head_of_another_shape, "fc.weight is 32 x 95"),
        (_damaged_model, "(llama) cannot be served: model.layers.0.mlp.up_proj.weight is 63 x 32"),
        (lambda _: "not-there/at-all", "cannot download not-there/at-all"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_draft_that_fails_ends_the_start_only_if_it_was_named(
    damage: Callable[[Path], str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before or after the target is loaded; what would draft in its place is said."""
    target = save_tiny_model_with_tokenizer(tmp_path / "target", architecture="qwen3_5_text")
    save_tiny_hybrid(target, vocab_size=len(AutoTokenizer.from_pretrained(target)))
    name = damage(target)
    known = [
        KnownDraft(model=model, num_parameters=0, family="tiny")
        for model in (name, "a/known-head", "a/known-head")
    ]
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", known)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = [f"target.model={target}", "target.device=cpu"]
    config = engine_config(prepare_pair(load_settings(assignments=given, environ={})))
    info = Engine(config).info
    assert (info.draft_dtype, info.sources) == (None, ("prediction", "grammar", "suffix"))
    instead = "drafts are looked up in the text so far; `outrider distill` makes a draft for any "
    instead += f"model, --draft takes one, such as a/known-head, which is known for {target}"
    (line,) = [each.getMessage() for each in caplog.records if says in each.getMessage()]
    assert f", so there is no draft model: {instead}" in line
    given.append(f"draft.model={name}")
    with pytest.raises((ModelError, ConfigError)) as refused:
        Engine(engine_config(prepare_pair(load_settings(assignments=given, environ={}))))
    assert says in str(refused.value)
    assert str(refused.value).endswith(
        f". Without --draft the best known one that can be loaded is taken, or else {instead}"
    )
