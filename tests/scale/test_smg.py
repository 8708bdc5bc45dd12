"""Two servers behind SMG: whose cache it knows, and what clients see when one of them goes."""

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from running_server import RunningServer, running_server

pytestmark = pytest.mark.scale("smg")

COMPOSE = Path(__file__).parents[2] / "docker/compose.scale.yaml"
SEATS, QUEUE = 4, 4
BODY = {
    "model": "smollm2-135m-instruct",
    "prompt": "The capital of France is",
    "max_tokens": 12,
    "temperature": 0,
}
SETTINGS = [
    f"scheduler.max_num_seqs={SEATS}",
    f"scheduler.max_queue_len={QUEUE}",
    "cache.num_pages=512",
    "engine.num_threads=1",
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    """Seconds until it holds."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s
        time.sleep(0.1)
    return round(time.monotonic() - start_s, 1)


class Fleet:
    """SMG, as compose.scale.yaml starts it, and two servers on ports that stay theirs."""

    def __init__(self, stack: ExitStack, folder: Path, smg: Path) -> None:
        self._stack, self._folder = stack, folder
        self._ports = [free_port(), free_port()]
        self.servers = [self._serve(i) for i in range(2)]
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        arguments = yaml.safe_load(COMPOSE.read_text())["services"]["router"]["command"]
        own = {"--host": "127.0.0.1", "--port": str(port), "--prometheus-port": str(free_port())}
        urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        arguments = [
            a for a in arguments if not a.startswith(("--host", "--port", "--worker-urls", "http"))
        ]
        given = [f"{name}={value}" for name, value in own.items()]
        self.log = folder / "smg.log"
        output = stack.enter_context(self.log.open("wb"))
        command = [smg / "bin/smg", *arguments, *given, "--worker-urls", *urls]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(process.wait)
        stack.callback(process.kill)
        until(lambda: self.num_ready() == 2)

    def _serve(self, i: int) -> RunningServer:
        arguments = ["--port", str(self._ports[i])]
        arguments += [part for setting in SETTINGS for part in ("--set", setting)]
        log = self._folder / f"server-{i}-{time.monotonic()}.log"
        return self._stack.enter_context(running_server(log, arguments))

    def start_again(self, i: int) -> None:
        self.servers[i] = self._serve(i)

    def workers(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = httpx.get(f"{self.url}/workers").json()["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []
        return found

    def num_ready(self) -> int:
        return sum(bool(worker.get("is_healthy")) for worker in self.workers())


@pytest.fixture(scope="module")
def fleet(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"), installed / "smg")


@asynccontextmanager
async def traffic(fleet: Fleet, num_clients: int = 4) -> AsyncIterator[Counter[str]]:
    """Clients that ask one after another, half of them for streams; counts what they get."""
    outcomes: Counter[str] = Counter()
    going = True

    async def ask(http: httpx.AsyncClient, stream: bool) -> None:
        while going:
            try:
                reply = await http.post(
                    f"{fleet.url}/v1/completions", json=BODY | {"stream": stream}
                )
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            else:
                outcome = str(reply.status_code)
                if stream and reply.status_code == 200:
                    whole = "error" not in reply.text and reply.text.endswith("data: [DONE]\n\n")
                    outcome = "stream" if whole else "broken stream"
            outcomes[outcome] += 1

    async with httpx.AsyncClient(timeout=120) as http:
        clients = [asyncio.create_task(ask(http, i % 2 == 0)) for i in range(num_clients)]
        try:
            yield outcomes
        finally:
            going = False
            await asyncio.gather(*clients)


def run(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(what, 280))


def test_the_router_reads_each_servers_load(fleet: Fleet) -> None:
    def loads() -> str:
        return httpx.get(f"{fleet.url}/get_loads").text

    known = f'"max_total_num_tokens":{(512 - 1) * 16}'
    until(lambda: loads().count(known) == 2, 30)


def test_prompts_go_where_their_prefix_is_cached(fleet: Fleet) -> None:
    hits = 0
    with httpx.Client(base_url=fleet.url, timeout=120) as http:
        for _ in range(6):
            for i in range(6):
                prompt = f"Story {i}. " + "The quick brown fox jumps over the lazy dog. " * 8
                body = BODY | {"prompt": prompt, "max_tokens": 1}
                reply = http.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                usage = reply.json()["usage"]
                hits += usage["prompt_tokens_details"]["cached_tokens"] > 32
    print(f"{hits} of 36 prompts found their prefix; 30 could")
    assert hits >= 27


def test_a_full_queue_is_no_dead_replica(fleet: Fleet) -> None:
    body = BODY | {"max_tokens": 24}

    async def flood() -> Counter[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=200) as http:
            posts = [http.post(f"{fleet.url}/v1/completions", json=body) for _ in range(80)]
            return Counter(reply.status_code for reply in await asyncio.gather(*posts))

    statuses = run(flood())
    print(f"a flood of 80 on {2 * (SEATS + QUEUE)} places: {dict(statuses)}")
    # At once, and at both: no breaker is open.
    before = [server.metric("outrider_prompt_tokens_total") for server in fleet.servers]

    async def calm() -> set[int]:
        async with httpx.AsyncClient(timeout=60) as http:
            posts = [
                http.post(f"{fleet.url}/v1/completions", json=BODY | {"prompt": f"{i} {i}"})
                for i in range(2 * SEATS)
            ]
            return {reply.status_code for reply in await asyncio.gather(*posts)}

    assert run(calm()) == {200}
    assert fleet.num_ready() == 2
    assert statuses.keys() == {200, 429}
    after = [server.metric("outrider_prompt_tokens_total") for server in fleet.servers]
    assert all(b > a for a, b in zip(before, after, strict=True))


def test_sigterm_in_traffic_costs_no_request(fleet: Fleet) -> None:
    async def term() -> tuple[Counter[str], float]:
        async with traffic(fleet) as outcomes:
            await asyncio.sleep(4)
            fleet.servers[1].process.send_signal(signal.SIGTERM)
            out_s = await asyncio.to_thread(until, lambda: fleet.num_ready() == 1)
            await asyncio.to_thread(fleet.servers[1].process.wait, 60)
            await asyncio.sleep(4)
        return outcomes, out_s

    outcomes, out_s = run(term())
    print(f"SIGTERM: {dict(outcomes)}, out after {out_s} s")
    assert outcomes.keys() <= {"200", "stream"}
    assert fleet.servers[1].process.returncode == 0
    fleet.start_again(1)
    print(f"back after {until(lambda: fleet.num_ready() == 2)} s")


def test_a_killed_server_costs_the_streams_that_it_had(fleet: Fleet) -> None:
    async def kill() -> tuple[Counter[str], float]:
        async with traffic(fleet) as outcomes:
            await asyncio.sleep(4)
            fleet.servers[0].process.kill()
            out_s = await asyncio.to_thread(until, lambda: fleet.num_ready() == 1)
            await asyncio.sleep(4)
        return outcomes, out_s

    outcomes, out_s = run(kill())
    print(f"kill -9: {dict(outcomes)}, out after {out_s} s")
    # Whole answers are asked for again elsewhere; what has been streamed cannot be.
    assert outcomes.keys() <= {"200", "stream", "broken stream", "RemoteProtocolError"}
    assert outcomes["broken stream"] + outcomes["RemoteProtocolError"] <= 2
    fleet.start_again(0)
    print(f"back after {until(lambda: fleet.num_ready() == 2)} s")


def test_a_stream_that_is_lost_says_so(fleet: Fleet) -> None:
    async def lose() -> str:
        body = BODY | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        async with (
            httpx.AsyncClient(timeout=120) as http,
            http.stream("POST", f"{fleet.url}/v1/completions", json=body) as reply,
        ):
            lines = reply.aiter_lines()
            seen = [await anext(lines)]
            for server in fleet.servers:
                if server.metric("outrider_requests_running"):
                    server.process.kill()
            try:
                seen += [line async for line in lines]
            except httpx.RemoteProtocolError:
                return "cut"
        return json.dumps(seen[-4:])

    end = run(lose())
    print(f"a lost stream ends: {end}")
    assert end == "cut" or "error" in end
