"""`outrider evaluate` on a tiny pair: what it measures, and what it says."""

import asyncio
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from engines import engine_config
from in_process import InProcessEngine
from rich.console import Console
from tiny_pairs import save_tiny_model_with_tokenizer
from tokenizers_for_tests import tokenizer_of
from transformers import AutoTokenizer
from typer.testing import CliRunner

from outrider.engine.config import CacheConfig, EngineConfig
from outrider.engine.scoring.verifier import Verifier
from outrider.server.cli import app
from outrider.server.cli.evaluate import _encode
from outrider.server.evaluation.measure import (
    OWN_CHOICE,
    PLAIN,
    RAW,
    SHORT,
    Tally,
    as_messages,
    held_out_prompts,
    measure,
    that_fit,
)
from outrider.server.evaluation.report import ALL, as_json, best_k, by_category, print_tables
from outrider.server.models import known_drafts
from outrider.server.models.known_drafts import KnownDraft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model_with_tokenizer(folder / "target", max_position_embeddings=2048)


def tally(num_tokens: int, num_steps: int, seconds: float) -> Tally:
    drafted, accepted = [10, 10], [8, 4]
    return Tally(num_tokens, num_steps, seconds, list(drafted), list(accepted))


@pytest.mark.anyio
async def test_a_target_that_drafts_for_itself_is_always_right(target: Path) -> None:
    engine = InProcessEngine(engine_config(target, target, k=3, prefix_caching=False))
    await engine.start()
    prompts = {"one": [[1, 2, 3]], "two": [[4, 5], [6]]}
    tallies = await measure(engine, prompts, [0.0], [PLAIN, 3], 12, lambda done, total: None)
    await engine.stop()
    assert tallies["two", 0.0, PLAIN].acceptance is None
    assert tallies["two", 0.0, PLAIN].tokens_per_step == 1
    assert tallies["two", 0.0, PLAIN].num_tokens == tallies["two", 0.0, 3].num_tokens == 24
    assert tallies["two", 0.0, 3].acceptance_by_position == [1, 1, 1]
    assert tallies["two", 0.0, 3].num_steps == 6


def test_speed_is_read_against_plain_decoding_of_the_same_prompts() -> None:
    tallies = {
        ("a", 0.0, PLAIN): tally(100, 100, 10.0),
        ("a", 0.0, 1): tally(100, 60, 5.0),
        ("a", 0.0, 2): tally(100, 50, 8.0),
        ("b", 0.0, PLAIN): tally(100, 100, 10.0),
        ("b", 0.0, 1): tally(100, 60, 15.0),
        ("b", 0.0, 2): tally(100, 50, 20.0),
    }
    results = {(r["category"], r["k"]): r for r in as_json(tallies, {"device": "cpu"})["results"]}
    assert results["a", 1]["speed_up"] == 2.0
    assert results["b", 1]["speed_up"] == round(10 / 15, 3)
    assert results[ALL, 1]["speed_up"] == 1.0
    assert results[ALL, 2]["tokens_per_step"] == 2.0
    assert results["a", 2]["acceptance"] == 0.6
    assert results["a", 2]["acceptance_by_position"] == [0.8, 0.4]
    assert best_k(tallies, "a", 0.0) == 1
    assert best_k(tallies, "b", 0.0) == PLAIN
    assert tallies["a", 0.0, 1].num_tokens == 100  # the sums are new ones


def test_tables_show_every_category_and_k() -> None:
    tallies = {("a", 0.8, k): tally(100, 50, 5.0) for k in (PLAIN, 1, 2, OWN_CHOICE)}
    console = Console(width=200, record=True, file=io.StringIO())
    print_tables(tallies, "pair", console)
    text = console.export_text()
    assert "temperature 0.8" in text
    assert "own k" in text
    assert "k = 2" in text
    assert "0.400" in text


def test_looked_up_drafts_add_no_columns() -> None:
    looked_up = Tally(30, 10, 1.0, [10] * 32, [5] * 32)
    tallies = {("a", 0.0, 0): Tally(30, 30, 1.0), ("a", 0.0, 2): looked_up}
    console = Console(width=200, record=True, file=io.StringIO())
    print_tables(tallies, "pair", console)
    assert console.export_text().count("0.500") == 2 * 3  # accepted, up to 1 and 2; "a" and "all"


