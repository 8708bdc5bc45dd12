"""The real server as a child process, for benchmarks of what surrounds the engine."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import psutil

START_S = 240.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers."""

    host: str
    port: int
    http: psutil.Process  # the one that was started, and that owns the engine
    workers: list[psutil.Process]  # those that answer HTTP in its stead, if there are several
    engine: psutil.Process
    log: Path

    @property
    def front(self) -> list[psutil.Process]:
        """All processes but the engine's."""
        return [self.http, *self.workers]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://{self.host}:{self.port}{path}", timeout=30)

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        url = f"http://{self.host}:{self.port}{path}"
        return httpx.post(url, json=body, timeout=300).raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.M)
        return sum(map(float, found))


@contextmanager
def serving(
    log: Path,
    arguments: Sequence[str],
    *,
    tokens_a_step: float | Literal["seed"] | None = None,
    at_k: int | None = None,
) -> Iterator[Serving]:
    """`outrider serve` with these arguments, on a port of its own, until the block is left.

    With `tokens_a_step` its acceptance is set, as set_acceptance.py does it; "seed": by the seeds
    of requests.
    """
    command = [sys.executable, "-P", "-m", "outrider.server", "serve", "--port", "0", *arguments]
    env = dict(os.environ)
    if tokens_a_step is not None:
        paths = [Path(__file__).parent / "in_every_process", env.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        env["SET_ACCEPTANCE"] = f"{tokens_a_step} {'' if at_k is None else at_k}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        port = _wait_for_port(process, log)
        http = psutil.Process(process.pid)
        children = {child: child.cmdline() for child in http.children()}
        (engine,) = (
            c for c, line in children.items() if "outrider.engine.processes.process" in line
        )
        workers = [c for c, line in children.items() if "outrider.server.http.worker" in line]
        yield Serving("127.0.0.1", port, http, workers, engine, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := re.search(r"serving: .* at http://127\.0\.0\.1:(\d+)/v1", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()}")
