"""Commands that take a model and a draft: what they serve, and what they refuse."""

from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.config.settings import Settings


def served_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    """The settings that `outrider serve` would serve with."""
    import outrider.server.cli.serving as serving

    asked: list[Settings] = []
    monkeypatch.setattr(serving, "serve", lambda settings: asked.append(settings) or 0)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    return asked[0]


def test_serve_takes_a_model_and_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = served_with(monkeypatch, "a/b", "--draft", "c/d", "-k", "3")
    assert (settings.target.model, settings.draft.model) == ("a/b", "c/d")
    assert settings.speculation.proposer == ("auto",)
    assert settings.speculation.num_speculative_tokens == 3
    assert served_with(monkeypatch, "a/b", "--no-draft").speculation.proposer == ("none",)
    assert served_with(monkeypatch) == Settings()


def test_serve_takes_a_config_file_in_place_of_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "pair.toml"
    path.write_text("[target]\nmodel = 'a/b'\n[draft]\nmodel = 'c/d'\n")
    assert served_with(monkeypatch, str(path)) == served_with(monkeypatch, "--config", str(path))
    assert served_with(monkeypatch, "qwen3-8b-0.6b").target.model == "Qwen/Qwen3-8B"
    over = served_with(monkeypatch, "x/y", "--config", str(path))
    assert (over.target.model, over.draft.model) == ("x/y", "c/d")


@pytest.mark.parametrize("config", ["ngram", "plain"])
def test_a_draft_that_is_named_drafts_whatever_the_config(
    monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    settings = served_with(monkeypatch, config, "--draft", "c/d", "-k", "3")
    assert (settings.draft.model, settings.speculation.proposer) == ("c/d", ("auto",))
    assert settings.speculation.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("others", "proposer"),
    [
        (["plain"], "none"),
        (["ngram"], "prediction, grammar, suffix"),
        (["--proposer", "suffix"], "prediction, grammar, suffix"),
    ],
)
def test_a_k_without_a_draft_model_is_refused(
    others: list[str], proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.server.cli.serving.serve", lambda settings: 0)
    result = CliRunner().invoke(app, ["serve", *others, "-k", "3"])
    assert result.exit_code == 2
    says = f"-k 3 is for a draft model alone, and speculation.proposer is {proposer}"
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize(
    "given",
    [
        ["--no-draft", "--suffix-answers-mib", "5"],
        ["--proposer", "prediction", "--suffix-min-tokens", "4"],
        ["--proposer", "prediction", "--set", "speculation.suffix_answers_mib=5"],
        ["--draft", "c/d", "--proposer", "draft_model", "--suffix-answers-mib", "5"],
    ],
)
def test_settings_of_the_source_suffix_without_it_are_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.server.cli.serving.serve", lambda settings: 0)
    result = CliRunner().invoke(app, ["serve", *given])
    assert result.exit_code == 2
    assert "is for the source suffix alone, and" in " ".join(result.output.split())


def test_settings_of_a_config_whose_sources_are_turned_off_are_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[draft]\nmodel = 'c/d'\n[speculation]\nsuffix_answers_mib = 5\n")
    assert served_with(monkeypatch, str(path), "--no-draft").speculation.proposer == ("none",)


@pytest.mark.parametrize("command", ["serve", "run-batch", "evaluate"])
@pytest.mark.parametrize(
    "setting",
    [
        "speculation.num_speculative_tokens=3",
        "draft.attention_window=64",
        "draft.tensor_parallel=2",
        "draft.revision=main",
        "draft.dtype=float32",
        "draft.quantization=fp8",
        "draft.head_layers=[1]",
    ],
)
def test_settings_of_a_draft_without_any_are_refused(command: str, setting: str) -> None:
    given = ["--config", "plain", "--set", setting, "--set", "target.tensor_parallel=2"]
    files = {"run-batch": ["-i", "in", "-o", "out"]}.get(command, [])
    result = CliRunner().invoke(app, [command, *files, *given])
    assert result.exit_code == 2
    key, value = setting.split("=")
    shown = {"[1]": "(1,)"}.get(value, value)
    says = f"{key} = {shown} is for a draft model alone, and speculation.proposer is none"
    assert says in " ".join(result.output.split())


def test_what_a_config_says_of_its_draft_is_no_mistake_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = served_with(monkeypatch, "qwen3-8b-eagle3", "--no-draft")
    assert settings.speculation.proposer == ("none",)
    served_with(monkeypatch, "plain", "--set", "speculation.num_speculative_tokens=0")
    served_with(monkeypatch, "plain", "--set", "draft.tensor_parallel=1")
    served_with(monkeypatch, "--set", "draft.attention_window=64")  # of the one that is chosen


@pytest.mark.parametrize(
    "other",
    [
        *("--draft=a/b", "-k=3", "--proposer=suffix"),
        *("--set=speculation.proposer=suffix", "--set=speculation.proposer = suffix"),
    ],
)
def test_no_draft_and_what_asks_for_drafts_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr("outrider.server.cli.serving.serve", lambda settings: 0)
    result = CliRunner().invoke(app, ["serve", "--no-draft", *other.split("=", 1)])
    assert result.exit_code == 2
    assert "--no-draft excludes --draft, -k and --proposer" in result.output


def test_no_draft_goes_before_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_with(monkeypatch, "ngram", "--no-draft").speculation.proposer == ("none",)


def test_a_draft_drafts_beside_no_source_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for proposer in ("--proposer=", "--set=speculation.proposer="):
        named = ["a/b", "--draft", "c/d"]
        only = served_with(monkeypatch, *named, f"{proposer}draft_model").speculation.proposer
        assert only == ("prediction", "grammar", "draft_model")
        result = CliRunner().invoke(app, ["serve", *named, f"{proposer}suffix"])
        assert result.exit_code == 2
        assert "add draft_model to it, or leave it out" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "prepares"),
    [
        (["evaluate"], "models.pair.prepare_pair"),
        (["run-batch", "--input", "in.jsonl", "--output", "out.jsonl"], "cli.run_batch._run"),
    ],
)
def test_other_commands_obey_a_proposer_beside_a_draft_as_serve_does(
    command: list[str], prepares: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Settings] = []

    def prepared(settings: Settings, *_: object) -> NoReturn:
        asked.append(settings)
        raise ValueError("so far")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").touch()
    monkeypatch.setattr(f"outrider.server.{prepares}", prepared)
    named = [*command, "a/b", "--draft", "c/d", "--set"]
    CliRunner().invoke(app, [*named, "speculation.proposer=draft_model"])
    assert [each.speculation.proposer for each in asked] == [
        ("prediction", "grammar", "draft_model")
    ]
    result = CliRunner().invoke(app, [*named, "speculation.proposer=suffix"])
    assert result.exit_code == 2
    assert "--draft is of no use if speculation.proposer is" in " ".join(result.output.split())
    assert len(asked) == 1


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("outrider 0.")


def test_help_shows_examples_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    for part in ("outrider serve Qwen/Qwen3-8B", "[default: 8000]", "Speculation:"):
        assert part in shown
