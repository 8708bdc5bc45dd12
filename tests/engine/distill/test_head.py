"""Heads: trained as they are served, and written as others read them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine_config, generate, prompts, run, tokens
from heads import NUM_HEADS, PlainHead
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoModelForCausalLM

from outrider.distill import train
from outrider.distill.eagle3 import HeadModule, default_boundaries, draft_tokens, states_of
from outrider.distill.recipe import DistillError, Recipe
from outrider.distill.run import distill
from outrider.engine.api import SamplingParams
from outrider.engine.engine import Engine

RECIPE = Recipe(
    target="",
    out="",
    kind="eagle3",
    draft_vocab=120,
    budget="6K",
    device="cpu",
    conversations_per_shard=8,
    max_prompt_tokens=16,
    max_answer_tokens=24,
    passes=8,
    row_tokens=32,
    batch_tokens=128,
    micro_batch_rows=2,
    learning_rate=2e-3,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model_with_tokenizer(
        tmp_path_factory.mktemp("models") / "target",
        architecture="qwen3",
        num_hidden_layers=6,
        max_position_embeddings=256,
    )


@pytest.fixture
def recipe(target: Path, tmp_path: Path) -> Recipe:
    return replace(RECIPE, target=str(target), out=str(tmp_path / "head"))


def test_training_runs_what_is_served(tmp_path: Path) -> None:
    """Draft behind draft, logits are those of the formulas, which take rows one after another."""
    vocab = 60
    # With the head's shape of the plain formulas, and their base of RoPE.
    path = save_tiny_model(
        tmp_path / "target",
        num_hidden_layers=6,
        vocab_size=vocab,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(0, vocab, 2)
    torch.manual_seed(0)
    module = HeadModule(model, ids, default_boundaries(6))
    assert module.num_heads == NUM_HEADS
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())  # as the file will have it
    module.export(model, tmp_path / "head")
    plain = PlainHead(tmp_path / "head", model.get_input_embeddings().weight.detach())
    plain.w = {k: t.float() if t.is_floating_point() else t for k, t in plain.w.items()}
    text = torch.randint(0, vocab, (1, 14))
    states = states_of(model, text, None, module.boundaries)
    mask = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    with torch.no_grad():
        got = torch.stack(module(states[:, :11], text[:, 1:], mask, 3))[:, 0]
        for row in (0, 4, 10):
            known, drafts = text[0, : row + 2].tolist(), text[0, row + 2 : row + 5].tolist()
            expected = plain.draft_logits(states[0], known, [*drafts, 0][:3], vocab)[:, ids]
            torch.testing.assert_close(got[:, row], expected, rtol=1e-3, atol=1e-3)


def test_a_trained_head_is_served_and_described(recipe: Recipe, target: Path) -> None:
    held_out = distill(recipe, lambda stage, done, total: None)
    out = Path(recipe.out)
    told = json.loads((out / "config.json").read_text())
    assert told["architectures"] == ["LlamaForCausalLMEagle3"]
    assert told["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5] or told["draft_vocab_size"] == 120
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (120, told["hidden_size"])
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    card = (out / "README.md").read_text()
    assert "| draft 3 |" in card
    assert len(held_out.later) == 2
    assert 0 < held_out.sampled_acceptance < 1
    engine = Engine(engine_config(target, out, k=3))
    asked = prompts([6, 9, 12], 250)
    answers = run(engine, asked, SamplingParams(max_tokens=20, temperature=0.0))
    assert [tokens(o) for o in answers] == [generate(target, p, 20) for p in asked]
    assert engine.info.proposer == "eagle3"


def test_training_lowers_the_loss(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    whole_step = train.Trainer.train_step

    def watched(trainer: train.Trainer, *args: object) -> torch.Tensor:
        loss = whole_step(trainer, *args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(train.Trainer, "train_step", watched)
    distill(replace(recipe, budget="8K", last_share=0.0), lambda stage, done, total: None)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_interrupted_and_resumed_it_is_the_same_head(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distill(recipe, lambda stage, done, total: None)
    again = replace(recipe, out=str(tmp_path / "again"))
    whole_step = train.Trainer.train_step

    def interrupted(trainer: train.Trainer, *args: object) -> torch.Tensor:
        if trainer.step == 13:
            raise KeyboardInterrupt
        return whole_step(trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(again, lambda stage, done, total: None)
    distill(again, lambda stage, done, total: None)
    whole, resumed = (load_file(Path(r.out) / "model.safetensors") for r in (recipe, again))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_head_does_not_go_on_from_a_draft(recipe: Recipe, target: Path) -> None:
    with pytest.raises(DistillError, match="a head begins from its target"):
        distill(replace(recipe, start=str(target)), lambda stage, done, total: None)


def test_the_most_frequent_tokens_are_drafted() -> None:
    text = torch.tensor([5, 5, 2, 9, 9, 9, 2, 2, 2, 7])
    assert draft_tokens(text, 12, 3).tolist() == [2, 5, 9]
    assert len(draft_tokens(text, 151_936, 0)) == 32_000
    assert len(draft_tokens(text, 49_152, 0)) == 8_192
    assert len(draft_tokens(text, 12, 0)) == 12


def test_boundaries_of_few_layers_are_apart() -> None:
    assert default_boundaries(36) == (2, 18, 33)
    assert default_boundaries(3) == (1, 2)
    assert default_boundaries(2) == (1,)
