"""`outrider serve` around the application: its address, its signals, its exit code."""

import asyncio
import gc
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from asgi import get, post
from engine_clients import ScriptedProcessEngine, scripted_config
from pydantic_core import from_json
from rich.console import Console
from scripted_client import ScriptedClient, steps
from served import Served
from socket_server import on_a_socket, own_certificate
from tokenizers_for_tests import byte_level_wrapper
from typer.testing import CliRunner

from outrider.engine.config import EngineConfig, ModelConfig
from outrider.engine.processes import child_process
from outrider.server.__main__ import main
from outrider.server.cli import app, serving
from outrider.server.cli.serving import prepare_for_clients
from outrider.server.config.server_settings import ServerSettings
from outrider.server.config.settings import Settings
from outrider.server.http.http_server import Server, load_app
from outrider.server.http.listeners import bind, bind_unix, share
from outrider.server.http.middleware import Gate
from outrider.server.models.prepare import Prepared
from outrider.server.text.tokenizer import TokenizerData

Serve = Callable[..., Served]


@pytest.fixture
def listener() -> socket.socket:
    return bind("127.0.0.1", 0)


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_taken_port_is_reported_before_anything_is_loaded(
    listener: socket.socket, num_sockets: int
) -> None:
    shared = share(listener, num_sockets)  # the other server, while it still loads
    port = listener.getsockname()[1]
    with pytest.raises(OSError, match=f"port {port}: Address already in use; choose"):
        bind("127.0.0.1", port)
    with pytest.raises(OSError, match=f"port {port}: Address already in use; .*metrics_port"):
        bind("127.0.0.1", port, remedy="choose another server.metrics_port")
    assert len(shared) == num_sockets
    with pytest.raises(ValueError, match="metrics_port is 8000, as port is"):
        ServerSettings(metrics_port=8000)


@pytest.fixture
def own_garbage_collection() -> Iterator[None]:
    """Whatever the test sets is undone."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("own_garbage_collection")
def test_what_is_made_from_a_large_body_is_not_searched_for_garbage_all_the_time() -> None:
    tokenizer = TokenizerData.of(byte_level_wrapper())
    prepared = Prepared(Settings(), EngineConfig(target=ModelConfig(path="")), tokenizer)
    asyncio.run(load_app(prepared, ScriptedClient(lambda request: (), vocab_size=300), Gate()))
    assert gc.get_freeze_count() > 10_000  # of the application itself, which stays
    passes: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        passes.append(phase)

    gc.callbacks.append(note)
    body = from_json(b"[" + b"[]," * 100_000 + b"[]]")
    gc.callbacks.remove(note)
    assert len(body) == 100_001
    assert passes.count("start") <= 20


def test_socket_of_a_server_that_still_loads_is_not_replaced(tmp_path: Path) -> None:
    loading = bind_unix(tmp_path / "outrider.sock")
    with pytest.raises(OSError, match="Address already in use"):
        bind_unix(tmp_path / "outrider.sock")
    loading.close()


@pytest.mark.usefixtures("own_garbage_collection")
def test_a_local_model_has_the_last_part_of_its_path_as_its_name() -> None:
    tokenizer = TokenizerData.of(byte_level_wrapper())
    settings = Settings.model_validate({"target": {"model": "/home/me/tiny"}})
    prepared = Prepared(settings, EngineConfig(target=ModelConfig(path="")), tokenizer)
    client = ScriptedClient(lambda request: steps(request, [70]), vocab_size=300)
    api = asyncio.run(load_app(prepared, client, Gate()))
    assert "/home" not in (reported := get(api, "/v1/models").body.decode())
    assert '"id":"tiny"' in reported
    for name in ("tiny", "/home/me/tiny"):  # the second is what a user gave to `outrider serve`
        assert post(api, {"prompt": "Hi", "model": name}).json()["model"] == "tiny"
    assert "/home" not in post(api, {"prompt": "Hi", "model": "other"}).error["message"]


def test_server_can_listen_at_a_unix_socket(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "outrider.sock"
    bind_unix(path).close()  # left behind by a server that is gone
    with on_a_socket(serve(), uds=path):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as http:
            reply = http.post("/v1/completions", json={"prompt": "Hi"})
            assert reply.json()["choices"][0]["text"] == " Hello world"
            assert http.get("/health").status_code == 200
        with pytest.raises(OSError, match="Address already in use"):
            bind_unix(path)
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(OSError, match="something else than a socket is there"):
            bind_unix(taken)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(OSError, match="path too long"):
        bind_unix(tmp_path / ("a" * 200))
    for others in ({"api_workers": 2}, {"metrics_port": 9000}):
        with pytest.raises(ValueError, match="one socket"):
            ServerSettings(uds=path, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.0.2.1"}, True),
        ({"host": "0.0.0.0", "api_keys": ("key",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
    ],
)
def test_a_server_that_is_open_beyond_its_machine_says_so(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warns: bool
) -> None:
    prepare_for_clients(ServerSettings(**settings))
    assert ("asks for no key" in caplog.text) == warns


def test_there_are_files_for_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        prepare_for_clients(ServerSettings(max_connections=500))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 700
        assert not caplog.text
        prepare_for_clients(ServerSettings(max_connections=hard))
        assert "server.max_connections" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_missing_model_ends_the_command() -> None:
    settings = ["target.model=./nowhere", "speculation.proposer=none"]
    assignments = [argument for setting in settings for argument in ("--set", setting)]
    result = CliRunner().invoke(app, ["serve", "--port", "0", *assignments])
    assert result.exit_code == 1
    assert "./nowhere" in result.output


@pytest.mark.parametrize("moment", ["while it prepares", "while it opens a socket"])
def test_sigterm_ends_a_start(moment: str) -> None:
    program = f"""
