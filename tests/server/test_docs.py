"""What README and docs/ say: links lead somewhere, commands parse, settings and fields exist."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from asgi import get
from served import Served
from typer.main import get_command

from outrider.server.api.chat_protocol import ChatCompletionRequest
from outrider.server.api.messages_protocol import MessagesRequest
from outrider.server.api.protocol import CompletionRequest, Speculation
from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.cli import app
from outrider.server.config.settings_loader import load_settings, setting_keys

Serve = Callable[..., Served]
ROOT = Path(__file__).parents[2]
USER_PAGES = [ROOT / "README.md", ROOT / "docker/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*USER_PAGES, *sorted(ROOT.glob("[CS]*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
SECTIONS = "|".join({key.split(".")[0] for key in setting_keys()})
REQUEST_FIELDS = {f"speculation.{name}" for name in Speculation.model_fields}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
every_user_page = pytest.mark.parametrize(
    "page", USER_PAGES, ids=lambda p: str(p.relative_to(ROOT))
)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of `outrider`, as a page shows them: alone, through make and in a container."""
    text = page.read_text().replace("\\\n", " ")
    shown = re.findall(r"^(?:    )?(?:\.venv/bin/)?outrider (.+)$", text, re.MULTILINE)
    shown += re.findall(r"`outrider ([a-z][^`]* -[^`]*)`", text)
    shown += [f"serve {arguments}" for arguments in re.findall(r'make serve.* ARGS="(.+?)"', text)]
    shown += re.findall(r"outrider:(?:cpu|cuda) (serve .+)", text)
    for line in shown:
        yield shlex.split(line.partition(" &")[0], comments=True)


def parse(arguments: list[str]) -> dict[str, object]:
    """What a command line says, by parameter; raises if the command does not take it."""
    command: Any = get_command(app)
    while hasattr(command, "commands") and arguments[:1] != ["--help"]:
        name, *arguments = arguments
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    return dict(command.make_context("outrider", arguments).params)


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@every_user_page
def test_every_command_parses(page: Path) -> None:
    for arguments in commands(page):
        try:
            params = parse(arguments)
        except typer.Exit:  # of --help
            continue
        load_settings(assignments=params.get("assignments") or (), environ={})
        config = params.get("config")
        if isinstance(config, Path) and config.name != "pair.toml":  # the reader's own
            load_settings(ROOT / config if config.suffix else config, environ={})


def test_commands_are_found_and_wrong_ones_noticed() -> None:
    assert sum(len(list(commands(page))) for page in USER_PAGES) > 20
    with pytest.raises(Exception, match="No such option"):
        parse(["serve", "--prot", "1"])
    with pytest.raises(AssertionError, match="sevre"):
        parse(["sevre"])


@every_page
def test_every_command_that_is_named_exists(page: Path) -> None:
    names = set(re.findall(r"`outrider ([a-z-]+)", page.read_text()))
    assert names <= set(getattr(get_command(app), "commands", ()))


@every_user_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)", text))
    variables = re.findall(r"OUTRIDER_([A-Z]+__[A-Z_]+)", text)
    named |= {name.lower().replace("__", ".") for name in variables}
    assert named - REQUEST_FIELDS <= setting_keys().keys()


@every_page
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {name for line in targets for name in line.split()}
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


@every_user_page
def test_every_example_in_toml_loads(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(code_blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert tomllib.loads(block)
        load_settings(file, environ={})


@every_user_page
def test_every_example_in_python_compiles(page: Path) -> None:
    for block in code_blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize(
    "request_type", [CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest]
)
def test_every_parameter_is_described(request_type: type[CompletionRequest]) -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert [name for name in request_type.model_fields if f"`{name}`" not in text] == []


def test_every_route_is_described(serve: Serve) -> None:
    routes = get(serve().app, "/openapi.json").json()["paths"]
    text = (ROOT / "docs/api.md").read_text()
    assert len(routes) > 10
    assert [route for route in routes if "{" not in route and f"{route}`" not in text] == []


def test_every_metric_is_described_and_no_other(serve: Serve) -> None:
    exported = re.findall(
        r"^# TYPE (outrider_\w+)", get(serve().app, "/metrics").body.decode(), re.MULTILINE
    )
    described = re.findall(r"`(outrider_\w+)`", (ROOT / "docs/operating.md").read_text())
    assert set(described) == {name for name in exported if not name.endswith("_created")}


def test_the_page_of_settings_is_up_to_date() -> None:
    path = ROOT / "scripts/settings_page.py"
    spec = importlib.util.spec_from_file_location("settings_page", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.settings_page(), "run `make docs`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_figures_of_readme_are_those_of_the_page_on_performance() -> None:
    rows = re.findall(r"^\|(.+)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    cells = {cell.strip(" *") for row in rows for cell in row.split("|")}
    figures = {cell for cell in cells if re.fullmatch(r"[\d,.–]+", cell)}
    measured = (ROOT / "docs/performance.md").read_text()
    assert len(figures) > 20
    assert [figure for figure in figures if not re.search(rf"\b{figure}\b", measured)] == []