def test_prompts_of_every_category_are_shipped() -> None:
    prompts = held_out_prompts()
    long = ["editing", "document", "agent"]
    assert list(prompts) == [*SHORT, RAW, *long]
    assert all(len(prompts[category]) >= 5 for category in (*SHORT, RAW))
    assert all(len(prompts[category]) >= 3 for category in long)
    assert by_category({}) == {}


def test_raw_text_gets_no_chat_template(target: Path) -> None:
    tokenizer = tokenizer_of(AutoTokenizer.from_pretrained(target))
    [text] = held_out_prompts()[RAW][0]
    raw, chat = (_encode(tokenizer, [text], is_raw=is_raw) for is_raw in (True, False))
    assert tokenizer.decode(raw, skip_special_tokens=False) == text
    assert "<assistant>" in tokenizer.decode(chat, skip_special_tokens=False)


def test_answers_to_long_prompts_can_repeat_them() -> None:
    prompts = held_out_prompts()
    for category in ("editing", "document", "agent"):
        for turns in prompts[category]:
            assert 2000 < len("".join(turns)) < 5000  # fits into a context of 2,048 tokens
    for (text,) in prompts["editing"]:
        _, file, _ = text.split("```")
        assert 60 <= len(file.splitlines()) <= 120
    for turns in prompts["agent"]:
        assert len(turns) >= 5
        messages = as_messages(turns)
        assert {m["role"] for m in messages[::2]} == {"user"}  # among them the last
        assert {m["role"] for m in messages[1::2]} == {"assistant"}
        assert [m["content"] for m in messages] == turns


def test_prompts_beyond_the_context_are_left_out() -> None:
    prompts = {"a": [[1] * 4, [1] * 3], "b": [[1] * 5]}
    assert that_fit(prompts, 4) == {"a": [[1] * 3]}
    with pytest.raises(ValueError, match="no prompt fits into a context of 3 tokens"):
        that_fit(prompts, 3)


