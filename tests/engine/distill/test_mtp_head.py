"""The MTP head of a hybrid is trained as it is served, and serves better than before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_config, prompts
from mtp import PlainHybrid, save_tiny_hybrid
from safetensors.torch import load_file
from tiny_models import Tiny, change_tensor
from tiny_recipes import TINY, check_gain, follow_from_the_last
from tokenizers_for_tests import byte_level_wrapper
from transformers import AutoModelForCausalLM

from outrider.distill import train
from outrider.distill.head import states_of
from outrider.distill.mtp import MtpModule
from outrider.distill.recipe import DistillError
from outrider.distill.run import distill
from outrider.engine.api import ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.heads.config import HeadError

RECIPE = replace(TINY, kind="mtp", budget="8K", passes=16, learning_rate=1e-2, last_share=0.0)


def save_target(path: Path) -> Path:
    """A target that is easily learnt; its head is random."""
    tokenizer = byte_level_wrapper()
    save_tiny_hybrid(path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    follow_from_the_last(path, norm=0.0)  # of which 1 is taken
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
        got = module(states[:, :length], text[:, 1:], mask, k, slice(None))
    assert [int(each.logits[0, -1].argmax()) for each in got] == drafts


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
    check_gain(target, target, out, text)
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
    other = save_tiny_hybrid(tmp_path / "other", head_dim=12)
    refused(target, "is another one: .*size mismatch for layers.0.self_attn", start=str(other))
    change_tensor(target, "mtp.fc.weight", lambda t: t.to(torch.float8_e4m3fn))
    refused(target, r"mtp\.fc\.weight is quantised \(F8_E4M3\)")
    change_tensor(target, "mtp.fc.weight", None)
    refused(target, "has no head to begin with: its files hold no MTP head")
