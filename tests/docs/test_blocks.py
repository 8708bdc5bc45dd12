"""Every command that README and docs/ show is run as it stands, against what `make serve` starts.
Commands that measure are made shorter, and what `make serve` runs is not run once more.

What cannot run everywhere has a comment in front of its block that no reader of the page sees:
`<!-- not run: why -->`, or `<!-- not run (this, that): why -->` for the commands that contain
`this` or `that`. It is skipped, and its reason reported.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from running_server import RunningServer

# To see what hangs.
TIMEOUT_S = 600.0
pytestmark = [pytest.mark.docs, pytest.mark.model, pytest.mark.timeout(TIMEOUT_S + 300)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docker/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:curl|docker|helm|make|outrider|pip|serve|smg|hf) "
NOT_RUN = re.compile(r"<!-- not run(?: \((?P<only>.*?)\))?: (?P<why>.*?) -->")
START = "make serve"  # what the pages begin with
STARTED = (START, "outrider serve")  # which it runs
# One answer of each kind is enough to see that it works; what it measures is tested elsewhere. And
# a small model that is sampled may talk until its context is full.
FEWER = {
    ".venv/bin/outrider chat": "--max-tokens 32",
    ".venv/bin/outrider bench": "-c 1 --requests 1 --rounds 1 --max-tokens 4",
}
A_FREE_PORT = {"OUTRIDER_SERVER__PORT": "0"}


@dataclass(frozen=True)
class Command:
    place: str
    text: str
    language: str
    why_not: str | None  # it cannot run here

    @property
    def serves(self) -> bool:
        return bool(re.search(r"(^|\s)(outrider|make) serve(?!.*--help)", self.text))


def blocks(page: Path) -> Iterator[tuple[int, str, str, re.Match[str] | None]]:
    """The number of its first line, its language, itself, and the mark in front of it."""
    lines = [*page.read_text().splitlines(), ""]
    mark, number = None, 0
    while number < len(lines):
        line, start = lines[number], number
        if found := NOT_RUN.match(line):
            mark = found
        elif line.startswith("```"):
            number += 1
            while lines[number] != "```":
                number += 1
            yield start + 2, line[3:], "\n".join(lines[start + 1 : number]), mark
            mark = None
        elif re.match(f"    {PROGRAMS}", f"{line} "):
            while lines[number].startswith("    "):
                number += 1
            yield start + 1, "shell", "\n".join(each[4:] for each in lines[start:number]), mark
            mark = None
        elif line:
            mark = None
        number += 1


def commands() -> Iterator[Command]:
    for page in PAGES:
        for number, language, block, mark in blocks(page):
            place = f"{page.relative_to(ROOT)}:{number}"
            if language == "python":
                yield Command(place, block, language, mark["why"] if mark else None)
            if language != "shell":
                continue
            for i, text in enumerate(re.split(r"(?<!\\)\n+", block)):
                only = mark["only"].split(", ") if mark and mark["only"] else [""]
                marked = mark is not None and any(part in text for part in only)
                why = mark["why"] if mark and marked else None
                yield Command(f"{place}.{i + 1}", text, language, why)


ALL = list(commands())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.fail("the pages use port 8000, and another program listens there: end it first")
    with started(START, tmp_path_factory.mktemp("server") / "log", environment()) as running:
        yield running


@contextmanager
def started(text: str, log: Path, environ: dict[str, str]) -> Iterator[RunningServer]:
    """What a command serves; ended as a person does, by Ctrl-C."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {text}"],
            cwd=ROOT,
            env=environ,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield RunningServer(process, log)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        exit_code = process.wait(60)
    # make says how it ended, too, and that it was interrupted.
    assert exit_code == 0 or text.startswith("make")


def environment() -> dict[str, str]:
    folder = Path(sys.executable).parent
    # Nothing of a user's own, and of the make that runs these tests neither: its ARGS are theirs.
    foreign = ("OUTRIDER_", "MAKE", "ARGS")
    given = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    home = {"OUTRIDER_HOME": os.environ["OUTRIDER_HOME"]} if "OUTRIDER_HOME" in os.environ else {}
    path = f"{folder}:{os.environ['PATH']}"
    return given | home | {"PATH": path, "PYTHONSAFEPATH": "1", "COLUMNS": "100"}


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_it_runs(command: Command, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if command.why_not is not None:
        pytest.skip(f"{command.why_not}: {command.text.splitlines()[0]}")
    text = re.split("  +# ", command.text)[0]
    if command.serves and text not in STARTED:
        with started(text, tmp_path / "log", environment() | A_FREE_PORT):
            return
    request.getfixturevalue("server")
    if command.serves:
        return
    run = [sys.executable, "-c"] if command.language == "python" else ["bash", "-euc"]
    done = subprocess.run(
        [*run, f"{text} {FEWER[text]}" if text in FEWER else command.text],
        cwd=ROOT,
        env=environment(),
        input="Hi!\n",  # as a person in a conversation
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert done.stdout.strip(), "it says nothing"
    if command.text.startswith("curl"):
        assert '"error"' not in done.stdout, said


def test_most_commands_run_and_each_other_one_says_why() -> None:
    skipped = [command for command in ALL if command.why_not is not None]
    assert all(command.why_not for command in skipped)
    assert len(ALL) - len(skipped) >= 15
    assert any(command.text == START for command in ALL)
