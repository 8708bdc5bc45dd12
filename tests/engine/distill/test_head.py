"""Heads are trained as they are served; whole trainings of them are in test_run.py."""

import json
from pathlib import Path

import pytest
import torch
from heads import NUM_HEADS, PlainHead, tensors_of
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from outrider.distill.eagle3 import Eagle3Module, default_boundaries, draft_tokens
from outrider.distill.head import states_of
from outrider.distill.recipe import DistillError, Recipe
from outrider.distill.train_head import kept_states
from outrider.engine import host_memory


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
    module = Eagle3Module(model, ids, default_boundaries(6))
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
        drafts = module(states[:, :11], text[:, 1:], mask, 3, slice(None))
        got = torch.stack([drafted.logits for drafted in drafts])[:, 0]
        for row in (0, 4, 10):
            known, drafts = text[0, : row + 2].tolist(), text[0, row + 2 : row + 5].tolist()
            expected = plain.draft_logits(states[0], known, [*drafts, 0][:3], vocab)[:, ids]
            torch.testing.assert_close(got[:, row], expected, rtol=1e-3, atol=1e-3)


def test_a_saved_head_is_what_other_engines_load(tmp_path: Path) -> None:
    """As LlamaForCausalLMEagle3 is in vLLM and SGLang, which map no other names."""
    path = save_tiny_model(tmp_path / "target", num_hidden_layers=6, vocab_size=60)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    module = Eagle3Module(model, torch.arange(0, 60, 2), default_boundaries(6))
    module.export(model, tmp_path / "head")
    config = json.loads((tmp_path / "head/config.json").read_text())
    width, inner, head_dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    num_q, num_kv = (head_dim * config[f"num_{of}_heads"] for of in ("attention", "key_value"))
    attention, mlp = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
    assert {n: tuple(t.shape) for n, t in tensors_of(tmp_path / "head").items()} == {
        "fc.weight": (width, 3 * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        attention.format("q"): (num_q, 2 * width),
        attention.format("k"): (num_kv, 2 * width),
        attention.format("v"): (num_kv, 2 * width),
        attention.format("o"): (width, num_q),
        mlp.format("gate"): (inner, width),
        mlp.format("up"): (inner, width),
        mlp.format("down"): (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (30, width),
        "d2t": (30,),
        "t2d": (60,),
    }
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (60, 30)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(module.boundaries)
    assert config["tie_word_embeddings"] is False  # else SGLang takes its embedding for the head


def test_the_most_frequent_tokens_are_drafted() -> None:
    text = torch.tensor([5, 5, 2, 9, 9, 9, 2, 2, 2, 7])
    assert draft_tokens(text, 12, 3).tolist() == [2, 5, 9]
    assert len(draft_tokens(text, 151_936, 0)) == 32_000
    assert len(draft_tokens(text, 49_152, 0)) == 8_192
    assert len(draft_tokens(text, 12, 0)) == 12


def test_states_are_kept_if_half_of_what_a_container_leaves_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path / "target", num_hidden_layers=6, vocab_size=60)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    recipe = Recipe(target=str(path), out=str(tmp_path / "head"), kind="eagle3")
    a_token = 3 * 4 * model.config.hidden_size
    monkeypatch.setattr(host_memory, "_left_by_groups", lambda: [2 * 100 * a_token])
    assert kept_states(recipe, model, 99) == default_boundaries(6)
    assert kept_states(recipe, model, 101) == ()


def test_a_hybrid_whose_states_have_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again in rows of several conversations, each would begin with the last one's state."""
    path = save_tiny_model(tmp_path / "target", "qwen3_5_text", vocab_size=60)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    recipe = Recipe(target=str(path), out=str(tmp_path / "head"), kind="eagle3")
    monkeypatch.setattr(host_memory, "_left_by_groups", lambda: [1000])
    with pytest.raises(DistillError, match=r"of 99 tokens take .* give a smaller budget"):
        kept_states(recipe, model, 99)


def test_boundaries_of_few_layers_are_apart() -> None:
    assert default_boundaries(36) == (2, 18, 33)
    assert default_boundaries(3) == (1, 2)
    assert default_boundaries(2) == (1,)
