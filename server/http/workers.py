"""Starts, watches and drains HTTP processes around one engine. Each runs `worker.py`."""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec
import zmq

from outrider.engine.lifeline import describe_exit
from outrider.engine.processes.child_process import ChildProcess, Restarts
from outrider.engine.processes.messages import Shutdown, Up
from outrider.engine.processes.process_engine import ProcessEngine

from ..models.prepare import Prepared
from .http_server import FAREWELL_S

log = logging.getLogger("outrider.server")

BACKLOG = 2048


class WorkerError(RuntimeError):
    """HTTP processes keep dying, so that starting others would not help."""


class Workers:
    """Processes that share this process's engine. They talk to it directly; this process reports
    its state and endpoint to them.

    A process that dies is started again, the first time at once. Its requests are aborted, its
    connections are lost, and new connections wait for its successor. `serve` raises WorkerError
    after three deaths in a row, or if a process cannot start at all.
    """

    def __init__(self, prepared: Prepared, engine: ProcessEngine) -> None:
        self.leaving = False
        self._settings = prepared.settings.server
        self._line = prepared.to_json()
        self._engine = engine
        self._engine.on_change = self._report
        self._context = zmq.Context()
        self._living: dict[ChildProcess[Up], bool] = {}  # whether each is ready
        self._up = [asyncio.Event() for _ in range(self._settings.api_workers)]

    async def listening(self) -> None:
        """Wait until all of them are ready."""
        await asyncio.gather(*(up.wait() for up in self._up))

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Keep them running until a signal, then let them finish and exit.

        `sockets`: the same number for each process, those of one process next to each other.
        """
        for listener in sockets:
            listener.listen(BACKLOG)  # connections wait until their process is ready
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._leave, sig)
        # prometheus-client adds up the counts of all processes, including those that have ended.
        with tempfile.TemporaryDirectory(prefix="outrider-metrics-") as metrics:
            environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": metrics}
            num_each = len(sockets) // len(self._up)
            tasks = [
                asyncio.create_task(
                    self._keep_up(up, sockets[i * num_each : (i + 1) * num_each], environment)
                )
                for i, up in enumerate(self._up)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._context.destroy(linger=0)

    async def _keep_up(
        self, up: asyncio.Event, listeners: list[socket.socket], environment: dict[str, str]
    ) -> None:
        restarts = Restarts()
        while not self.leaving:
            started_s = time.monotonic()
            cause = describe_exit(await self._run(up, listeners, environment))
            if self.leaving:
                return
            log.error("an HTTP process died: %s", cause)
            if not up.is_set():
                raise WorkerError(f"an HTTP process could not start: {cause}")
            delay_s = restarts.delay_s(time.monotonic() - started_s)
            if delay_s is None:
                raise WorkerError(f"an HTTP process keeps dying: {cause}")
            await asyncio.sleep(delay_s)

    async def _run(
        self, up: asyncio.Event, listeners: list[socket.socket], environment: dict[str, str]
    ) -> int:
        """Start one and handle its messages until it ends; returns its exit code."""

        def hear(message: Up) -> None:
            self._living[child] = True
            up.set()

        fds = [listener.fileno() for listener in listeners]
        child = ChildProcess(
            self._context,
            (sys.executable, "-P", "-m", "outrider.server.http.worker", *map(str, fds)),
            line=self._line,
            decoder=msgspec.msgpack.Decoder(Up),
            hear=hear,
            environment=environment,
            pass_fds=fds,
        )
        self._living[child] = False
        child.connection.send(self._engine.status)
        try:
            return await child.run()
        finally:
            del self._living[child]

    def _report(self) -> None:
        for child in self._living:
            child.connection.send(self._engine.status)

    def _leave(self, sig: int) -> None:
        if self.leaving:
            if sig == signal.SIGINT:
                os._exit(130)  # all other processes end with this one
            return
        log.info("shutting down: no new requests; Ctrl-C again leaves at once")
        self.drain()

    def drain(self) -> None:
        """Let all of them refuse new requests, let running ones finish, and exit."""
        self.leaving = True
        for child, is_up in self._living.items():
            if is_up:
                child.connection.send(Shutdown())
            else:
                child.kill()
        patience_s = self._settings.shutdown_timeout_s + 3 * FAREWELL_S
        asyncio.get_running_loop().call_later(patience_s, self._kill, list(self._living))

    def _kill(self, children: Sequence[ChildProcess[Up]]) -> None:
        for child in children:
            child.kill()
