"""A head that drafts blocks is trained as it is served, and serves better than before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import PlainBlockHead, save_tiny_block_head
from safetensors.torch import load_file
from tiny_models import change_config, change_tensor, save_tiny_model
from tiny_pairs import save_tiny_model_with_tokenizer
from tiny_recipes import TINY, check_gain, follow_from_the_last
from transformers import AutoModelForCausalLM

from outrider.distill import train
from outrider.distill.dflash import begun
from outrider.distill.head import states_of
from outrider.distill.recipe import DistillError
from outrider.distill.run import distill
from outrider.engine.api import ignore_progress

VOCAB = 60
RECIPE = replace(TINY, kind="dflash", budget="3K", passes=16, learning_rate=1e-1, last_share=0.0)


def save_pair(path: Path, architecture: str = "qwen3", **shape: Any) -> tuple[Path, Path]:
    """A target that is easily learnt, and a random head for it."""
    target = save_tiny_model_with_tokenizer(path / "target", architecture=architecture)
    follow_from_the_last(target, norm=1.0 if architecture == "qwen3" else 0.0)
    shape = {"boundaries": (0, 1), "num_layers": 1, "scale": 0.15} | shape
    return target, save_tiny_block_head(path / "head", target, **shape)


@pytest.mark.parametrize(
    ("is_hybrid", "shape"),
    [
        (False, {"from_anchor": True, "own_embedding": True}),
        (False, {"speculators": True, "draft_vocab": 30, "windows": (None, 4)}),
        (False, {"windows": (4, 4), "is_causal": False, "head_norms": False, "own_output": True}),
        (
            True,
            {
                "markov": "vanilla",
                "boundaries": (0, 1, 2),
                "confidence": "token",
                "keys": {"output_multiplier": 0.7, "final_logit_softcapping": 4.0},
            },
        ),
        (False, {"selector": (6, 20), "convolution": (3, 4), "windows": (None, 4)}),
    ],
)
def test_training_runs_what_is_served(
    is_hybrid: bool, shape: dict[str, Any], tmp_path: Path
) -> None:
    """Behind each row of a text, logits are those of the formulas, which take a block at a time."""
    layers = {} if is_hybrid else {"num_hidden_layers": 5}
    architecture = "qwen3_5_text" if is_hybrid else "qwen3"
    path = save_tiny_model(tmp_path / "target", architecture, vocab_size=VOCAB, **layers)
    head = save_tiny_block_head(tmp_path / "head", path, **shape)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    module, plain = begun(model, head), PlainBlockHead(head, *_matrices(model))
    text = torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(0))
    states, length = states_of(model, text, None, module.boundaries), 11
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    for k in (1, 3):
        with torch.no_grad():
            got = module(states[:, :length], text[:, 1 : length + k], mask, k, slice(1, None, 3))
        for place, row in enumerate(range(1, length, 3)):
            known, drafts = text[0, : row + 2].tolist(), text[0, row + 2 : row + 5].tolist()
            expected = plain.draft_logits(states[0], known, [*drafts, 0][:k], VOCAB)
            ids = module.get_buffer("target_ids")
            logits = torch.stack([each.logits for each in got])[:, 0, place]
            logits = logits.masked_fill(logits < -1e3, -torch.inf)  # of what is no candidate
            torch.testing.assert_close(logits, expected[:, ids], rtol=1e-4, atol=1e-4)
            if "confidence" in shape:
                confidence = torch.stack([each.confidence for each in got])[:, 0, place]
                expected = plain.confidence(states[0], known, [*drafts, 0][:k])
                torch.testing.assert_close(confidence.sigmoid(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "architecture", "shape"),
    [
        ("DFlash", "qwen3", {}),
        pytest.param("DFlash2", "qwen3", {"selector": (6, 48)}, marks=pytest.mark.deep),
        pytest.param(
            *("DSpark", "qwen3_5_text", {"markov": "vanilla", "confidence": "token"}),
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_trained_head_serves_better_than_before_and_as_well_after_a_break(
    name: str,
    architecture: str,
    shape: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, start = save_pair(tmp_path, architecture, **shape)
    text, out, again = (tmp_path / name for name in ("text", "out", "again"))
    recipe = replace(RECIPE, target=str(target), start=str(start), text=str(text))
    distill(replace(recipe, out=str(out)), ignore_progress)
    check_gain(target, start, out, text)
    trained, begun_as = (load_file(path / "model.safetensors") for path in (out, start))
    assert trained.keys() == begun_as.keys()
    assert not any(torch.equal(t, begun_as[name].bfloat16()) for name, t in trained.items())
    whole_step = train.Trainer.train_step

    def interrupted(trainer: train.Trainer, *args: Any) -> torch.Tensor:
        if trainer.step == 13:
            raise KeyboardInterrupt
        return whole_step(trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(replace(recipe, out=str(again)), ignore_progress)
    distill(replace(recipe, out=str(again)), ignore_progress)
    resumed = load_file(again / "model.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in trained.items())
    assert f"A {name} head for target" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("shape", "change", "words"),
    [
        ({"boundaries": (0, 3)}, {}, "after layers 0, 3, but the target has 2"),
        ({"boundaries": (0, 2)}, {}, "behind the target's last layer"),
        ({"block_size": 40}, {}, "row_tokens is 64; it must be more than two blocks of 40"),
        ({}, {"vocab_size": 50}, "a vocabulary of 50 tokens"),
        ({"keys": {"mask_token_id": 400}}, {}, "mask token is 400, but there are 360"),
        ({}, {"hidden_size": 16}, "fc.weight is 32 x 64, and must be 16 x 64"),
        ({}, {"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is not there, and must be"),
    ],
)
def test_what_does_not_suit_the_target_is_refused(
    shape: dict[str, Any], change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    target, start = save_pair(tmp_path, **shape)
    change_config(start, **change)
    refused(target, words, start=str(start))


def test_what_is_no_head_in_16_bits_is_refused(tmp_path: Path) -> None:
    target, start = save_pair(tmp_path)
    refused(target, "trained further, not from nothing: name .* with --start", start=None)
    refused(target, "it holds no head; dflash, dflash2, dspark heads", start=str(target))
    change_tensor(start, "layers.0.self_attn.q_proj.weight", lambda t: t.to(torch.float8_e4m3fn))
    refused(target, r"q_proj\.weight is quantised \(F8_E4M3\)", start=str(start))
    narrow = save_tiny_block_head(start.with_name("narrow"), target, boundaries=(1,), draft_vocab=9)
    change_tensor(narrow, "d2t", lambda t: t + 400)
    refused(target, "d2t leads to token ids from", start=str(narrow))
    (start / "model.safetensors").write_bytes(b"")
    refused(target, "model.safetensors is damaged or cut short", start=str(start))


def refused(target: Path, words: str, **changes: Any) -> None:
    recipe = replace(RECIPE, target=str(target), out=str(target.with_name("out")), **changes)
    with pytest.raises(DistillError, match=words):
        distill(recipe, ignore_progress)
    assert not list(target.parent.glob(".out*"))


def _matrices(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    both = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, output = (each.weight.detach() for each in both)
    return embedding, output