import asyncio, os, signal
import zmq
from outrider.server.cli import serving
from outrider.server.config.settings import Settings
moment = {moment!r}
def terminate(now):
    if moment == now:
        os.kill(os.getpid(), signal.SIGTERM)
async def prepare(*_):
    await asyncio.sleep(0.1)
    terminate("while it prepares")
    await asyncio.sleep(60)
class Socket(zmq.Socket):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        terminate("while it opens a socket")  # which nobody would close if this raised
serving.prepare, zmq.Context._socket_class = prepare, Socket
raise SystemExit(serving.serve(Settings(server={{"port": 0}})))
"""
    command = [sys.executable, "-P", "-c", program]
    # Its own exit, not the signal's: the first process of a container has no default handlers.
    assert subprocess.run(command, timeout=30, check=False).returncode == 130


def test_ctrl_c_while_a_command_loads_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(ModuleType):
        @property
        def app(self) -> None:
            raise KeyboardInterrupt

    name = "outrider.server.cli"
    monkeypatch.setitem(sys.modules, name, Loading(name))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_json_logs_of_a_start_are_nothing_but_json() -> None:
    program = """
from outrider.server.cli import serving
from outrider.server.config.settings import Settings
from outrider.server.models.store import ModelError
async def prepare(settings, report):
    report("loading the target", 0, 1)
    raise ModelError("no target")
serving.prepare = prepare
raise SystemExit(serving.serve(Settings(server={"port": 0, "log_format": "json"})))
"""
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    lines = [from_json(line)["message"] for line in result.stderr.splitlines()]
    assert lines == ["loading the target", "no target"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_server_speaks_https_with_a_certificate(serve: Serve, tmp_path: Path) -> None:
    tls = own_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=tls["tls_certificate"])
    with on_a_socket(serve(), **tls) as url:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, verify=trust)
    assert reply.json()["choices"][0]["text"] == " Hello world"
    with pytest.raises(ValueError, match="set both, or neither"):
        ServerSettings(tls_key=tls["tls_key"])


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_reported_at_once(
    tmp_path: Path, content: str | None
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    if content is not None:
        key.write_text(content)
        certificate.write_text(content)
    settings = ServerSettings(tls_certificate=certificate, tls_key=key)
    with pytest.raises(OSError, match=r"certificate\.pem \(server\.tls_certificate\).*tls_key"):
        prepare_for_clients(settings)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_signal_lets_running_requests_finish(serve: Serve, listener: socket.socket) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        served = serve(lambda request: [(o := steps(request, [70, 71]))[0], go_on, o[1]])
        server = Server(
            served.app, served.gate, served.client, ServerSettings(shutdown_timeout_s=10)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = "http://{}:{}/v1/completions".format(*listener.getsockname())
        await until(lambda: server.started)
        async with httpx.AsyncClient() as http:
            running = asyncio.create_task(http.post(url, json={"prompt": "Hi"}))
            await until(lambda: bool(served.client.submitted))
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: not served.gate.open)
            assert (await http.post(url, json={"prompt": "Hi"})).status_code == 503
            go_on.set()
            assert (await running).status_code == 200
            await asyncio.wait_for(serving, 5)

    asyncio.run(run())


@pytest.mark.usefixtures("own_garbage_collection")
@pytest.mark.parametrize("api_workers", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_an_engine_that_keeps_dying_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, api_workers: int
) -> None:
    settings = Settings.model_validate({"server": {"api_workers": api_workers}})
    config, tokenizer = scripted_config(), TokenizerData.of(byte_level_wrapper())
    engines: list[ScriptedProcessEngine] = []

    async def prepare(*_: object) -> Prepared:
        return Prepared(settings, config, tokenizer)

    def make_engine(*_: object, is_shared: bool, **__: object) -> ScriptedProcessEngine:
        engines.append(ScriptedProcessEngine(config, is_shared=is_shared))
        return engines[-1]

    monkeypatch.setattr(serving, "prepare", prepare)
    monkeypatch.setattr(serving, "ProcessEngine", make_engine)
    monkeypatch.setattr(child_process, "RESTART_DELAYS_S", (0.0, 0.0))

    async def run() -> int:
        server = asyncio.create_task(serving._serve(settings, [listener], Console()))
        await until(lambda: bool(engines))
        async with httpx.AsyncClient() as http:
            url = "http://{}:{}/ready".format(*listener.getsockname())
            while (await http.get(url, timeout=60)).status_code != 200:
                await asyncio.sleep(0.02)
        for state in ("restarting", "restarting", "stopped"):
            await until(lambda: engines[0].state == "ready")
            assert engines[0].info is not None
            os.kill(engines[0].info.pid, signal.SIGKILL)
            await until(lambda state=state: engines[0].state == state)  # type: ignore[misc]
        return await server

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(asyncio.wait_for(run(), 60)) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_requests_that_outlast_the_drain_end_with_an_error_event(
    serve: Serve, listener: socket.socket
) -> None:
    async def run() -> None:
        forever = asyncio.Event()
        served = serve(lambda request: [steps(request, [70, 71])[0], forever])
        server = Server(
            served.app, served.gate, served.client, ServerSettings(shutdown_timeout_s=0.05)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = "http://{}:{}/v1/completions".format(*listener.getsockname())
        await until(lambda: server.started)
        async with httpx.AsyncClient() as http:
            body = {"prompt": "Hi", "stream": True}
            async with http.stream("POST", url, json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                rest = [line async for line in lines if line]
        assert rest[-1].startswith('data: {"error"')
        await asyncio.wait_for(serving, 5)

    asyncio.run(run())
