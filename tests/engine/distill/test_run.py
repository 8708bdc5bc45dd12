"""A whole distillation of a tiny target: what appears, what goes on after a break, what not."""

import json
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engines import engine_config, generate, prompts, tokens
from engines import run as run_engine
from safetensors.torch import load_file
from tiny_models import change_tensor
from tiny_pairs import save_tiny_model_with_tokenizer
from tiny_recipes import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.distill import replicas, train
from outrider.distill.prompts import user_turns
from outrider.distill.recipe import DistillError, Recipe
from outrider.distill.run import distill
from outrider.distill.text import Conversation, Writer
from outrider.engine.api import SamplingParams, ignore_progress
from outrider.engine.engine import Engine
from outrider.engine.models.admission import UnsupportedModelError

DRAFT = replace(TINY, size="1x64", budget="4K", device="cpu", passes=8)
HEAD = replace(DRAFT, kind="eagle3", draft_vocab=120, budget="6K", learning_rate=2e-3)


class Distilled(NamedTuple):
    out: Path
    tensors: dict[str, torch.Tensor]
    held_out: Any  # how it did on held-out text
    losses: list[float]  # of its steps


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
    """The shortest, for what does not hang on how much a draft has learnt."""
    short = replace(DRAFT, budget="1K", passes=4)  # of 250 tokens of text
    return replace(short, target=str(target), out=str(tmp_path / "draft"))


@pytest.fixture
def recipe_of(target: Path, tmp_path: Path) -> Callable[[str], Recipe]:
    """The recipe of a `draft` or a `head`."""
    recipes = {"draft": DRAFT, "head": HEAD}
    return lambda kind: replace(recipes[kind], target=str(target), out=str(tmp_path / kind))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    return distilled(target, DRAFT, tmp_path_factory.mktemp("distilled") / "draft")


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    return distilled(target, HEAD, tmp_path_factory.mktemp("distilled") / "head")


def distilled(target: Path, recipe: Recipe, out: Path) -> Distilled:
    losses: list[float] = []
    whole_step = train.Trainer.train_step

    def watched(trainer: train.Trainer, *args: Any) -> torch.Tensor:
        loss = whole_step(trainer, *args)
        losses.append(loss.item())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", watched)
        held_out = distill(replace(recipe, target=str(target), out=str(out)), ignore_progress)
    return Distilled(out, load_file(out / "model.safetensors"), held_out, losses)


def run(recipe: Recipe) -> dict[str, torch.Tensor]:
    distill(recipe, ignore_progress)
    return load_file(Path(recipe.out) / "model.safetensors")


def test_the_draft_is_an_ordinary_model_directory_with_the_targets_tokenizer(
    draft: Distilled, target: Path
) -> None:
    out = draft.out
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "llama"
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).get_vocab() == (
        AutoTokenizer.from_pretrained(target).get_vocab()
    )
    assert "held-out" in (out / "README.md").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["draft"]


