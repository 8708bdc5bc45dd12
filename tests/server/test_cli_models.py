"""`outrider config` and `outrider models`."""

import os
import signal
import tomllib
from pathlib import Path

import pytest
from tiny_pairs import save_tiny_model_with_tokenizer, write_tiny_gguf
from typer.testing import CliRunner, Result

from outrider.server.cli import app
from outrider.server.config.pair_settings import DEFAULT_DRAFT
from outrider.server.config.settings import Settings
from outrider.server.config.settings_loader import load_settings, setting_keys


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outrider(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_config_prints_what_loads_to_the_same_settings(home: Path) -> None:
    path = home / "pair.toml"
    path.write_text('[server]\nserved_model_name = "na\\"me é"\n[cache]\nnum_pages = 12')
    printed = outrider("config", "--config", str(path), "--set", "server.port=81")
    again = home / "again.toml"
    again.write_text(printed.stdout)
    assert printed.exit_code == 0
    assert load_settings(again, environ={}) == load_settings(path, ["server.port=81"], environ={})


@pytest.mark.parametrize("name", ["api_keys", "priority_api_keys"])
def test_config_shows_no_api_keys_and_nothing_that_loads_as_one(home: Path, name: str) -> None:
    printed = outrider("config", "--set", f"server.{name}=secret").stdout
    assert "secret" not in printed
    assert f"\n# {name} is set, and not shown\n" in printed
    (home / "again.toml").write_text(printed)
    assert load_settings(home / "again.toml", environ={}) == Settings()
    assert load_settings(home / "again.toml", environ={}).speculation.num_speculative_tokens is None


def test_the_example_describes_every_setting_at_its_default(home: Path) -> None:
    printed = outrider("config", "--example").stdout
    path = home / "example.toml"
    path.write_text(printed)
    assert load_settings(path, environ={}) == Settings()
    assert max(map(len, printed.splitlines())) <= 100
    words = " ".join(printed.replace("\n# ", " ").split())
    for key, field in setting_keys().items():
        name = key.split(".")[1]
        assert f"\n{name} = " in printed or f"\n# {name} is unset" in printed
        assert field.description, key
        assert field.description in words


def test_drafts_that_are_known_are_listed_with_their_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = outrider("models", "drafts").stdout.splitlines()
    assert any("Qwen3 8B" in line and "EAGLE-3 head" in line for line in lines)
    assert any(f"{DEFAULT_DRAFT} " in line and "draft model" in line for line in lines)


def test_wrong_settings_exit_with_2_and_one_line() -> None:
    result = outrider("config", "--set", "server.prot=1")
    assert result.exit_code == 2
    assert result.stderr == (
        "outrider: --set server.prot=1: unknown key `server.prot`; did you mean `server.port`?\n"
    )


def test_a_misspelt_config_in_the_place_of_a_model_gets_the_nearest_name() -> None:
    result = outrider("serve", "qwen3-8b-eagel3")
    assert result.exit_code == 2
    assert "did you mean the config 'qwen3-8b-eagle3'" in result.stderr


def test_models_are_listed_fetched_found_and_removed(home: Path) -> None:
    assert "not fetched" in outrider("models", "list").stdout
    write_tiny_gguf(home / "tiny.gguf")
    assert outrider("models", "path", "tiny.gguf").exit_code == 1
    fetched = Path(outrider("models", "fetch", "tiny.gguf").stdout.strip())
    assert (fetched / "model.safetensors").exists()
    assert outrider("models", "path", "tiny.gguf").stdout.strip() == str(fetched)
    assert fetched.name in outrider("models", "list").stdout
    assert outrider("models", "remove", fetched.name).exit_code == 0
    assert not fetched.exists()
    again = outrider("models", "remove", fetched.name)
    assert again.exit_code == 1
    assert "no model" in again.stderr


def test_a_damaged_manifest_in_the_store_is_named(home: Path) -> None:
    manifest = home / "home/models/mine/outrider.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("")
    result = outrider("models", "list")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"outrider: {manifest} is damaged: ")


def test_fetch_takes_the_pair_of_a_config(home: Path) -> None:
    for name in ("target", "draft"):
        save_tiny_model_with_tokenizer(home / name, num_hidden_layers=1)
    (home / "pair.toml").write_text('[target]\nmodel = "./target"\n[draft]\nmodel = "./draft"\n')
    result = outrider("models", "fetch", "--config", "pair.toml")
    assert result.stdout.split() == [str(home / "target"), str(home / "draft")]


@pytest.mark.parametrize(
    "command", [["models", "fetch", "x/y"], ["distill", "--target", "x/y", "--out", "draft"]]
)
def test_sigterm_ends_fetching_as_ctrl_c_does(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("it goes on")

    monkeypatch.setattr("outrider.server.models.resolve.resolve", resolve)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what a container's first process has
    try:
        assert outrider(*command).exit_code == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_config_files_name_the_defaults_they_are_about() -> None:
    default = Path(__file__).parents[2] / "configs/default.toml"
    stated = tomllib.loads(default.read_text())
    assert stated["target"]["model"] == Settings().target.model
    assert stated["draft"]["model"] == DEFAULT_DRAFT
