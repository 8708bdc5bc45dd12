"""A whole distillation of a tiny target: what appears, what goes on after a break, what not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pairs import save_tiny_model_with_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.distill import train
from outrider.distill.recipe import DistillError, Recipe
from outrider.distill.run import distill

RECIPE = Recipe(
    target="",
    out="",
    size="1x64",
    budget="4K",
    device="cpu",
    conversations_per_shard=8,
    max_prompt_tokens=16,
    max_answer_tokens=24,
    passes=8,
    row_tokens=32,
    batch_tokens=128,
    micro_batch_rows=2,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model_with_tokenizer(
        tmp_path_factory.mktemp("models") / "target",
        architecture="qwen3",
        max_position_embeddings=256,
    )


@pytest.fixture
def recipe(target: Path, tmp_path: Path) -> Recipe:
    return replace(RECIPE, target=str(target), out=str(tmp_path / "draft"))


def run(recipe: Recipe) -> dict[str, torch.Tensor]:
    distill(recipe, lambda stage, done, total: None)
    return load_file(Path(recipe.out) / "model.safetensors")


def test_the_draft_is_an_ordinary_model_directory_with_the_targets_tokenizer(
    recipe: Recipe, target: Path
) -> None:
    run(recipe)
    out = Path(recipe.out)
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert draft.config.model_type == "llama"
    assert draft.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).get_vocab() == (
        AutoTokenizer.from_pretrained(target).get_vocab()
    )
    assert "held-out" in (out / "README.md").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["draft"]


def test_interrupted_and_resumed_it_is_the_same_draft(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = run(recipe)
    again = replace(recipe, out=str(tmp_path / "again"))
    whole_step = train.Trainer.train_step

    def interrupted(trainer: train.Trainer, *args: object) -> torch.Tensor:
        if trainer.step == 13:
            raise KeyboardInterrupt
        return whole_step(trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(again)
    assert not Path(again.out).exists()
    steps: list[int] = []

    def counted(trainer: train.Trainer, *args: object) -> torch.Tensor:
        steps.append(trainer.step)
        return whole_step(trainer, *args)

    monkeypatch.setattr(train.Trainer, "train_step", counted)
    resumed = run(again)
    assert steps[0] == 13
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())


def test_training_lowers_the_loss(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    whole_step = train.Trainer.train_step

    def watched(trainer: train.Trainer, *args: object) -> torch.Tensor:
        loss = whole_step(trainer, *args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(train.Trainer, "train_step", watched)
    run(replace(recipe, budget="8K"))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_draft_can_go_on_from_where_another_ended(
    recipe: Recipe, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", _without_a_change)
        again = run(replace(recipe, start=recipe.out, size="2x64", out=str(tmp_path / "again")))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    other = save_tiny_model_with_tokenizer(tmp_path / "other", vocab_size=1024)
    with pytest.raises(DistillError, match="vocabulary of 1024"):
        run(replace(recipe, start=str(other), out=str(tmp_path / "third")))


def _without_a_change(trainer: train.Trainer, *args: object) -> None:
    trainer.step += 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "/nowhere"}, "start: /nowhere is no model directory"),
        ({"target": "/nowhere"}, "no config.json"),
        ({"out": "/nowhere/draft"}, "no directory"),
        ({"size": "small"}, "LAYERSxWIDTH"),
        ({"size": "2x100"}, "multiple of 64"),
        ({"budget": "10"}, "it is a time"),
        ({"prompts": "/nowhere.txt"}, "nowhere.txt"),
        ({"budget": "1K", "row_tokens": 4096}, "larger budget"),
    ],
)
def test_what_cannot_end_well_is_refused(
    recipe: Recipe, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(DistillError, match=words):
        run(replace(recipe, **changes))


def test_an_output_that_exists_is_left_alone(recipe: Recipe) -> None:
    Path(recipe.out).mkdir()
    with pytest.raises(DistillError, match="exists already"):
        run(recipe)


def test_another_recipe_does_not_go_on_with_an_unfinished_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", full)
        with pytest.raises(DistillError, match="no room left"):
            run(recipe)
    with pytest.raises(DistillError, match="size was '1x64'"):
        run(replace(recipe, size="2x64"))
    run(recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told(recipe: Recipe) -> None:
    with pytest.raises(DistillError, match="no GPU"):
        run(replace(recipe, device="cuda"))


def test_user_turns_may_come_from_a_file(recipe: Recipe, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n{"messages": [{"role": "user", "content": "cd"}]}\n')
    run(replace(recipe, prompts=str(prompts)))
    assert "prompts.jsonl" in (Path(recipe.out) / "README.md").read_text()
