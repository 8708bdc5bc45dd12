"""A crowd of clients, good and bad, against the real server: what breaks, leaks or stays stuck.

    python benchmarks/load.py [--seconds 300] [--clients 256] [--seed 0] [-- ARGUMENTS OF SERVE]

The target is the default pair's draft, run ahead of by itself: what is tried is everything around
the models, and a small one lets more of it happen. Prints a table, and exits with 1 where anything
was not as it should be.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving import Serving, serving

from outrider.server.config.pair_settings import DEFAULT_DRAFT

WORDS = ["the", "quick", "brown", "fox", "naïve", "🙂", "clients", "wait", "for", "tokens"]
SETTLE_S = 60.0  # for what is under way to end once the clients have gone
SAMPLE_S = 2.0
MAX_BODY_BYTES = 65_536
# The allocators' own play; a leak of one page table or one text a request is far above it.
MEMORY_GROWTH = 0.05

LONG: dict[str, object] = {"max_tokens": 200, "ignore_eos": True, "stop": None}
MALFORMED = [
    b'{"prompt": "x", "max_tokens": 1',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": 1.5}',
    b'{"prompt": [1, -1]}',
    b'{"prompt": ""}',
    b'{"prompt": "x", "n": 1000000}',
    b'{"prompt": "x", "max_tokens": 1000000}',
    b'{"prompt": "x", "stop": ["", 5]}',
    b"[" * 20_000,
    b"\xff\xfe\x00",
]


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


class Client:
    """One of the crowd: request after request, each in a manner drawn at random."""

    def __init__(self, server: Serving, tally: Tally, rng: random.Random) -> None:
        self._server = server
        self._tally = tally
        self._rng = rng
        self._manners: list[tuple[int, Callable[[], Coroutine[Any, Any, str]]]] = [
            (40, self.read_a_stream),
            (15, self.leave_a_stream),
            (10, self.read_slowly),
            (10, self.wait_for_the_whole),
            (5, self.leave_without_waiting),
            (8, self.break_off_the_body),
            (6, self.send_too_much),
            (6, self.send_nonsense),
        ]

    async def run(self, deadline_s: float) -> None:
        weights, manners = zip(*self._manners, strict=True)
        while time.monotonic() < deadline_s:
            (manner,) = self._rng.choices(manners, weights)
            try:
                outcome = await manner()
            except (AssertionError, OSError, asyncio.IncompleteReadError) as error:
                outcome = "wrong"
                self._tally.wrong.append(f"{manner.__name__}: {error!r}")
            self._tally.outcomes[f"{manner.__name__.replace('_', ' ')}: {outcome}"] += 1
            if outcome == "turned away":
                await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    # ---- manners

    async def read_a_stream(self) -> str:
        start_s = time.monotonic()
        async with self._connection() as (reader, writer):
            await self._send(writer, self._body(stream=True))
            if (status := await _status(reader)) == 429:
                return "turned away"
            assert status == 200, status
            first = await reader.readuntil(b"data: ")
            self._tally.first_token_s.append(time.monotonic() - start_s)
            return _finished(first + await reader.read(-1))

    async def leave_a_stream(self) -> str:
        async with self._connection() as (reader, writer):
            await self._send(writer, self._body(stream=True, **LONG))
            if await _status(reader) == 429:
                return "turned away"
            seen = b""
            for _ in range(self._rng.randint(0, 8)):
                try:
                    seen += await reader.readuntil(b"\n\n")
                except asyncio.IncompleteReadError as end:  # few events, if text was held back
                    return _finished(seen + end.partial)
        return "left"

    async def read_slowly(self) -> str:
        async with self._connection(limit=64) as (reader, writer):
            await self._send(writer, self._body(stream=True, logprobs=5))
            if (status := await _status(reader)) == 429:
                return "turned away"
            assert status == 200, status
            answer = b""
            while piece := await reader.read(512):
                answer += piece
                await asyncio.sleep(0.02)
            return _finished(answer)

    async def wait_for_the_whole(self) -> str:
        async with self._connection() as (reader, writer):
            await self._send(writer, self._body())
            if (status := await _status(reader)) == 429:
                return "turned away"
            assert status == 200, status
            _, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
            assert json.loads(content)["choices"][0]["finish_reason"] in ("length", "stop")
            return "answered"

    async def leave_without_waiting(self) -> str:
        async with self._connection() as (_, writer):
            await self._send(writer, self._body(**LONG))
            await asyncio.sleep(self._rng.uniform(0, 2))
        return "left"

    async def break_off_the_body(self) -> str:
        async with self._connection() as (_, writer):
            body = json.dumps(self._body(stream=True)).encode()
            await self._send_raw(writer, body[: self._rng.randrange(len(body))], len(body))
            await asyncio.sleep(self._rng.uniform(0, 0.5))
        return "left"

    async def send_too_much(self) -> str:
        async with self._connection() as (reader, writer):
            await self._send_raw(writer, b'{"prompt": "' + b"x" * MAX_BODY_BYTES)
            status = await _status(reader)
        assert status == 413, status
        return "refused"

    async def send_nonsense(self) -> str:
        async with self._connection() as (reader, writer):
            await self._send_raw(writer, nonsense := self._rng.choice(MALFORMED))
            status = await _status(reader)
        assert status in (400, 413), (status, nonsense[:80])  # 413: too large once it is read
        return "refused"

    # ---- HTTP, bare: a library would not let a client behave this badly

    def _body(self, **fields: object) -> dict[str, object]:
        rng = self._rng
        return {
            "prompt": " ".join(rng.choices(WORDS, k=rng.choice([3, 10, 30, 100]))),
            "max_tokens": rng.choice([1, 8, 16, 32]),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "n": rng.choice([1, 1, 1, 2]),
            "stop": rng.choice([None, [" wait", "\n\n"]]),
            **fields,
        }

    def _connection(self, limit: int = 65_536) -> "_Connection":
        return _Connection(self._server.host, self._server.port, limit)

    async def _send(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        await self._send_raw(writer, json.dumps(body).encode())

    async def _send_raw(
        self, writer: asyncio.StreamWriter, content: bytes, length: int | None = None
    ) -> None:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length or len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()


class _Connection:
    """A TCP connection that is dropped at the end of the block, whatever is still to come."""

    def __init__(self, host: str, port: int, limit: int) -> None:
        self._where = host, port, limit

    async def __aenter__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port, limit = self._where
        reader, self._writer = await asyncio.open_connection(host, port, limit=limit)
        return reader, self._writer

    async def __aexit__(self, *exception: object) -> None:
        self._writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n")).split()[1])


def _finished(stream: bytes) -> str:
    """A stream ends with [DONE] and the last chunk of its coding, and holds no error."""
    assert b'data: {"error"' not in stream, stream[-300:]
    assert b"data: [DONE]\n\n" in stream, stream[-300:]
    assert stream.endswith(b"0\r\n\r\n"), stream[-300:]
    return "answered"


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    http_bytes: int
    engine_bytes: int
    running: float
    waiting: float


async def watch(server: Serving, samples: list[Sample]) -> None:
    start_s = time.monotonic()
    while True:
        running, waiting = await asyncio.gather(
            *(
                asyncio.to_thread(server.metric, f"outrider_requests_{n}")
                for n in ("running", "waiting")
            )
        )
        samples.append(
            Sample(
                time.monotonic() - start_s,
                sum(process.memory_info().rss for process in server.front),
                server.engine.memory_info().rss,
                running,
                waiting,
            )
        )
        await asyncio.sleep(SAMPLE_S)


async def crowd(server: Serving, args: argparse.Namespace) -> tuple[Tally, list[Sample]]:
    tally, samples = Tally(), []
    clients = [
        Client(server, tally, random.Random(f"{args.seed} {i}")) for i in range(args.clients)
    ]
    watching = asyncio.create_task(watch(server, samples))
    deadline_s = time.monotonic() + args.seconds
    running = {asyncio.create_task(client.run(deadline_s)) for client in clients}
    _, running = await asyncio.wait(running, timeout=args.seconds)
    generated = -1.0
    while running and (now := server.metric("outrider_generation_tokens_total")) > generated:
        generated = now
        _, running = await asyncio.wait(running, timeout=SETTLE_S)
    for stuck in running:
        stuck.cancel()
        tally.wrong.append("a client's request was stuck")
    watching.cancel()
    return tally, samples


async def settled(server: Serving) -> bool:
    """Whether everything under way ends by itself once the clients have gone."""
    deadline_s = time.monotonic() + SETTLE_S
    names = ("requests_running", "requests_waiting", "pages_used")
    while any(server.metric(f"outrider_{name}") for name in names):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.1)
    return True


def growth(sizes: list[int]) -> float:
    """From the second quarter of a run, when everything is warm, to its last: a ratio."""
    quarter = len(sizes) // 4
    return statistics.median(sizes[-quarter:]) / statistics.median(sizes[quarter : 2 * quarter]) - 1


def answer(server: Serving) -> str:
    body: dict[str, object] = {"prompt": "The capital of France is", "max_tokens": 8}
    choice = server.post("/v1/completions", body | {"temperature": 0}).json()["choices"][0]
    return str(choice["text"])


def open_files(server: Serving) -> int:
    return sum(process.num_fds() for process in server.front)


def spent_s(server: Serving) -> float:
    """CPU time of all processes but the engine's."""
    return sum(sum(process.cpu_times()[:2]) for process in server.front)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="arguments of `outrider serve`, after --")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="outrider-load-")) / "serve.log"
    settings = [f"target.model={DEFAULT_DRAFT}", f"draft.model={DEFAULT_DRAFT}"]
    # So few pages that all have been touched when the run is warm: what still grows is a leak.
    settings += [f"server.max_body_bytes={MAX_BODY_BYTES}", "cache.num_pages=2048"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]

    with serving(log, [*arguments, *args.serve]) as server:
        before, files_before = answer(server), open_files(server)
        busy_s = spent_s(server)
        tally, samples = asyncio.run(crowd(server, args))
        busy_s = spent_s(server) - busy_s
        checks = {
            "no client saw anything wrong": not tally.wrong,
            "what was under way ended, every page is free": asyncio.run(settled(server)),
            "no request counted as an error": 'outcome="error"' not in server.get("/metrics").text,
            "the engine never died": server.engine.is_running()
            and "restarting" not in log.read_text(),
            "no traceback in the log": "Traceback" not in log.read_text(),
            "the same answer as before": answer(server) == before,
            "no file left open": open_files(server) <= files_before + 2 * len(server.front),
            "the server's memory is flat": growth([s.http_bytes for s in samples]) < MEMORY_GROWTH,
            "the engine's memory is flat": growth([s.engine_bytes for s in samples])
            < MEMORY_GROWTH,
        }
        report(tally, samples, server, busy_s / samples[-1].at_s)
    for check, holds in checks.items():
        print("ok  " if holds else "FAIL", check)
    for wrong, count in Counter(tally.wrong).most_common(10):
        print(f"  {count} x {wrong}")
    sys.exit(not all(checks.values()))


