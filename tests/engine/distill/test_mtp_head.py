"""The MTP head of a hybrid is trained as it is served, and serves better than before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, engine_config, generate, prompts, run, tokens
from mtp import PlainHybrid, save_tiny_hybrid
from safetensors.torch import load_file, save_file
from tiny_models import Tiny, change_tensor
from tiny_recipes import TINY
from tokenizers_for_tests import byte_level_wrapper
from transformers import AutoModelForCausalLM

from outrider.distill import train
from outrider.distill.eagle3 import states_of
from outrider.distill.mtp import MtpModule
from outrider.distill.recipe import DistillError
from outrider.distill.run import distill
from outrider.distill.text import load_shards
from outrider.engine.api import ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import HeadError

ENDS_OF_PARTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
RECIPE = replace(TINY, kind="mtp", budget="8K", passes=16, learning_rate=1e-2, last_share=0.0)


def save_target(path: Path) -> Path:
    """A target that is easily learnt: a token follows from the one before. Its head is random."""
    tokenizer = byte_level_wrapper()
    vocab = len(tokenizer)
    save_tiny_hybrid(path, vocab_size=vocab)
    tokenizer.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(vocab, 32, generator=generator))
    for name, tensor in tensors.items():
        if name.startswith("model.") and name.endswith(ENDS_OF_PARTS):
            tensor.zero_()
    tensors["model.norm.weight"].zero_()  # of which 1 is taken
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"][torch.randperm(vocab, generator=generator)] = 2 * embedding
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_training_runs_what_is_served(architecture: str, tmp_path: Path) -> None:
    """Draft behind draft, logits lead to what the formulas draft, which take rows in turn."""
    path = save_tiny_hybrid(tmp_path / "model", architecture)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    [known], k = prompts([9], 97), 3
    drafts = PlainHybrid(path).drafts(known, k)
    text = torch.tensor([known + drafts])
    module = MtpModule(model, path)
    states = states_of(model, text, None, module.boundaries)
    length = len(known) - 1
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        logits = module(states[:, :length], text[:, 1:], mask, k)
    assert [int(each[0, -1].argmax()) for each in logits] == drafts


Answers = list[list[int]]


def answered(target: Path, draft: Path, asked: list[list[int]]) -> tuple[Answers, int]:
    """Greedy answers with the drafts of one head, and how many of these were accepted."""
    engine = Engine(engine_config(target, draft, k=3))
    assert engine.info.proposer == "mtp"
    answers = [tokens(output) for output in run(engine, asked, GREEDY)]
    return answers, sum(engine.stats().accepted_per_position)


@pytest.mark.deep
def test_a_trained_head_serves_better_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, out = save_target(tmp_path / "target"), tmp_path / "head"
    losses: list[float] = []
    whole_step = train.Trainer.train_step

    def watched(trainer: train.Trainer, *args: Any) -> torch.Tensor:
        loss = whole_step(trainer, *args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(train.Trainer, "train_step", watched)
    text = tmp_path / "text"
    recipe = replace(RECIPE, target=str(target), out=str(out), text=str(text))
    distill(recipe, ignore_progress)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    conversations = load_shards(sorted(text.glob("*.safetensors")))[-3:]
    asked = [each.token_ids[: each.num_prompt_tokens].tolist() for each in conversations]
    answers, before = answered(target, target, asked)
    assert answers == [generate(target, prompt, GREEDY.max_tokens) for prompt in asked]
    again, after = answered(target, out, asked)
    assert again == answers
    assert after > before + 20
    own = {name for name in load_file(target / "model.safetensors") if name.startswith("mtp.")}
    assert load_file(out / "model.safetensors").keys() == own
    assert "An MTP head for target" in (out / "README.md").read_text()
    other = save_tiny_hybrid(tmp_path / "other")
    with pytest.raises(HeadError, match="it was made for"):
        Engine(engine_config(other, out))


def test_a_target_without_such_a_head_is_refused(tmp_path: Path, tiny_model: Tiny) -> None:
    def refused(target: Path, says: str, **changes: Any) -> None:
        recipe = replace(RECIPE, target=str(target), out=str(tmp_path / "head"), **changes)
        with pytest.raises(DistillError, match=says):
            distill(recipe, ignore_progress)

    tokenizer = byte_level_wrapper()
    dense = tiny_model("llama")
    tokenizer.save_pretrained(dense)
    refused(dense, "MTP heads are trained for hybrids .* not for a llama")
    target = save_target(tmp_path / "target")
    refused(target, "has no head to begin with: no MTP head is known", start=str(dense))
    change_tensor(target, "mtp.fc.weight", lambda t: t.to(torch.float8_e4m3fn))
    refused(target, r"mtp\.fc\.weight is quantised \(F8_E4M3\)")
    change_tensor(target, "mtp.fc.weight", None)
    refused(target, "has no head to begin with: its files hold no MTP head")
