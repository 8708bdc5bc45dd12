"""Settings: what they accept, and which source wins."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.engine.logit_edits import bad_words, token_bias
from outrider.server.cli import app
from outrider.server.config.flags import flag_names
from outrider.server.config.server_settings import MAX_BAD_WORDS, MAX_LOGIT_BIASES
from outrider.server.config.settings import Settings
from outrider.server.config.settings_loader import (
    SettingsError,
    is_list,
    load_settings,
    setting_keys,
)

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "pair.toml"
    path.write_text("[server]\nport = 1\nhost = 'file'\nlog_level = 'debug'\nserved_model_name='f'")
    return path


def test_flags_win_over_set_over_environment_over_file_over_defaults(config: Path) -> None:
    settings = load_settings(
        config,
        assignments=["server.port=3", "server.host=set"],
        flags={"server.port": 4, "server.host": None},
        environ={
            "OUTRIDER_SERVER__PORT": "2",
            "OUTRIDER_SERVER__HOST": "env",
            "OUTRIDER_SERVER__LOG_LEVEL": "error",
        },
    ).server
    assert (settings.port, settings.host, settings.log_level) == (4, "set", "error")
    assert settings.served_model_name == ("f",)
    assert settings.max_prompts_times_n == 128


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_rounds_its_head_and_says_so(path: Path) -> None:
    settings, text = load_settings(path, environ={}), path.read_text()
    has_head = " head" in text.split("\n", 1)[0]
    assert ("rounded to FP8 at load" in text) == has_head
    if has_head:
        assert (settings.draft.dtype or settings.target.dtype) == "auto"


@pytest.mark.parametrize(
    ("assignment", "nearest"),
    [
        ("speculation.num_speculativ_tokens=3", "speculation.num_speculative_tokens"),
        ("server.num_threads=2", "engine.num_threads"),
        ("port=2", "server.port"),
        ("cache.pages=9", "cache.num_pages"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(assignment: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"did you mean `{nearest}`"):
        load_settings(assignments=[assignment], environ={})


def test_unknown_keys_are_found_in_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("[speculation]\nproposser = 'ngram'")
    with pytest.raises(SettingsError, match=r"typo\.toml: unknown key .*`speculation\.proposer`"):
        load_settings(path, environ={})
    path.write_text("port = 1")
    with pytest.raises(SettingsError, match=r"unknown key `port`; did you mean `server\.port`"):
        load_settings(path, environ={})
    path.write_text("[speculations]\nproposer = 'ngram'")
    with pytest.raises(SettingsError, match=r"unknown section .*`speculation`"):
        load_settings(path, environ={})
    with pytest.raises(SettingsError, match=r"OUTRIDER_SERVER__PROT.*`server\.port`"):
        load_settings(environ={"OUTRIDER_SERVER__PROT": "1"})


def test_environment_names_without_a_section_are_not_ours() -> None:
    load_settings(environ={"OUTRIDER_PORT": "tcp://10.0.0.1:80", "OUTRIDER_HOME": "/x"})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("speculation.num_speculative_tokens", "33"),
        ("speculation.num_speculative_tokens", "many"),
        ("target.device", "gpu"),
        ("target.dtype", "int4"),
        ("server.port", "65536"),
        ("server.shutdown_timeout_s", "nan"),
        ("cache.memory_fraction", "0"),
        ("cache.state_interval_tokens", "0"),
    ],
)
def test_a_bad_value_is_refused_naming_key_value_and_source(key: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"--set {key}={text}: `{key}` is '{text}'"):
        load_settings(assignments=[f"{key}={text}"], environ={})


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("target.device=gpu", r"auto \| cpu \| cuda \| cuda:N"),
        ("server.root_path=abc", "such as /models/a"),
        ("cache.kv_events_endpoint=5557", r"tcp://\*:5557 listens"),
        ("server.otlp_endpoint=localhost:4318", r"such as http://127\.0\.0\.1:4318/v1/traces"),
    ],
)
def test_a_value_of_a_wrong_form_is_shown_the_right_one_in_words(given: str, shown: str) -> None:
    with pytest.raises(SettingsError, match=shown) as error:
        load_settings(assignments=[given], environ={})
    assert "pattern" not in str(error.value)


def test_api_keys_given_as_text_are_a_list_and_never_shown() -> None:
    for text in ("one, two", '["one", "two"]'):
        keys = load_settings(assignments=[f"server.api_keys={text}"], environ={}).server.api_keys
        assert [key.get_secret_value() for key in keys] == ["one", "two"]
        assert "one" not in repr(keys)
    with pytest.raises(SettingsError) as error:
        load_settings(environ={"OUTRIDER_SERVER__API_KEYS": '["secret'})
    assert "secret" not in str(error.value)


def test_an_empty_variable_leaves_the_list_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[server]\napi_keys = ['secret']")
    empty = {"OUTRIDER_SERVER__API_KEYS": ""}
    assert len(load_settings(path, environ=empty).server.api_keys) == 1
    assert load_settings(path, ["server.api_keys="], environ=empty).server.api_keys == ()


def test_none_resets_an_optional_setting(tmp_path: Path) -> None:
    path = tmp_path / "pages.toml"
    path.write_text("[cache]\nnum_pages = 64")
    assert load_settings(path, environ={}).cache.num_pages == 64
    assert load_settings(path, ["cache.num_pages=none"], environ={}).cache.num_pages is None


def test_a_draft_model_that_is_asked_for_must_be_named() -> None:
    with pytest.raises(SettingsError, match=r"draft\.model is not set; .*'auto', which knows some"):
        load_settings(assignments=["speculation.proposer=draft_model"], environ={})


def test_a_served_model_has_one_name_or_several(tmp_path: Path) -> None:
    assert load_settings(environ={}).served_model_names == ("smollm2-135m-instruct",)
    for model in ("/m/tiny", "./tiny/", "~/tiny", "../m/tiny", "tiny"):
        assert load_settings(assignments=[f"target.model={model}"]).served_model_names == ("tiny",)
    for model in ("mine/a.gguf", "models/mine/a.gguf"):
        served = load_settings(assignments=[f"target.model={model}"]).served_model_names
        assert served == ("a.gguf",)
    names = "server.served_model_name"
    for given in (f"{names}=one,two", f'{names}=["one", "two"]'):
        assert load_settings(assignments=[given], environ={}).served_model_names == ("one", "two")
    path = tmp_path / "names.toml"
    path.write_text("[server]\nserved_model_name = ['one', 'two']")
    assert load_settings(path, environ={}).served_model_names == ("one", "two")
    assert load_settings(flags={names: ["a", "b"]}, environ={}).served_model_names == ("a", "b")


def test_a_draft_is_shared_by_all_ranks_of_its_target_or_by_none() -> None:
    given = ["target.tensor_parallel=4", "draft.tensor_parallel=2"]
    with pytest.raises(SettingsError, match=r"draft\.tensor_parallel is 2, .* set both to one"):
        load_settings(assignments=given, environ={})
    with pytest.raises(SettingsError, match=r"is 2, target\.tensor_parallel unset; .* set both to"):
        load_settings(assignments=given[1:], environ={})
    given[1] = "draft.tensor_parallel=4"
    assert load_settings(assignments=given, environ={}).draft.tensor_parallel == 4


def test_how_many_gpus_share_the_target_may_be_left_open() -> None:
    """As docker/compose.cuda.yaml leaves it."""
    for environ in ({}, {"OUTRIDER_TARGET__TENSOR_PARALLEL": ""}):
        assert load_settings(environ=environ).target.tensor_parallel is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["scheduler.max_num_seqs=600", "scheduler.max_num_batched_tokens=512"],
            r"max_num_seqs is 600.*max_num_batched_tokens \(512\)",
        ),
        (
            ["scheduler.max_num_batched_tokens=4", "scheduler.max_num_seqs=4"],
            r"num_speculative_tokens is 4.* 5 rows .*max_num_batched_tokens is 4",
        ),
        (["cache.num_pages=2", "cache.page_size_tokens=1"], r"hold 1 tokens.* may have 2"),
        (
            ["cache.num_pages=10", "engine.max_model_len=145"],
            r"num_pages is 10.*page_size_tokens \(16\).*hold 144 tokens.* may have 145",
        ),
        (
            ["cache.host_gib=2", "cache.prefix_caching=false"],
            r"cache.host_gib is 2, but .*prefix_caching is false.* set it to 0",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_their_values(
    given: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(assignments=given, environ={})


@pytest.mark.parametrize(
    "given",
    [
        ["scheduler.max_num_seqs=600"],
        ["scheduler.max_num_seqs=512", "scheduler.max_num_batched_tokens=512"],
        [
            "scheduler.max_num_batched_tokens=2",
            "scheduler.max_num_seqs=2",
            "speculation.proposer=none",
        ],
        ["cache.num_pages=10", "engine.max_model_len=144"],
        ["cache.host_gib=2"],
        ["cache.prefix_caching=false"],
    ],
)
def test_settings_that_just_fit_are_taken(given: list[str]) -> None:
    load_settings(assignments=given, environ={})


def test_no_list_may_be_longer_than_the_engine_has_room_for() -> None:
    assert MAX_LOGIT_BIASES + 256 <= token_bias.MAX_ENTRIES  # 256 that end an answer
    assert 2 * MAX_BAD_WORDS <= bad_words.MAX_WORDS  # with and without a space in front


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(environ={}).server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_configs_go_by_name_as_well(path: Path) -> None:
    assert load_settings(Path(path.stem), environ={}) == load_settings(path, environ={})


def test_a_name_that_no_config_has_lists_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"qwen3-80b, and none .* llama-3\.1-8b-eagle3, mimo"):
        load_settings(Path("qwen3-80b"), environ={})


def test_a_config_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (path := tmp_path / "pair.toml").write_text("[server]\r\nport = 1\r\n", "utf-8-sig")
    assert load_settings(path, environ={}).server.port == 1


def test_broken_config_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: No such file"):
        load_settings(tmp_path / "none.toml", environ={})
    path = tmp_path / "broken.toml"
    path.write_text("[server\n")
    with pytest.raises(SettingsError, match=r"broken\.toml is not valid TOML"):
        load_settings(path, environ={})
    path.write_text("server = 3")
    with pytest.raises(SettingsError, match=r"`server` is a section"):
        load_settings(path, environ={})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nport = true", "`server.port` is True: it must be a whole number"),
        ("[cache]\nhost_gib = true", "`cache.host_gib` is True: it must be a number"),
        ("[cache]\nnum_pages = false", "`cache.num_pages` is False: it must be a whole number"),
        ("[target]\nmodel = 5", "`target.model` is 5: it must be text, in quotes"),
        ("[server]\napi_key_file = 3", "`server.api_key_file` is 3: it must be a path, in quotes"),
        ('[server]\nuds = "a\\u0000"', "no path or name has a NUL character in it"),
        ("[server]\nallowed_hosts = 'a'", "`server.allowed_hosts` is 'a': it must be a list"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(says)):
        load_settings(file, environ={})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_all_sources_that_its_target_has_by_itself(path: Path) -> None:
    """`outrider serve CONFIG` drafts from the sources of `outrider serve MODEL`."""
    apart = {
        "ngram": ("prediction", "grammar", "suffix"),  # shows lookup without a draft model
        "plain": ("none",),  # shows what others are compared with
    }
    proposer = load_settings(path, environ={}).speculation.proposer
    assert proposer == apart.get(path.stem, Settings().speculation.proposer)


@pytest.mark.parametrize(
    ("given", "proposer"),
    [
        ("auto", ("auto",)),
        ("ngram", ("prediction", "grammar", "suffix")),
        ("suffix, prediction", ("suffix", "prediction")),
        ('["prediction", "suffix", "head"]', ("prediction", "suffix", "draft_model")),
        ("prediction", ("prediction",)),
    ],
)
def test_sources_of_drafts_are_named_alone_or_in_a_list(
    given: str, proposer: tuple[str, ...]
) -> None:
    chosen = [f"speculation.proposer={given}", "draft.model=a/b"]
    assert load_settings(assignments=chosen, environ={}).speculation.proposer == proposer


@pytest.mark.parametrize("given", ["auto,suffix", "none,suffix", "[]"])
def test_sources_that_exclude_each_other_are_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"is \['medusa'\]: it must be 'auto', 'none', 'pred"):
        load_settings(assignments=["speculation.proposer=medusa"], environ={})
    with pytest.raises(SettingsError, match="auto, none, or some of prediction, grammar, suffix"):
        load_settings(assignments=[f"speculation.proposer={given}"], environ={})


def test_every_setting_has_a_flag_of_its_own() -> None:
    names = flag_names()
    assert names.keys() == setting_keys().keys()
    assert len(set(names.values())) == len(names)
    assert names["engine.max_model_len"] == "--max-model-len"
    assert (names["target.dtype"], names["draft.dtype"]) == ("--dtype", "--draft-dtype")
    assert names["cache.dtype"] == "--cache-dtype"
    assert names["server.shutdown_timeout_s"] == "--shutdown-timeout"
    assert names["server.api_keys"] == "--api-key"


def test_help_shows_every_flag_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    flags = {part.strip(",") for line in lines for part in line.split() if part.startswith("-")}
    assert flags >= set(flag_names().values())
    assert any(line.startswith("  -c, --config FILE|NAME ") for line in lines)


def all_commands() -> list[list[str]]:
    command = typer.main.get_command(app)
    models = [["models", name] for name in command.commands["models"].commands]  # type: ignore[attr-defined]
    return [[], *([name] for name in command.commands), *models]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_help_of_every_command_has_types_that_people_read(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == lines[0].strip()
    assert lines[0].startswith("Usage: ")
    options = [line for line in lines if line.startswith("  -")]
    assert any(line.split()[0] == "--help" for line in options)
    assert [line for line in options if "<" in line or " None" in line] == []


@pytest.mark.parametrize(
    "key", sorted(setting_keys().keys() - {"server.root_path", "cache.kv_events_topic"})
)
def test_an_empty_text_in_a_file_is_no_value(key: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    (tmp_path / "config.toml").write_text(f'[{section}]\n{name} = ""\n')
    with pytest.raises(SettingsError, match=name):
        load_settings(tmp_path / "config.toml", environ={})


def test_help_says_which_flags_are_repeatable() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    several = [key for key in setting_keys() if is_list(key)]
    assert shown.count("Repeatable.") == len(several) > 5
    assert "[default: auto]" in shown
    assert "['" not in shown


def test_flags_set_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("outrider.server.cli.serving.serve", lambda s: served.append(s) or 0)
    flags = ["--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "float32", "--no-ui"]
    flags += ["--allowed-host", "a", "--allowed-host", "b", "--cache-dtype", "auto", "-k", "3"]
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.engine.max_model_len, settings.scheduler.max_num_seqs) == (512, 4)
    assert (settings.target.dtype, settings.server.ui) == ("float32", False)
    assert settings.server.allowed_hosts == ("a", "b")
    assert settings.speculation.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["-k", "99"], "-k 99: at most 32"),
        (["--num-threads", "100000"], "--num-threads 100000: at most 1024"),
        (["--host-gib", "1e300"], "--host-gib 1e300: at most 1048576"),
        (["--port", "-1"], "--port -1: at least 0"),
        (["--max-model-len", "many"], "--max-model-len many: it must be a whole number"),
        (["--dtype", "int4"], "--dtype int4: it must be 'auto', 'float32', 'bfloat16' or"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout nan: it must be a number"),
        (["--proposer", "suffix,grammar"], "--proposer suffix,grammar: it must be 'auto', 'none'"),
        (["--proposer", "suffix,grammar"], "'head'; repeat the flag for several"),
        (["--api-key-file", ""], "--api-key-file : it must not be empty"),
        (["--set", "server=5"], "`server` is a section: name one of its keys"),
        (["./no-such-model"], "'./no-such-model' does not exist"),
        (["a/b", "--model", "c/d"], "MODEL and --model name the same thing"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_line(flags: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code in (1, 2)
    assert reason in result.output
    assert len(result.output.splitlines()) == 1
