"""What docker/ says of the server: its metrics, its folders, its time to drain."""

import asyncio
import http.server
import json
import os
import re
import socketserver
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import serving

from outrider.server.config.settings import Settings
from outrider.server.config.settings_loader import load_settings
from outrider.server.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/outrider.json").read_text())
PROVISIONING = DOCKER / "grafana/provisioning"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def labels_by_series(pair: tuple[Path, Path], tokenizer: Tokenizer) -> dict[str, set[str]]:
    """Every series of /metrics after one answer of a real engine, with the labels it has."""

    async def scrape() -> str:
        async with serving(pair, tokenizer) as (http, _):
            body = {"prompt": "x", "max_tokens": 4}
            assert (await http.post("/completions", json=body)).status_code == 200
            return (await http.get("http://localhost/metrics")).text

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(asyncio.run(scrape())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", queries())
def test_dashboard_asks_for_what_metrics_has(
    labels_by_series: dict[str, set[str]], query: str
) -> None:
    series = re.findall(r"outrider_\w+", query)
    assert series
    assert set(series) <= labels_by_series.keys()
    for labels in re.findall(r"by \(([^)]*)\)", query):
        for name in series:
            assert set(labels.split(", ")) <= labels_by_series[name]


def test_dashboard_names_the_provisioned_datasource() -> None:
    (datasource,) = load(PROVISIONING / "datasources/prometheus.yaml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {datasource["uid"]}
    host, port = datasource["url"].removeprefix("http://").split(":")
    assert (host, port) == ("prometheus", "9090")
    assert host in load(DOCKER / "compose.monitoring.yaml")["services"]


def test_dashboard_is_where_grafana_looks() -> None:
    grafana = load(DOCKER / "compose.monitoring.yaml")["services"]["grafana"]
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    (provider,) = load(PROVISIONING / "dashboards/outrider.yaml")["providers"]
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DOCKER / mounts[str(home.parent)] / home.name).exists()
    panels = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(panels) == len(set(panels))


def test_prometheus_scrapes_the_server() -> None:
    (job,) = load(DOCKER / "prometheus.yaml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == "outrider:8000"
    assert "outrider" in load(DOCKER / "compose.yaml")["services"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_mounts_what_exists_and_builds_known_targets(path: Path) -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    content = load(path)
    for service in content["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if "/" in source else source in content["volumes"]
        if "build" in service:
            assert f" AS {service['build']['target']}\n" in dockerfile


@pytest.mark.parametrize(
    ("file", "name"), [("compose.yaml", "outrider"), ("compose.scale.yaml", "replica-2")]
)
def test_compose_gives_the_server_time_to_drain(file: str, name: str) -> None:
    service = load(DOCKER / file)["services"][name]
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings().server.shutdown_timeout_s


@pytest.mark.parametrize("gpus", [None, "1", "2", "8"])
def test_compose_reserves_as_many_gpus_as_share_the_target(gpus: str | None) -> None:
    """Without OUTRIDER_GPUS one, and the server chooses by itself."""
    given = {} if gpus is None else {"OUTRIDER_GPUS": gpus}

    def filled(value: object) -> str:
        return re.sub(r"\$\{(\w+):-(.*?)\}", lambda m: given.get(m[1]) or m[2], str(value))

    environ = {}
    for file in ("compose.yaml", "compose.cuda.yaml"):  # the second over the first
        service = load(DOCKER / file)["services"]["outrider"]
        environ |= {name: filled(value) for name, value in service["environment"].items()}
    (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert filled(reserved["count"]) == (gpus or "1")
    settings = load_settings(environ=environ)
    assert settings.target.tensor_parallel == (gpus and int(gpus))


def test_health_is_asked_past_the_proxy_of_a_container() -> None:
    written = (DOCKER / "Dockerfile").read_text()
    command = json.loads(re.search(r"^HEALTHCHECK .*?(\[.*?\])$", written, re.M | re.S)[1])
    with socketserver.TCPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = command[-1].replace("8000", str(server.server_address[1]))
        nowhere = {"http_proxy": "http://127.0.0.1:9"}
        asked = subprocess.run([sys.executable, "-c", program], env=os.environ | nowhere)
        server.shutdown()
    assert asked.returncode == 0


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def test_image_holds_every_folder_of_the_package() -> None:
    folders = {"src", *(link.name for link in (ROOT / "src" / "outrider").iterdir())}
    copied = re.findall(r"^COPY (\w+) \1$", (DOCKER / "Dockerfile").read_text(), re.M)
    assert folders == set(copied)
    kept = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{folder}" for folder in folders} <= set(kept)


LOCKS = {name: (DOCKER / f"{name}.lock").read_text() for name in ("requirements", "build")}


def locked(name: str) -> dict[str, str]:
    """The version of each package in a lock."""
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ]+)", LOCKS[name], re.M))


def normal(requirement: str) -> str:
    """The name of a package as locks write it."""
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def test_images_install_nothing_without_its_hash() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    commands = re.findall(r"pip (?:install|wheel) [^\n]*", dockerfile)
    assert len(commands) >= 5
    for command in commands:
        assert "--require-hashes" in command or "--no-index" in command, command
        assert "--no-deps" in command, command
    for lock in LOCKS.values():
        packages = re.split(r"\n(?=[a-z])", lock.split("make lock\n")[1])
        assert all("--hash=sha256:" in package for package in packages)


def test_locks_hold_what_the_project_asks_for_in_the_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["tracing"]
    assert {normal(requirement) for requirement in asked} <= locked("requirements").keys()
    assert locked("build").keys() == {"setuptools"}
    constraints = (ROOT / "constraints.txt").read_text()
    tested = {normal(n): v for n, v in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", constraints, re.M)}
    for name, version in (locked("requirements") | locked("build")).items():
        if not name.startswith(("nvidia-", "cuda-")):  # of torch's build for CUDA alone
            assert tested[name] == version


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_variables_of_compose_files_are_those_of_the_page(path: Path) -> None:
    rows = [
        row for row in (DOCKER / "README.md").read_text().splitlines() if f"`{path.name}`" in row
    ]
    described = {name for row in rows for name in re.findall(r"^\| (.+?) \|", row)}
    names = {name.strip("` ") for cell in described for name in cell.split(",")}
    assert names == set(re.findall(r"\$\{([A-Z_]+)", path.read_text()))
