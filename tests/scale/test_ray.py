"""Two replicas under Ray Serve on this machine: traffic, a killed one, up and down."""

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.scale("ray")

PROGRAM = Path(__file__).parent / "programs/ray_replicas.py"
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "OUTRIDER_CACHE__NUM_PAGES": "256",
    "OUTRIDER_ENGINE__NUM_THREADS": "1",
    "OUTRIDER_SCHEDULER__MAX_NUM_SEQS": "4",
    "RAY_AUTH_MODE": "disabled",  # it would leave a token in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="module")
def seen(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What clients of the two replicas saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("ray")
    log = folder / "log"
    command = ["nice", installed / "ray/bin/python", "-P", PROGRAM, str(port)]
    # Ray's sockets have no room for a long path.
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        environ = os.environ | ENVIRON | {"RAY_TMPDIR": short}
        subprocess.run(command, stdout=output, stderr=output, env=environ, timeout=800, cwd=folder)
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert lines, log.read_text()[-4000:]
    answer: dict[str, Any] = json.loads(lines[-1])
    print(answer)
    return answer


def test_requests_and_streams_are_answered(seen: dict[str, Any]) -> None:
    assert seen["model"] == "smollm2-135m-instruct"
    assert seen["stream_ended"] == "data: [DONE]"
    assert seen["stream_chunks"] > 5
    assert seen["texts"] == 1  # the same from each replica


def test_a_session_stays_where_its_prefix_is_cached(seen: dict[str, Any]) -> None:
    assert seen["sessions_that_hit"] == 6


def test_a_killed_replica_costs_the_requests_that_it_had(seen: dict[str, Any]) -> None:
    outcomes = dict(seen["killed"])
    assert outcomes.pop("200") > 20
    assert sum(outcomes.values()) <= 4  # there were four clients, two replicas
    assert outcomes.keys() <= {"500"}


@pytest.mark.parametrize("change", ["redeployed", "scaled_up", "scaled_down"])
def test_no_client_notices_replicas_that_come_and_go(seen: dict[str, Any], change: str) -> None:
    assert seen[change].keys() == {"200"}


def test_no_engine_outlives_its_replica(seen: dict[str, Any]) -> None:
    assert seen["engines_left"] == 0


def test_serve_build_writes_what_an_operator_edits(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    command = [installed / "ray/bin/serve", "build", "outrider.server.ray:app"]
    command += ["--output-path", file]
    subprocess.run(command, env=os.environ | ENVIRON, cwd=tmp_path, check=True)
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == "outrider.server.ray:app"
    (deployment,) = application["deployments"]
    assert deployment["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert deployment["autoscaling_config"]["target_ongoing_requests"] == 24
    assert "ConsistentHashRouter" in str(deployment["request_router_config"])