def report(tally: Tally, samples: list[Sample], server: Serving, busy: float) -> None:
    table = Table("", "", title=f"{sum(tally.outcomes.values())} requests")
    for outcome, count in sorted(tally.outcomes.items()):
        table.add_row(outcome, str(count))
    table.add_section()
    generated = server.metric("outrider_generation_tokens_total")
    table.add_row("tokens generated", f"{generated:.0f}")
    table.add_row("tokens/s", f"{generated / samples[-1].at_s:.1f}")
    if len(tally.first_token_s) > 1:
        cuts = statistics.quantiles(tally.first_token_s, n=20)
        table.add_row("time to first token, p50 and p95", f"{cuts[9]:.1f} s, {cuts[18]:.1f} s")
    table.add_row("most running, most waiting", _most(samples))
    table.add_row("HTTP process: share of a core", f"{busy:.2f}")
    for name, sizes in (
        ("HTTP process", [sample.http_bytes for sample in samples]),
        ("engine process", [sample.engine_bytes for sample in samples]),
    ):
        table.add_row(
            f"{name}: resident, largest", f"{max(sizes) / 1e6:.0f} MB, grew {growth(sizes):+.1%}"
        )
    Console().print(table)


def _most(samples: list[Sample]) -> str:
    running = max(sample.running for sample in samples)
    return f"{running:.0f}, {max(sample.waiting for sample in samples):.0f}"


if __name__ == "__main__":
    main()
