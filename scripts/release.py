"""Make the files of a release, and try them as a user would.

    python scripts/release.py

Builds a source archive and, out of that, a wheel, into dist/; installs the wheel into an empty
environment; serves the default pair there and asks it something. Then prints what is left for a
person. The version is the one in pyproject.toml.
"""

import datetime
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S, ANSWER_S = 900, 120  # the first start fetches and converts models
LEFT = """
{version} is built, installed and answers. What is left for a person:

  1. Set the date of {version} in CHANGELOG.md, and commit.       {dated}
  2. git tag --sign v{version} && git push origin v{version}
  3. python -m twine upload {archive}
     An index takes no wheel of one system alone: attach {wheel} to the release instead.
  4. for image in cpu cuda; do docker build --file docker/Dockerfile --target $image \\
       --build-arg VERSION={version} --tag outrider:{version}-$image .; done
     Try each with `docker run`, then push both.
  5. helm package deploy/helm, and push it.
  6. On a machine with a GPU: make gpu, then `pip install` of the wheel and `outrider doctor`.
"""


def project_version(root: Path = ROOT) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def chart_of(version: str, chart: str) -> str:
    """Chart.yaml with this version in both of its places."""
    chart = re.sub(r"^version: .*$", f"version: {version}", chart, flags=re.MULTILINE)
    return re.sub(r"^appVersion: .*$", f'appVersion: "{version}"', chart, flags=re.MULTILINE)


def notes_of(version: str, changelog: str) -> str:
    """What the changelog says of a version. Raises ValueError if it has no section of it."""
    found = re.search(
        rf"^## \[{re.escape(version)}\](?: - \S+)?\n(.*?)(?=^## \[|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section [{version}]: say there what a user gets")
    return found[1].strip()


def build(folder: Path) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built out of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def made(kind: str, where: Path) -> Path:
        program = (
            f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
        )
        command = [sys.executable, "-P", "-c", program]
        print(f"Building the {kind}", flush=True)
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
        check(done.returncode == 0, f"the {kind} is not built:\n{done.stderr[-4000:]}")
        return folder / done.stdout.splitlines()[-1]

    archive = made("sdist", ROOT)
    with tarfile.open(archive) as files:
        files.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = made("wheel", source)
    shutil.rmtree(folder / "unpacked")
    return archive, wheel


def install(wheel: Path, environment: Path) -> Path:
    """The folder of commands of an environment with this wheel and what it needs."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet"]
    pip += os.environ.get("PIP_ARGS", "").split()
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, str(wheel)], check=True)
    return environment / "bin"


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def try_out(commands: Path, version: str, cwd: Path) -> None:
    """Serve the default pair and ask it something. Raises SystemExit if that fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    outrider = str(commands / "outrider")
    shown = subprocess.check_output([outrider, "--version"], env=environment, cwd=cwd, text=True)
    check(shown.split()[-1] == version, f"--version shows {shown.strip()}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([outrider, "serve", "--port", str(port)], env=environment, cwd=cwd)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: ready(url), server)
        check(ask(f"{url}/version") == {"version": version}, "/version is another")
        (model,) = ask(f"{url}/v1/models")["data"]
        body = {"model": model["id"], "prompt": "The three primary colours are", "max_tokens": 16}
        answer = ask(f"{url}/v1/completions", body | {"temperature": 0})
        print(f"Asked {model['id']}: {answer['choices'][0]['text']!r}")
        check(answer["usage"]["completion_tokens"] == 16, "the answer is short")
    finally:
        server.terminate()
        server.wait(60)


def ready(url: str) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return bool(ask(f"{url}/health")["status"] == "ok")
    return False


def wait_until(true: Callable[[], bool], server: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + START_S
    while not true():
        check(server.poll() is None, f"the server ended with {server.returncode}")
        check(time.monotonic() < end_s, f"the server was not ready in {START_S} s")
        time.sleep(1)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"This is no release yet: {otherwise}")


def main() -> None:
    folder = ROOT / "dist"
    version = project_version()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    chart = ROOT / "deploy/helm/Chart.yaml"
    try:
        notes_of(version, changelog)
    except ValueError as error:
        raise SystemExit(f"This is no release yet: {error}") from None
    chart.write_text(chart_of(version, chart.read_text()))
    archive, wheel = build(folder)
    print(f"Installing {wheel.name} into an empty environment", flush=True)
    commands = install(wheel, ROOT / "build/release")
    try_out(commands, version, folder)
    today = f"## [{version}] - {datetime.date.today()}"
    print(
        LEFT.format(
            version=version,
            archive=archive,
            wheel=wheel,
            dated="(done)" if today in changelog else f"({today})",
        )
    )


if __name__ == "__main__":
    main()
