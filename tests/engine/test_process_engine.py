"""What the process around the engine promises: it is watched, restarted, and never outlives us."""

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import engine_clients
import msgspec
import psutil
import pytest
import uvloop
import zmq
from ended_processes import has_ended
from engine_clients import (
    ScriptedProcessEngine,
    becomes_true,
    collect,
    scripted_config,
    state_becomes,
)
from engine_clients import scripted_request as request

from outrider.engine.config import EngineConfig
from outrider.engine.processes import child_process, process, process_engine
from outrider.engine.processes.client import EngineUnavailableError
from outrider.engine.processes.messages import Abort, Submit

pytestmark = pytest.mark.anyio


@pytest.fixture
def socket_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
async def client(socket_root: Path) -> AsyncIterator[ScriptedProcessEngine]:
    client = ScriptedProcessEngine(scripted_config())
    await client.start()
    yield client
    async with asyncio.timeout(10):
        await client.stop()


def pid(client: ScriptedProcessEngine) -> int:
    assert client.info is not None
    return client.info.pid


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def test_kill_9_ends_streams_and_the_engine_comes_back(
    client: ScriptedProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.engine.processes.process_engine")
    await collect(await client.generate([request("a", max_tokens=5)]))
    stream = await client.generate([request("b", max_tokens=10**6)])
    await anext(stream)
    killed = pid(client)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(
        EngineUnavailableError, match="killed by signal 9, as a rule because memory has run out"
    ):
        await collect(stream)
    assert client.state == "restarting"
    assert "killed by signal 9" in (client.status_reason or "")
    assert (client.stats.num_running, client.stats.pages_used) == (0, 0)
    with pytest.raises(EngineUnavailableError, match="restarted"):
        await client.generate([request("b")])
    counted = client.stats.generation_tokens
    assert counted >= 6
    assert "ready again" not in caplog.text
    await state_becomes(client, "ready")
    assert caplog.text.count("the engine is ready again") == 1
    assert pid(client) != killed
    assert client.status_reason is None
    assert await collect(await client.generate([request("b")])) == {"b": [0, 1, 2]}
    assert client.stats.generation_tokens == counted + 3


async def test_an_exit_code_is_named(client: ScriptedProcessEngine) -> None:
    with pytest.raises(EngineUnavailableError, match="exit code 7"):
        await client.generate([request("a", script="exit")])


async def test_an_engine_that_dies_before_its_first_word_cannot_start(socket_root: Path) -> None:
    client = ScriptedProcessEngine(scripted_config("crash"))
    with pytest.raises(EngineUnavailableError, match="could not start: it left with exit code 3"):
        await client.start()
    assert client.state == "failed"
    assert list(socket_root.iterdir()) == []
    await client.stop()


async def test_a_setting_that_the_engine_refuses_is_one_line(
    socket_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = ScriptedProcessEngine(scripted_config("refused"))
    with pytest.raises(EngineUnavailableError, match=r"start: engine\.something: no such"):
        await client.start()
    await client.stop()
    assert "Traceback" not in capfd.readouterr().err


async def test_an_engine_that_leaves_from_a_thread_can_say_why() -> None:
    """Its loop may be waiting for a GPU for ever, and sends nothing."""
    client = ScriptedProcessEngine(scripted_config("last words"))
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailableError, match=r"could not start: a rank is lost$"):
            await client.start()
    await client.stop()


def test_an_engine_frees_no_modules_when_it_leaves() -> None:
    """With torch that takes seconds, in which its clients would wait for news of its death."""
    code = """
import atexit
from outrider.engine.lifeline import leave
class Held:
    def __del__(self):
        print("freed")
held = Held()
atexit.register(print, "registered")
leave(3)
"""
    ended = subprocess.run((sys.executable, "-P", "-c", code), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "registered\n")


async def test_nothing_in_the_engine_can_read_the_lifeline() -> None:
    client = ScriptedProcessEngine(scripted_config("reads stdin"))
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailableError, match="stdin held ''"):
            await client.start()
    await client.stop()


async def test_a_program_that_is_not_there_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedProcessEngine, "_command", ("/nowhere/python",))
    client = ScriptedProcessEngine(scripted_config())
    with pytest.raises(EngineUnavailableError, match="/nowhere/python"):
        await client.start()
    await client.stop()


async def test_the_third_death_in_a_row_is_the_last(
    client: ScriptedProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "RESTART_DELAYS_S", (0.0, 0.0))
    for state in ("restarting", "restarting", "failed"):
        await state_becomes(client, "ready")
        os.kill(pid(client), signal.SIGKILL)
        await state_becomes(client, state)
    with pytest.raises(EngineUnavailableError, match="keeps dying: killed by signal 9"):
        await client.generate([request("a")])


