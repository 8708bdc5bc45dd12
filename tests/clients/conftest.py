"""Other people's clients, each in an environment of its own, against the real server."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / "build/clients"  # by `make clients`
# Nothing here may report to anybody.
ENVIRON = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NODE_PATH": str(INSTALLED / "node/node_modules"),
}

Run = Callable[..., str]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what has no client to run: here, so that no server is started for it."""
    for package in (name for marker in item.iter_markers("clients") for name in marker.args):
        if not (INSTALLED / package).exists():
            pytest.skip(f"{package} is not installed: `make clients` does that")


@pytest.fixture(scope="module")  # no longer: other tests count their children
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    # float32: what is scored in one batch is then what is scored in another.
    settings = ["target.dtype=float32", "cache.num_pages=1024", "engine.num_threads=1"]
    settings.append("speculation.adaptive=false")  # drafts to be seen, though they may not pay
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    with running_server(tmp_path_factory.mktemp("server") / "log", arguments) as running:
        yield running


@pytest.fixture(scope="module")
def model(server: RunningServer) -> str:
    (entry,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    return entry["id"]


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> dict[str, Any]:
    """What the clients' requests are answered, read without a client library."""

    def post(path: str, **body: Any) -> Any:
        body |= {"temperature": 0, "max_tokens": 12}
        return httpx.post(f"{server.url}{path}", json=body, timeout=60).json()

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = post("/v1/chat/completions", messages=messages)
    completion = post("/v1/completions", prompt="The capital of France is")
    text, tokens = chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]
    assert "Paris" in text
    return {
        "chat": text,
        "streamed": text,
        "tokens": tokens,
        "streamed_tokens": tokens,
        "completion": completion["choices"][0]["text"],
    }


@pytest.fixture
def run() -> Run:
    """`run(package, program, *arguments)`: what the program of that package's environment says.

    `more` are variables of the environment.
    """

    def call(
        package: str,
        program: str,
        *arguments: str | Path,
        cwd: Path = ROOT,
        timeout_s: float = 280,
        **more: str,
    ) -> str:
        folders = [INSTALLED / package / "bin", INSTALLED / package / "node_modules/.bin"]
        path = ":".join([*map(str, folders), os.environ["PATH"]])
        command = shutil.which(program, path=path)
        assert command is not None
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        finished = subprocess.run(
            [command, *arguments],
            cwd=cwd,
            env=environ | ENVIRON | {"PWD": str(cwd)} | more,  # agents believe PWD
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
        return finished.stdout

    return call


@pytest.fixture
def seen_by(run: Run, server: RunningServer, model: str) -> Callable[[str, str], dict[str, Any]]:
    """`seen_by(package, program)`: what one of programs/ saw of the server."""

    def look(package: str, program: str) -> dict[str, Any]:
        interpreter = "node" if program.endswith(".cjs") else "python"
        path = Path(__file__).parent / "programs" / program
        *_, last = run(package, interpreter, path, server.url, model).splitlines()
        return json.loads(last)

    return look
