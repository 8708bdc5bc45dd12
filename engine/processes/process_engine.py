"""An engine in a process of its own: started, watched, restarted and stopped from here."""

import asyncio
import logging
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import zmq

from ..api import ReportProgress, ignore_progress
from ..config import EngineConfig
from ..lifeline import describe_exit
from .child_process import ChildProcess, Restarts
from .client import EngineClient
from .messages import EngineStatus, FromEngine, Hello, Loading, Ready, Shutdown

log = logging.getLogger(__name__)

_LEAVE_S = 5.0  # time to finish a step and exit; then the process is killed
_STANDSTILL_S = 180.0  # without news of a start; then, and as often again, the log says so


class ProcessEngine(EngineClient):
    """An engine in a child process, which imports its libraries even before its config is known.

    A child that dies is started again, the first time at once. After three deaths in a row, or if
    it never became ready, the state is "failed". A child is asked now and then how it is. If it
    does not answer for `step_timeout_s` (0: no limit), it is killed and started again; a start has
    no limit. If it `is_shared`, other processes can reach it too, at the endpoint in `status`.
    """

    _command: tuple[str, ...] = (sys.executable, "-P", "-m", "outrider.engine.processes.process")

    def __init__(
        self,
        config: EngineConfig | Callable[[], Awaitable[EngineConfig]],
        report: ReportProgress = ignore_progress,
        *,
        step_timeout_s: float = 0.0,
        log_format: Literal["text", "json"] = "text",
        is_shared: bool = False,
    ) -> None:
        super().__init__(report)
        self._step_timeout_s = step_timeout_s or None
        self._log_format = log_format
        self._is_shared = is_shared
        self._config = config
        self._context = zmq.Context()
        self._supervisor: asyncio.Task[None] | None = None
        self._ready_at_s = 0.0
        self._died_at_s: float | None = None  # None: it never died
        self._heard = asyncio.Event()  # set by each message
        self._stage: str | None = None  # of a start; None: its config is not known yet

    @property
    def status(self) -> EngineStatus:
        """What the processes that share the engine must know."""
        connection = self._connection if self.state == "ready" else None
        endpoint = None if connection is None else connection.endpoint
        return EngineStatus(self.state, self.status_reason, self.info, endpoint, self._past_stats)

    def _launch(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def ended(self) -> None:
        """Wait until it is stopped or failed. Only after `start`."""
        assert self._supervisor is not None
        await asyncio.wait({self._supervisor})

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
        restarts = Restarts()
        while True:
            try:
                cause = await self._run_child()
            except Exception as error:  # the process could not be started
                cause = f"{type(error).__name__}: {error}"
            if self.state == "stopped":
                return
            if self.info is None:
                self._down("failed", f"the engine could not start: {cause}")
                return
            ready_s = time.monotonic() - self._ready_at_s if self.state == "ready" else 0.0
            delay_s = restarts.delay_s(ready_s)
            log.error("the engine died: %s", cause)
            self._died_at_s = time.monotonic()
            if delay_s is None:
                self._down("failed", f"the engine keeps dying: {cause}")
                return
            self._down("restarting", f"the engine died: {cause}; it is being restarted")
            await asyncio.sleep(delay_s)

    async def _run_child(self) -> str:
        """Start a child and handle its messages until it ends; returns the reason why it ended."""
        self._last_words = ""
        child = ChildProcess(
            self._context,
            (*self._command, str(log.getEffectiveLevel()), self._log_format),
            line=self._config_line,
            decoder=msgspec.msgpack.Decoder(FromEngine),
            hear=self._hear,
            environment=child_environment(),
            is_shared=self._is_shared,
        )
        self._connection = child.connection
        self._send(Hello())
        self._stage = None
        watchdog = asyncio.create_task(self._kill_if_hung(child), name="engine watchdog")
        standstill = asyncio.create_task(self._log_standstill(), name="engine standstill")
        try:
            exit_code = await child.run()
        finally:
            self._connection = None
            watchdog.cancel()
            standstill.cancel()
        if watchdog.done() and not watchdog.cancelled():
            return f"no step ended within {self._step_timeout_s:g} s (engine.step_timeout_s)"
        last_words = self._last_words or child.last_words
        if last_words and exit_code >= 0:
            return last_words
        return describe_exit(exit_code)

    async def _config_line(self) -> bytes:
        if not isinstance(self._config, EngineConfig):
            self._config = await self._config()
        self._stage = "importing libraries"
        self._heard.set()
        return msgspec.json.encode(self._config)

    async def _kill_if_hung(self, child: ChildProcess[FromEngine]) -> None:
        """Ping the child now and then; returns after it was killed because it did not answer."""
        interval_s = (self._step_timeout_s or math.inf) / 10
        while True:
            await asyncio.sleep(interval_s)
            if self.state != "ready":
                continue
            self._heard.clear()
            self._send(Hello())
            try:
                await asyncio.wait_for(self._heard.wait(), self._step_timeout_s)
            except TimeoutError:
                child.kill()
                return

    async def _log_standstill(self) -> None:
        """Say what a start is at whenever it has come no further for long."""
        silence_s = 0.0
        while self.state != "ready":
            self._heard.clear()
            try:
                await asyncio.wait_for(self._heard.wait(), _STANDSTILL_S)
                silence_s = 0.0
            except TimeoutError:
                silence_s += _STANDSTILL_S
                if self._stage is not None:
                    log.warning(
                        "the start has come no further for %.0f minutes, at: %s. If it reads files "
                        "there, look whether their disk or network answers",
                        silence_s / 60,
                        self._stage,
                    )

    def _hear(self, message: FromEngine) -> None:
        self._heard.set()
        if isinstance(message, Loading):
            count = f" ({message.done} of {message.total})" if message.total > 1 else ""
            self._stage = f"{message.stage}{count}"
        if isinstance(message, Ready):
            self._ready_at_s = time.monotonic()
            if self._died_at_s is not None:
                gone_s = self._ready_at_s - self._died_at_s
                log.info("the engine is ready again, %.1f s after it died", gone_s)
        self._receive(message)


def child_environment() -> dict[str, str]:
    """Our environment; unless the user set it, CPU threads spin while they wait for each other.

    A thread that sleeps at a barrier must be woken by a system call (38 instead of 56 tokens/s).
    Next to another busy process spinning is worse, but then `CPUShare` uses a single thread
    (benchmarks/log/cpu.md).
    """
    environment = dict(os.environ)
    if environment.keys().isdisjoint({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}):
        environment["GOMP_SPINCOUNT"] = "20000"
    return environment