async def test_deaths_after_good_health_are_not_counted(
    client: ScriptedProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "HEALTHY_S", 0.0)
    for _ in range(4):
        await state_becomes(client, "ready")
        os.kill(pid(client), signal.SIGKILL)
        await state_becomes(client, "restarting")


async def test_a_step_that_does_not_end_ends_the_engine(socket_root: Path) -> None:
    client = ScriptedProcessEngine(scripted_config(), step_timeout_s=0.3)
    await client.start()
    await asyncio.sleep(0.5)  # without work, silence is no fault
    hung = pid(client)
    running = await client.generate([request("a", max_tokens=10**6)])
    await anext(running)
    stream = await client.generate([request("b", script="hang")])
    for under_way in (running, stream):
        with pytest.raises(EngineUnavailableError, match=r"no step ended within 0\.3 s"):
            await collect(under_way)
    await state_becomes(client, "ready")
    assert pid(client) != hung
    assert has_ended(hung)
    assert await collect(await client.generate([request("c")])) == {"c": [0, 1, 2]}
    await client.stop()


async def test_a_start_that_comes_no_further_is_logged_with_what_it_is_at(
    socket_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But not how long its config took, for which models may be fetched."""
    monkeypatch.setattr(process_engine, "_STANDSTILL_S", 0.1)
    logged_too_early: list[str] = []

    async def config() -> EngineConfig:
        await asyncio.sleep(0.5)
        logged_too_early.extend(caplog.messages)
        return scripted_config("stands still")

    client = ScriptedProcessEngine(config)
    starting = asyncio.create_task(client.start())
    where = "the start has come no further for 0 minutes, at: target (3 of 20)."
    await becomes_true(lambda: sum(where in text for text in caplog.messages) == 2)
    assert logged_too_early == []
    await client.stop()
    with pytest.raises(EngineUnavailableError):
        await starting


async def test_log_lines_of_the_engine_can_be_json(capfd: pytest.CaptureFixture[str]) -> None:
    client = ScriptedProcessEngine(scripted_config(), log_format="json")
    await client.start()
    running = await client.generate([request("a", script="step_bug")])
    with pytest.raises(EngineUnavailableError, match="a bug in step"):
        await collect(running)
    await client.stop()
    line = json.loads(capfd.readouterr().err.splitlines()[0])
    assert (line["level"], line["message"]) == ("error", "the engine stops")
    assert "ArithmeticError: a bug in step" in line["exception"]
    assert line["process"] != os.getpid()


async def test_stop_leaves_nothing(socket_root: Path) -> None:
    me = psutil.Process()
    # Engines of other tests, in this process, may still hold the processes of their grammars.
    children, open_files, threads = me.children(), me.num_fds(), me.num_threads()
    client = ScriptedProcessEngine(scripted_config())
    await client.start()
    child = pid(client)
    assert list(socket_root.iterdir()) == []  # nobody else can connect from here on
    await client.generate([request("a", max_tokens=10**6)])
    shared_memory = set(Path("/dev/shm").iterdir())
    await client.stop()
    assert has_ended(child)
    assert set(me.children()) <= set(children)
    assert (me.num_fds(), me.num_threads()) == (open_files, threads)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


async def test_the_socket_directory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    show_mode = (
        "import os, sys; folder = os.path.dirname(sys.argv[-1][6:]); "
        "sys.exit(os.stat(folder).st_mode & 0o77)"
    )
    monkeypatch.setattr(ScriptedProcessEngine, "_command", (sys.executable, "-c", show_mode))
    client = ScriptedProcessEngine(scripted_config())
    with pytest.raises(EngineUnavailableError, match="exit code 0"):
        await client.start()
    await client.stop()


async def test_stop_kills_an_engine_that_does_not_listen(
    client: ScriptedProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_engine, "_LEAVE_S", 0.05)
    await client.generate([request("a", script="hang")])
    await client.stop()
    assert has_ended(pid(client))


async def test_stop_does_not_wait_for_loading() -> None:
    children = psutil.Process().children()
    client = ScriptedProcessEngine(scripted_config("slow 60"))
    start = asyncio.create_task(client.start())
    await asyncio.sleep(0.2)
    async with asyncio.timeout(10):
        await client.stop()
        with pytest.raises(EngineUnavailableError, match="stopped"):
            await start
    assert set(psutil.Process().children()) <= set(children)


async def test_stop_does_not_wait_for_a_restart(
    client: ScriptedProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "RESTART_DELAYS_S", (0.0, 60.0))
    for _ in range(2):
        await state_becomes(client, "ready")
        os.kill(pid(client), signal.SIGKILL)
        await state_becomes(client, "restarting")
    async with asyncio.timeout(10):
        await client.stop()
    assert client.state == "stopped"


async def test_signals_to_our_group_do_not_reach_the_engine(client: ScriptedProcessEngine) -> None:
    assert os.getpgid(pid(client)) != os.getpgid(0)


async def test_bytes_that_are_no_message_do_not_end_the_engine(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = ScriptedProcessEngine(scripted_config())
    await client.start()
    running = await client.generate([request("a", max_tokens=50)])
    rng = random.Random(0)
    deeply_nested = b"\x83\xa4type\xa5Abort\xabrequest_ids\x90\xa1x" + b"\x91" * 100_000 + b"\x00"
    hostile = [b"", b"\xc1", deeply_nested, b"\x81\xa4type\xa4Nope", b"\x81\xa4type\xa6Submit"]
    hostile += [rng.randbytes(rng.randrange(1, 200)) for _ in range(500)]
    connection: Any = client._connection
    connection._unsent.extend(hostile)
    connection._turn()
    assert await collect(running) == {"a": list(range(50))}
    assert await collect(await client.generate([request("b")])) == {"b": [0, 1, 2]}
    await client.stop()
    assert f"ignored {len(deeply_nested)} bytes that are no message" in capfd.readouterr().err


async def test_a_flood_of_messages_leaves_the_engine_its_steps() -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        context.socket(zmq.DEALER) as sender,
    ):
        for each in (socket, sender):
            each.set_hwm(0)
        socket.bind("inproc://flood")
        sender.connect("inproc://flood")
        sent = [Abort([str(i)]) for i in range(2500)]
        for message in sent:
            sender.send(msgspec.msgpack.encode(message))
        channel = process.Channel(socket)
        taken = [[message for _, message in channel.receive(wait_s)] for wait_s in (None, 0, 1e-3)]
        assert [len(messages) for messages in taken] == [1000, 1000, 500]
        assert [message for messages in taken for message in messages] == sent


async def test_an_answer_to_nobody_does_not_disturb_the_client(
    client: ScriptedProcessEngine,
) -> None:
    client._send(Submit(99, [request("stray")]))
    assert await collect(await client.generate([request("b")])) == {"b": [0, 1, 2]}


async def test_a_progress_display_that_fails_does_not_stop_the_start() -> None:
    def broken(stage: str, done: int, total: int) -> None:
        raise OSError("the terminal has gone")

    client = ScriptedProcessEngine(scripted_config(), broken)
    await client.start()
    await client.stop()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_it_works_on_uvloop(client: ScriptedProcessEngine) -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    assert await collect(await client.generate([request("a")])) == {"a": [0, 1, 2]}
    os.kill(pid(client), signal.SIGKILL)
    await state_becomes(client, "restarting")
    await state_becomes(client, "ready")


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    support = str(Path(engine_clients.__file__).parent)
    script = f"""
import asyncio, sys, tempfile
sys.path.append({support!r})
tempfile.tempdir = {str(tmp_path)!r}
from engine_clients import ScriptedProcessEngine, scripted_config, scripted_request

async def main():
    client = ScriptedProcessEngine(scripted_config())
    info = await client.start()
    await client.generate([scripted_request("a", max_tokens=10**6)])
    print(info.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not has_ended(child)
        parent.kill()
    deadline_s = time.monotonic() + 10
    while not has_ended(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


async def test_the_process_starts_before_its_config_is_known(socket_root: Path) -> None:
    known = asyncio.Event()

    async def config() -> EngineConfig:
        await known.wait()
        return scripted_config()

    others = children()
    client = ScriptedProcessEngine(config)
    starting = asyncio.create_task(client.start())
    try:
        async with asyncio.timeout(10):
            while not (started := children() - others):
                await asyncio.sleep(0.01)
        known.set()
        assert {(await starting).pid} == started
    finally:
        await client.stop()


async def test_a_config_that_cannot_be_had_ends_the_process(socket_root: Path) -> None:
    async def config() -> EngineConfig:
        raise ValueError("no such model")

    others = children()
    client = ScriptedProcessEngine(config)
    with pytest.raises(EngineUnavailableError, match="no such model"):
        await client.start()
    await client.stop()
    assert not children() - others


async def test_a_child_that_is_killed_while_it_is_started_ends() -> None:
    context = zmq.Context()
    child = child_process.ChildProcess(
        context,
        (sys.executable, "-c", "import time; time.sleep(60)"),
        line=b"",
        decoder=msgspec.msgpack.Decoder(int),
        hear=lambda message: None,
    )
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)
    child.kill()
    assert await asyncio.wait_for(running, 20) == -signal.SIGKILL
    context.destroy(linger=0)
