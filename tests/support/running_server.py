"""The real server as a child process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

START_S = 240.0  # the default pair may have to be fetched first


class RunningServer:
    """`outrider serve`, ready. `http` asks it with the key that it was given, if any."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, api_key: str | None = None
    ) -> None:
        self.process = process
        self.log = log
        self.url = self._wait_until_ready()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def _wait_until_ready(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if found := re.search(r"serving: .* at (http://\S+)/v1", self.log.read_text()):
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"the server did not come up:\n{self.log.read_text()}")

    @property
    def engine(self) -> psutil.Process:
        (child,) = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "outrider.engine.processes.process" in child.cmdline()
        ]
        return child

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = self.http.get("/metrics").text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])

    def wait_for(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait for a `name value` of the metrics."""
        name, value = condition.split()
        deadline_s = time.monotonic() + timeout_s
        while self.metric(name) != float(value):
            assert time.monotonic() < deadline_s, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send the signal and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout_s)


@contextmanager
def running_server(
    log: Path, arguments: Sequence[str], api_key: str | None = None
) -> Iterator[RunningServer]:
    command = [sys.executable, "-P", "-m", "outrider.server", "serve", "--port", "0", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        running = RunningServer(process, log, api_key)
        with running.http:
            yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def events_of(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event, as it comes."""
    for line in response.iter_lines():
        if line:
            yield line.removeprefix("data: ")


def text_of(events: Sequence[str]) -> str:
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
