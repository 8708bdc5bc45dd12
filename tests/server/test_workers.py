"""Several HTTP processes around one engine: real processes and sockets, tiny random models."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running_server import RunningServer, events_of, free_port, running_server
from tiny_models import save_tiny_model
from tokenizers_for_tests import byte_level_wrapper

from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.processes.process_engine import ProcessEngine
from outrider.server.config.settings import Settings
from outrider.server.http.listeners import bind
from outrider.server.http.workers import WorkerError, Workers
from outrider.server.models.prepare import Prepared
from outrider.server.text.tokenizer import TokenizerData

pytestmark = pytest.mark.slow

SHORT = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
LONG = SHORT | {"max_tokens": 4000, "stream": True}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tokenizer = byte_level_wrapper()
    target = tmp_path_factory.mktemp("target")
    save_tiny_model(target, vocab_size=len(tokenizer), max_position_embeddings=5000)
    tokenizer.save_pretrained(target)
    settings = ["speculation.proposer=ngram", "cache.num_pages=512", "server.api_workers=2"]
    settings += [f"target.model={target}", "server.shutdown_timeout_s=0.5"]
    settings.append(f"server.metrics_port={metrics_port}")
    arguments = [part for setting in settings for part in ("--set", setting)]
    with running_server(tmp_path_factory.mktemp("server") / "log", arguments) as running:
        yield running


def workers(server: RunningServer) -> set[int]:
    children = psutil.Process(server.process.pid).children()
    return {child.pid for child in children if "outrider.server.http.worker" in child.cmdline()}


def worker_behind(server: RunningServer, response: httpx.Response) -> int:
    """The process that gave this answer."""
    address = response.extensions["network_stream"].get_extra_info("client_addr")
    for pid in workers(server):
        if any(c.raddr == address for c in psutil.Process(pid).net_connections("inet")):
            return pid
    raise AssertionError(f"nobody has a connection to {address}")


@pytest.fixture
def clients(server: RunningServer) -> Iterator[list[httpx.Client]]:
    """A connection to each worker."""
    until(lambda: len(workers(server)) == 2)
    found: dict[int, httpx.Client] = {}
    made: list[httpx.Client] = []
    while len(found) < 2:
        made.append(httpx.Client(base_url=server.url, timeout=60))
        found.setdefault(worker_behind(server, made[-1].get("/version")), made[-1])
    yield list(found.values())
    for client in made:
        client.close()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def counted(text: str) -> dict[str, float]:
    lines = re.findall(r"^(outrider_\S+) (\S+)$", text, re.M)
    return {name: float(value) for name, value in lines if "_created" not in name}


def settled(*gets: Callable[[], httpx.Response]) -> dict[str, float]:
    """The metrics, once each `get` gives the same: processes hear of a step at different times."""
    deadline_s = time.monotonic() + 60.0
    while True:
        one, other = (counted(get().text) for get in gets)
        if one == other:
            return one
        assert time.monotonic() < deadline_s, one.items() ^ other.items()
        time.sleep(0.02)


def test_processes_that_answer_http_have_no_torch(server: RunningServer) -> None:
    until(lambda: len(workers(server)) == 2)
    for pid in (server.process.pid, *workers(server)):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_an_engine_on_a_cpu_has_no_triton(server: RunningServer) -> None:
    assert "libtorch" in (maps := Path(f"/proc/{server.engine.pid}/maps").read_text())
    assert "libtriton" not in maps


def test_each_answers_alike_and_reports_all(
    server: RunningServer, clients: list[httpx.Client]
) -> None:
    answers = [client.post("/v1/completions", json=SHORT).json() for client in clients]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    one = settled(*(lambda c=client: c.get("/metrics") for client in clients))
    assert one['outrider_requests_total{outcome="ok",path="/v1/completions"}'] == 2
    assert one["outrider_time_to_first_token_seconds_count"] == 2
    assert one["outrider_generation_tokens_total"] == 10


def test_the_metrics_port_reports_all_and_nothing_else(
    server: RunningServer, metrics_port: int, clients: list[httpx.Client]
) -> None:
    for client in clients:
        client.post("/v1/completions", json=SHORT)
    url = f"http://127.0.0.1:{metrics_port}"
    settled(lambda: httpx.get(f"{url}/metrics"), lambda: clients[0].get("/metrics"))
    assert httpx.get(f"{url}/v1/models").status_code == 404


def test_the_page_finds_the_same_behind_each(clients: list[httpx.Client]) -> None:
    shown = []
    for client in clients:
        client.post("/v1/completions", json=SHORT)
        assert client.get("/ui/").status_code == 200
        with client.stream("GET", "/stats/stream?interval_s=0.1") as stream:
            stats = json.loads(next(events_of(stream)))
        shown.append((client.get("/info").json(), stats["latencies"]["time_to_first_token"]))
    (info, _), (other_info, latency) = shown
    assert info == other_info
    assert info["engine"]["speculation"]["sources"] == ["prediction", "grammar", "suffix"]
    assert latency["count"] >= 2  # also those of the other


def test_one_that_dies_loses_its_own_requests_and_comes_back(
    server: RunningServer, clients: list[httpx.Client]
) -> None:
    before = counted(clients[0].get("/metrics").text)
    old = workers(server)
    kept = clients[1].build_request("POST", "/v1/completions", json=LONG | {"max_tokens": 600})
    with clients[0].stream("POST", "/v1/completions", json=LONG) as lost:
        next(events := events_of(lost))
        running = clients[1].send(kept, stream=True)
        victim = worker_behind(server, lost)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    assert list(events_of(running))[-1] == "[DONE]"
    running.close()
    server.wait_for("outrider_requests_running 0")
    assert server.metric("outrider_pages_used") == 0
    until(lambda: len(workers(server)) == 2)
    assert victim not in workers(server)
    assert len(workers(server) & old) == 1
    for _ in range(20):  # new connections, which reach both; none is turned away
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 200
    after = counted(httpx.get(f"{server.url}/metrics").text)
    ok = 'outrider_requests_total{outcome="ok",path="/v1/completions"}'
    assert after[ok] == before.get(ok, 0) + 21  # also those that the dead one had counted


def test_engine_that_dies_is_reported_by_all(
    server: RunningServer, clients: list[httpx.Client]
) -> None:
    streams = [
        client.send(client.build_request("POST", "/v1/completions", json=LONG), stream=True)
        for client in clients
    ]
    events = [events_of(stream) for stream in streams]
    for stream in events:
        next(stream)
    server.engine.kill()
    for stream in events:
        assert "signal 9" in error_in(list(stream)[-1])["message"]
    for client in clients:
        assert client.get("/ready").json()["status"] == "restarting"
        assert client.post("/v1/completions", json=SHORT).status_code == 503
    for client in clients:
        until(lambda client=client: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def error_in(event: str) -> Any:
    return json.loads(event)["error"]


def test_all_drain_and_leave_nothing(server: RunningServer, clients: list[httpx.Client]) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    requests = [
        (clients[0], LONG | {"max_tokens": 8}),  # done in time
        (clients[1], LONG | {"n": 16}),
    ]
    streams = [
        client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)
        for client, body in requests
    ]
    events = [events_of(stream) for stream in streams]
    for stream in events:
        next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert list(events[0])[-1] == "[DONE]"
    assert error_in(list(events[1])[-1])["code"] == "engine_unavailable"
    assert server.stop() == 0
    assert not [process for process in processes if process.is_running()]


def test_settings_reach_the_workers_with_their_secrets(tmp_path: Path) -> None:
    server = {"api_keys": ("secret",), "api_key_file": tmp_path, "cors_origins": ("*",), "port": 1}
    settings = Settings.model_validate({"server": server, "engine": {"logits_processors": ("a",)}})
    assert Settings.model_validate_json(settings.to_json()) == settings
    tokenizer = TokenizerData.of(byte_level_wrapper())
    prepared = Prepared(settings, EngineConfig(target=ModelConfig(path="")), tokenizer)
    assert Prepared.from_json(prepared.to_json()) == prepared


def test_worker_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    pem = tmp_path / "empty.pem"
    pem.touch()
    tls = {"tls_key": pem, "tls_certificate": pem, "api_workers": 2}
    config = EngineConfig(target=ModelConfig(path=""))
    tokenizer = TokenizerData.of(byte_level_wrapper())
    prepared = Prepared(Settings.model_validate({"server": tls}), config, tokenizer)

    async def serve() -> None:
        with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as other:
            await Workers(prepared, ProcessEngine(config)).serve([one, other])

    with pytest.raises(WorkerError, match="an HTTP process could not start: it left with exit"):
        asyncio.run(serve())