def test_a_trained_head_is_served_and_described(head: Distilled, target: Path) -> None:
    config = json.loads((head.out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert head.tensors["lm_head.weight"].shape == (120, config["hidden_size"])
    assert head.tensors["d2t"].dtype == torch.int64
    assert head.tensors["t2d"].dtype == torch.bool
    assert "| draft 3 |" in (head.out / "README.md").read_text()
    assert len(head.held_out.later) == 2
    assert 0 < head.held_out.sampled_acceptance < 1
    engine = Engine(engine_config(target, head.out, k=3))
    asked = prompts([6, 9, 12], 250)
    answers = run_engine(engine, asked, SamplingParams(max_tokens=20, temperature=0.0))
    assert [tokens(o) for o in answers] == [generate(target, p, 20) for p in asked]
    assert engine.info.proposer == "eagle3"


@pytest.mark.parametrize(
    ("kind", "sig"),
    [
        ("draft", signal.SIGTERM),
        pytest.param("head", signal.SIGINT, marks=pytest.mark.deep),
        pytest.param("draft", signal.SIGINT, marks=pytest.mark.deep),
    ],
)
def test_interrupted_and_resumed_it_is_the_same(
    kind: str,
    sig: signal.Signals,
    recipe_of: Callable[[str], Recipe],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = request.getfixturevalue(kind).tensors
    again = recipe_of(kind)
    whole_step = train.Trainer.train_step

    def interrupted(trainer: train.Trainer, *args: object) -> torch.Tensor:
        if trainer.step == 13:
            signal.raise_signal(sig)
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


def test_training_lowers_the_loss(draft: Distilled) -> None:
    of_one_kind = draft.losses[: int(len(draft.losses) * (1 - DRAFT.last_share))]  # then another
    assert sum(of_one_kind[-5:]) < 0.9 * sum(of_one_kind[:5])


@pytest.mark.deep
def test_training_lowers_the_loss_of_a_head(target: Path, tmp_path: Path) -> None:
    losses = distilled(
        target, replace(HEAD, budget="16K", last_share=0.0), tmp_path / "head"
    ).losses
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_draft_can_go_on_from_where_another_ended(
    recipe: Recipe, draft: Distilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", _without_a_change)
        again = run(replace(recipe, start=str(draft.out), size="2x64"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in draft.tensors.items())


@pytest.mark.parametrize(
    ("target_is", "start_is", "changes", "words"),
    [
        ({}, {"vocab_size": 1024}, {}, "vocabulary of 1024"),
        ({}, {"architecture": "gemma2"}, {}, "caps or scales"),
        ({"architecture": "gpt_neox"}, None, {"kind": "eagle3"}, "no num_key_value_heads"),
        ({"architecture": "gpt2"}, None, {"kind": "eagle3"}, "no num_key_value_heads"),
        ({"architecture": "opt"}, None, {"kind": "eagle3"}, "no num_key_value_heads"),
        ({}, None, {"max_answer_tokens": 300}, "has positions for 256"),
    ],
)
def test_what_does_not_suit_the_target_is_refused_before_it_writes(
    target_is: dict[str, Any],
    start_is: dict[str, Any] | None,
    changes: dict[str, Any],
    words: str,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    if target_is:
        target = save_tiny_model_with_tokenizer(tmp_path / "target", **target_is)
        recipe = replace(recipe, target=str(target))
    if start_is:
        start = save_tiny_model_with_tokenizer(tmp_path / "start", **start_is)
        recipe = replace(recipe, start=str(start))
    with pytest.raises(DistillError, match=words):
        run(replace(recipe, **changes))
    assert not list(tmp_path.glob(".draft*"))


def test_a_head_does_not_go_on_from_a_draft(
    recipe_of: Callable[[str], Recipe], target: Path
) -> None:
    with pytest.raises(DistillError, match="a head begins from its target"):
        run(replace(recipe_of("head"), start=str(target)))


def test_models_that_lack_a_tensor_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    """transformers would draw it at random."""
    model = save_tiny_model_with_tokenizer(tmp_path / "model")
    missing = "model.layers.1.mlp.up_proj.weight"
    change_tensor(model, missing, None)
    with pytest.raises(DistillError, match=rf"start: cannot load .*lack {missing}"):
        run(replace(recipe, start=str(model)))
    with pytest.raises(UnsupportedModelError, match=f"lack {missing}"):
        replicas._load_target(str(model), torch.device("cpu"))


def _without_a_change(trainer: train.Trainer, *args: object) -> None:
    trainer.step += 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "/nowhere"}, "start: /nowhere is no model directory"),
        ({"target": "/nowhere"}, "no config.json"),
        ({"out": "/nowhere/draft"}, "no directory"),
        ({"text": "/nowhere/text"}, "/nowhere is no directory"),
        ({"text": __file__}, "test_run.py is no directory"),
        ({"size": "small"}, "LAYERSxWIDTH"),
        ({"size": "2x100"}, "multiple of 64"),
        ({"budget": "10"}, "it is a time"),
        ({"prompts": "/nowhere.txt"}, "nowhere.txt"),
        ({"raw_share": 1.5}, "it is a share"),
        ({"budget": "1K", "row_tokens": 4096}, "larger budget"),
    ],
)
def test_what_cannot_end_well_is_refused(
    recipe: Recipe, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DistillError, match=words):
        run(replace(recipe, **changes))


def test_text_is_held_out_from_all_of_it() -> None:
    texts = [Conversation(torch.tensor([i]), 0) for i in range(1000)]
    held_out, rest = replicas.parted(texts)
    assert [int(c.token_ids) for c in held_out] == list(range(0, 1000, 20))
    assert len(rest) == 950
    assert not {*map(id, held_out)} & {*map(id, rest)}
    assert len(replicas.parted(texts * 100)[0]) <= 256
    assert len(replicas.parted(texts[:8])[0]) == 1


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
def test_a_disk_too_full_for_a_checkpoint_is_reported(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / ".draft.distilling/checkpoint.partial"

    def interrupted(*args: object) -> torch.Tensor:
        scratch.symlink_to("/dev/full")
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Trainer, "train_step", interrupted)
    with pytest.raises(DistillError, match="no room left"):
        run(recipe)
    assert not scratch.is_symlink()


def test_while_text_is_missing_what_it_does_not_depend_on_may_change(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = replace(recipe, passes=1)  # shards of text
    written = []
    write = Writer.write

    def interrupted(writer: Writer, shard: int, path: Path) -> int:
        if shard == 1:
            raise KeyboardInterrupt
        written.append(shard)
        return write(writer, shard, path)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(several)
        with pytest.raises(DistillError, match="seed was 0"):
            run(replace(several, seed=1))
        with pytest.raises(KeyboardInterrupt):
            run(replace(several, size="2x64", budget="6K"))
    assert written == [0]


def test_a_budget_of_time_goes_on_after_a_break(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, left_s = 0.0, []

    def write_for_a_quarter(*args: object) -> None:
        nonlocal now_s
        until_s = args[3]
        assert isinstance(until_s, float)
        left_s.append(until_s - now_s)
        now_s += 900
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.distill.run.time", SimpleNamespace(time=lambda: now_s))
    monkeypatch.setattr("outrider.distill.run.write_text", write_for_a_quarter)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(replace(recipe, budget="1h"))
        now_s += 10_000
    assert left_s == [1800, 900]


def test_the_unfinished_run_of_an_older_version_is_refused(recipe: Recipe) -> None:
    work = Path(recipe.out).with_name(".draft.distilling")
    work.mkdir()
    (work / "recipe.json").write_text(json.dumps(asdict(recipe)))
    with pytest.raises(DistillError, match="version was 1"):
        run(recipe)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.json", ""),
        ("recipe.json", "[1]"),
        ("spent.json", "{}"),
        ("text.json", "{"),
        ("conversations-00000.safetensors", "{}"),
        ("plan.json", "[]"),
    ],
)
def test_a_damaged_file_of_an_unfinished_run_is_named(
    name: str, content: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Trainer, "train_step", interrupted)
    recipe = replace(recipe, text=str(tmp_path / "text"))
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    file = next(tmp_path.glob(f"**/{name}"))
    file.write_text(content)
    if name == "text.json":  # it is not looked at once there is enough text
        recipe = replace(recipe, out=str(tmp_path / "another"))
    with pytest.raises(DistillError, match=rf"{name} is damaged .* remove {file.parent} to start"):
        run(recipe)


def test_drafts_and_heads_learn_from_one_text(
    recipe_of: Callable[[str], Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    run(replace(recipe_of("draft"), text=str(text), budget="2K"))
    kept = {path.name: path.read_bytes() for path in text.glob("conversations-*")}
    assert kept

    def written_again(*args: object) -> int:
        raise AssertionError("there is enough text")

    monkeypatch.setattr("outrider.distill.text.Writer.write", written_again)
    head = replace(recipe_of("head"), text=str(text), budget="2K")
    run(head)
    assert {path.name: path.read_bytes() for path in text.glob("conversations-*")} == kept
    assert '"text": "text"' in (Path(head.out) / "README.md").read_text()


def test_texts_of_two_recipes_are_not_mixed(recipe: Recipe, tmp_path: Path) -> None:
    text = str(tmp_path / "text")
    run(replace(recipe, text=text))
    other = replace(recipe, text=text, out=str(tmp_path / "other"), seed=3)
    with pytest.raises(DistillError, match=r"another recipe \(seed was 0\)"):
        run(other)
    of_older = Path(text) / "text.json"
    settings = json.loads(of_older.read_text())
    del settings["version"], settings["raw_share"]
    of_older.write_text(json.dumps(settings))
    with pytest.raises(DistillError, match=r"another recipe \(version was 1\)"):
        run(replace(recipe, text=text, out=str(tmp_path / "newer")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(recipe: Recipe) -> None:
    with pytest.raises(DistillError, match="no GPU"):
        run(replace(recipe, device="cuda"))


def test_user_turns_may_come_from_a_file(recipe: Recipe, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    with pytest.raises(DistillError, match=r"no file .*prompts\.jsonl"):
        run(replace(recipe, prompts=str(prompts)))
    assert not list(tmp_path.iterdir())  # else the right command would be another recipe's
    prompts.write_text('{"prompt": "ab"}\n{"messages": [{"role": "user", "content": "cd"}]}\n')
    run(replace(recipe, prompts=str(prompts)))
    assert "prompts.jsonl" in (Path(recipe.out) / "README.md").read_text()


def test_a_file_of_prompts_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "turns.txt").write_text("ab\r\ncd\n", "utf-8-sig")
    (tmp_path / "turns.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n', "utf-8-sig")
    for name in ("turns.txt", "turns.jsonl"):
        assert user_turns(str(tmp_path / name)) == ["ab", "cd"]


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("p.jsonl", b'{"prompt": "ab"', "line 2 of .* cannot be read"),
        ("p.jsonl", b'["ab"]', "line 2 of .* has neither"),
        ("p.jsonl", b"null", "line 2 of .* has neither"),
        (
            "p.jsonl",
            b'{"messages": [{"role": "system", "content": "ab"}]}',
            "line 2 of .* has neither",
        ),
        ("p.jsonl", b'{"messages": ["ab"]}', "line 2 of .* has neither"),
        ("p.txt", "déjà vu".encode("latin-1"), "line 2 of .* cannot be read"),
    ],
)
def test_a_line_that_is_no_user_turn_is_named(
    name: str, line: bytes, words: str, recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b'{"prompt": "ab"}\n' + line + b"\n")
    with pytest.raises(DistillError, match=words):
        run(replace(recipe, prompts=str(tmp_path / name)))


def test_a_line_ends_only_where_the_file_says_so(tmp_path: Path) -> None:
    turns = ["a\u2028b", "c\x85d"]
    records = [json.dumps({"prompt": turn}, ensure_ascii=False) for turn in turns]
    (tmp_path / "p.jsonl").write_text("\r\n".join(records), newline="")
    assert user_turns(str(tmp_path / "p.jsonl")) == turns
