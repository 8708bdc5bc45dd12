"""An engine in a process of its own: started, watched, restarted and stopped from here."""

import asyncio
import logging
import math
import os
import signal
import sys
import tempfile
import time
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from outrider.engine.api import ReportProgress
from outrider.engine.client import Dispatcher
from outrider.engine.config import EngineConfig
from outrider.engine.messages import FromEngine, Ready, Shutdown, ToEngine

log = logging.getLogger("outrider.engine.process_engine")

_RESTART_DELAYS_S = (0.0, 2.0)  # after the first and the second death in a row; the third is final
_HEALTHY_S = 60.0  # of being ready end the row
_LEAVE_S = 5.0  # to finish a step and exit when asked; then the process is killed
_SILENCE_MS = 100  # after this long without a message, a dead child has nothing left to say


class ProcessEngine(Dispatcher):
    """An engine in a child process, reached over a ZeroMQ socket in a private directory.

    The directory is gone once the child has connected, so that nothing is left of it whatever
    ends either process. A child that dies is started again, the first time at once; after three
    deaths in a row, or if it never became ready at all, the state is "failed". A child that has
    work and is silent for `step_timeout_s` (None: as long as it likes) is killed and started again.
    """

    _command: tuple[str, ...] = (sys.executable, "-P", "-m", "outrider.engine.process")

    def __init__(
        self,
        config: EngineConfig,
        progress: ReportProgress | None = None,
        *,
        step_timeout_s: float | None = None,
        log_format: Literal["text", "json"] = "text",
    ) -> None:
        super().__init__(progress)
        self._step_timeout_s = step_timeout_s
        self._log_format = log_format
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready_at_s = 0.0
        self._heard_at_s = 0.0

    def _launch(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    def _send(self, message: ToEngine) -> None:
        if self._socket is not None:
            # With no limit on the queue this sends at once; only a dead peer makes it wait, and
            # then closing the socket cancels it.
            self._socket.send(self._encoder.encode(message))

    async def stop(self) -> None:
        was_ready = self.state == "ready"
        self._down("stopped", "the engine was stopped")
        if self._supervisor is not None:
            if was_ready:
                self._send(Shutdown())
                await asyncio.wait({self._supervisor}, timeout=_LEAVE_S)
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        deaths_in_a_row = 0
        while True:
            try:
                cause = await self._run_child()
            except Exception as error:  # it could not be started at all
                cause = f"{type(error).__name__}: {error}"
            if self.state == "stopped":
                return
            if self.info is None:
                self._down("failed", f"the engine could not start: {cause}")
                return
            healthy = self.state == "ready" and time.monotonic() - self._ready_at_s >= _HEALTHY_S
            deaths_in_a_row = 1 if healthy else deaths_in_a_row + 1
            log.error("the engine died: %s", cause)
            if deaths_in_a_row > len(_RESTART_DELAYS_S):
                self._down("failed", f"the engine keeps dying: {cause}")
                return
            self._down("restarting", f"the engine died: {cause}; it is being restarted")
            await asyncio.sleep(_RESTART_DELAYS_S[deaths_in_a_row - 1])

    async def _run_child(self) -> str:
        """Start a child and hear it out to its end; returns what ended it."""
        self._last_words = ""
        directory = tempfile.TemporaryDirectory(prefix="outrider-")
        with directory, self._context.socket(zmq.PAIR) as socket:
            socket.set_hwm(0)
            socket.linger = 0
            endpoint = f"ipc://{directory.name}/engine"
            socket.bind(endpoint)
            child = await asyncio.create_subprocess_exec(
                *self._command,
                endpoint,
                str(log.getEffectiveLevel()),
                self._log_format,
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,  # never closed: its end tells the child of ours
                start_new_session=True,  # signals to our group are for us, who may want to drain
            )
            self._socket = socket
            reader = asyncio.create_task(self._read(socket, directory), name="engine reader")
            watchdog = asyncio.create_task(self._kill_if_hung(child), name="engine watchdog")
            try:
                assert child.stdin is not None
                child.stdin.write(msgspec.json.encode(self._config) + b"\n")
                exit_code = await child.wait()
            finally:
                self._socket = None
                reader.cancel()
                watchdog.cancel()
                if child.returncode is None:
                    child.kill()
                    await child.wait()
            while await socket.poll(_SILENCE_MS):
                self._hear(await socket.recv())
        if watchdog.done() and not watchdog.cancelled():
            return f"no step ended within {self._step_timeout_s:g} s (engine.step_timeout_s)"
        if exit_code < 0:
            return f"killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
        return self._last_words or f"it left with exit code {exit_code}"

    async def _kill_if_hung(self, child: asyncio.subprocess.Process) -> None:
        """Return once the child has been killed for its silence."""
        timeout_s = math.inf if self._step_timeout_s is None else self._step_timeout_s
        while True:
            if self.state != "ready" or not (self._submitted or self._running):
                self._heard_at_s = time.monotonic()  # it owes us nothing
            if time.monotonic() - self._heard_at_s > timeout_s:
                child.kill()
                return
            await asyncio.sleep(min(1.0, timeout_s / 4))

    async def _read(
        self, socket: zmq.asyncio.Socket, directory: tempfile.TemporaryDirectory[str]
    ) -> None:
        first = await socket.recv()
        directory.cleanup()  # both ends hold the connection now; nobody else shall
        self._hear(first)
        while True:
            self._hear(await socket.recv())

    def _hear(self, data: bytes) -> None:
        self._heard_at_s = time.monotonic()
        try:
            message = self._decoder.decode(data)
            if isinstance(message, Ready):
                self._ready_at_s = time.monotonic()
            self._receive(message)
        except Exception:  # one message, or a progress display, must not cost the engine
            log.exception("could not act on a message of the engine (%d bytes)", len(data))


def child_environment() -> dict[str, str]:
    """Ours, and CPU threads that wait briefly before they sleep, unless the user says otherwise.

    OpenMP's threads spin at barriers for milliseconds. On a machine with neighbours the spinning
    thread takes the core from the very thread it waits for (benchmarks/LOG.md: 34 to 1 tokens/s);
    without any spinning every barrier costs a system call (34 to 24).
    """
    environment = dict(os.environ)
    if environment.keys().isdisjoint({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}):
        environment["GOMP_SPINCOUNT"] = "2000"
    return environment
