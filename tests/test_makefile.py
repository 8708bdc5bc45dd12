"""What make would run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")


def last_command(*arguments: str) -> str:
    # `make test ARGS=...` hands its own variables down.
    ours = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ARGS", "CONFIG"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        ([], ""),
        (["ARGS=Qwen/Qwen3-8B --port 8123"], "Qwen/Qwen3-8B --port 8123"),
        (
            ["CONFIG=configs/ngram.toml", "ARGS=--port 8123"],
            "--config configs/ngram.toml --port 8123",
        ),
    ],
)
def test_make_serve_has_no_pair_of_its_own(arguments: list[str], served: str) -> None:
    command = last_command("serve", *arguments).split("outrider serve")[1]
    assert command.split() == served.split()


def test_make_clean_removes_all_that_was_compiled_here() -> None:
    assert "kernels/cpu/*.so" in last_command("clean").split()


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_either_end_of_the_versions_has_an_environment_of_its_own(versions: str) -> None:
    command = last_command(versions, "ARGS=-k chat").split()
    assert f"build/{versions}/bin/python" in command
    assert command[-2:] == ["-k", "chat"]