@pytest.mark.deep
def test_the_command_measures_a_pair_and_writes_json(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    pair = ["--set", f"target.model={target}", "--set", f"draft.model={target}"]
    pair += ["--set", "cache.num_pages=64", "--set", "target.device=cpu"]
    options = ["--max-tokens", "4", "--prompts-per-category", "1", "--temperature", "0"]
    result = CliRunner().invoke(app, ["evaluate", *pair, *options, "-k", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert {r["k"] for r in written["results"]} == {0, 2, None}
    assert {r["category"] for r in written["results"]} >= {"chat", "json", ALL}
    assert written["prompts_left_out"] == 3


@pytest.mark.parametrize("checks_exact", [False, True])
def test_the_cache_of_a_served_config_does_not_keep_it_from_being_measured(
    checks_exact: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cached where each repetition must be computed; a server may have the endpoint."""
    seen: list[CacheConfig] = []

    def started(config: EngineConfig, *_: Any, **options: Any) -> None:
        seen.append(config.cache)
        raise ValueError("seen")

    monkeypatch.setattr("outrider.engine.processes.process_engine.ProcessEngine", started)
    settings = ["cache.host_gib=2", "cache.kv_events_endpoint=tcp://*:5557"]
    others = [part for setting in settings for part in ("--set", setting)]
    given = [each for each in arguments_of(target) if checks_exact or each != "--check-exact"]
    assert "seen" in CliRunner().invoke(app, [*given, *others]).output
    (cache,) = seen
    assert (cache.prefix_caching, cache.host_gib) == ((True, 2) if checks_exact else (False, 0))
    assert cache.kv_events_endpoint is None


def arguments_of(target: Path) -> list[str]:
    pair = ["--set", f"target.model={target}", "--set", f"draft.model={target}"]
    pair += ["--set", "cache.num_pages=256", "--set", "target.device=cpu", "-k", "3"]
    return ["evaluate", *pair, "--check-exact", "--max-tokens", "8", "--prompts-per-category", "1"]


@pytest.mark.usefixtures("in_this_process")
def test_a_k_is_held_against_that_of_the_chosen_draft(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = KnownDraft(
        model=str(target), num_parameters=0, family="tiny", num_speculative_tokens=6
    )
    monkeypatch.setattr(known_drafts, "KNOWN_DRAFTS", [chosen])
    exact = ["--check-exact", "--max-tokens", "2", "--prompts-per-category", "1"]
    pair = [str(target), "--set", "cache.num_pages=256", "--set", "target.device=cpu"]
    result = CliRunner().invoke(app, ["evaluate", *pair, *exact, "-k", "7"])
    assert result.exit_code == 1
    assert "-k 7 is more than speculation.num_speculative_tokens, which is 6" in result.output
    result = CliRunner().invoke(app, ["evaluate", *pair, *exact, "-k", "6"])
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("in_this_process")
def test_only_what_drafted_is_named(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    pair = [str(target), "--set", "draft.model=not-there", "--set", "speculation.proposer=ngram"]
    options = ["--max-tokens", "4", "--prompts-per-category", "1", "--temperature", "0", "-k", "2"]
    options += ["--set", "cache.num_pages=64", "--set", "target.device=cpu", "--json", str(file)]
    result = CliRunner().invoke(app, ["evaluate", *pair, *options])
    assert result.exit_code == 0, result.output
    assert "not-there" not in result.output
    assert json.loads(file.read_text())["draft"] is None


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("place", ["models.pair.prepare_pair", "evaluation.measure.measure"])
def test_sigterm_ends_the_command_as_ctrl_c_does(
    place: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is an engine, and while it measures."""
    ended = []

    def prepare(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("it goes on")

    async def measure(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)
        ended.append("late")

    async def stop(self: InProcessEngine) -> None:
        ended.append("stopped")

    monkeypatch.setattr(InProcessEngine, "stop", stop)
    is_early = place.endswith("prepare_pair")
    monkeypatch.setattr(f"outrider.server.{place}", prepare if is_early else measure)
    pair = [str(target), "--set", "speculation.proposer=ngram", "--set", "target.device=cpu"]
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what a container's first process has
    try:
        run = CliRunner().invoke(app, ["evaluate", *pair, "--set", "cache.num_pages=64"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (run.exit_code, ended) == (130, [] if is_early else ["stopped"])


def test_an_exact_pair_is_called_so(target: Path) -> None:
    result = CliRunner().invoke(app, arguments_of(target))
    assert result.exit_code == 0, result.output
    assert "Exact: 30 answers" in result.output  # 5 prompts, 2 temperatures, k = 3, own k, together
    assert "3 prompts were left out: the context holds 2048 tokens" in result.output


@pytest.mark.usefixtures("in_this_process")
def test_one_kind_of_prompts_can_be_chosen(target: Path) -> None:
    chosen = ["--category", "json", "--category", "chat"]
    result = CliRunner().invoke(app, [*arguments_of(target), *chosen])
    assert result.exit_code == 0, result.output
    assert "Exact: 12 answers" in result.output
    assert "left out" not in result.output


@pytest.mark.usefixtures("in_this_process")
def test_the_first_difference_is_shown(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Verifier.read

    def other(self: Verifier, plan: Any, drawn: Any) -> None:
        read(self, plan, drawn)
        for scheduled in plan.emitting:
            if scheduled.num_drafts:
                scheduled.token_ids[-1] = (scheduled.token_ids[-1] + 1) % 50

    monkeypatch.setattr(Verifier, "read", other)
    result = CliRunner().invoke(app, [*arguments_of(target), "--temperature", "0"])
    assert result.exit_code == 1, result.output
    words = " ".join(result.output.split())
    assert re.search(r"Not exact: [1-9]\d* of 15 answers differ", words)
    assert re.search(r"temperature 0, .*, token \d+ of the answer: plain decoding gives", words)
    assert "promises that there is none: please report it" in words


def test_what_is_exact_by_chance_is_called_so(target: Path) -> None:
    once = ["--temperature", "0", "--set", "engine.batch_invariant=false"]
    result = CliRunner().invoke(app, [*arguments_of(target), *once])
    assert "Nothing promises it here" in " ".join(result.output.split())
    assert result.exit_code == ("Not exact" in result.output)


def test_a_missing_gpu_is_reported_before_a_model_is_fetched() -> None:
    arguments = ["evaluate", "./nowhere", "--set", "target.device=cuda:99"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "'cuda:99' is not there" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "speculation.proposer=none"], "nothing to evaluate"),
        (["--json", "/nowhere/out.json"], "/nowhere/out.json: No such directory"),
        (["--json", "/"], "/: Is a directory; name another file"),
        (["--check-exact", "--json", "out.json"], "measures nothing"),
        (["--category", "poems"], "--category poems: give one of chat, code, summarising"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
