"""A real engine on a thread of this process, behind the interface of one in its own."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from outrider.engine.api import ReportProgress, ignore_progress
from outrider.engine.config import EngineConfig
from outrider.engine.processes.client import EngineClient
from outrider.engine.processes.messages import FromEngine, Hello, Shutdown, ToEngine
from outrider.engine.processes.process import MakeEngine, load_libraries, run


class QueueChannel:
    """The channel to the only client, which is on the event loop of this process."""

    def __init__(self, deliver: Callable[[FromEngine], object]) -> None:
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._deliver = deliver

    def send(self, client: bytes, message: FromEngine) -> bool:
        self._deliver(message)
        return True

    def is_quiet(self, wait_s: float) -> bool:
        end_s = time.perf_counter() + wait_s
        while self.inbox.empty() and time.perf_counter() < end_s:
            time.sleep(0.001)
        return self.inbox.empty()

    def receive(self, wait_s: float | None) -> list[tuple[bytes, ToEngine]]:
        messages = [(b"", self.inbox.get())] if wait_s is None else []
        end_s = time.perf_counter() + (wait_s or 0.0)
        while True:
            left_s = max(0.0, end_s - time.perf_counter())
            try:
                messages.append((b"", self.inbox.get(left_s > 0, left_s)))
            except queue.Empty:
                return messages


class InProcessEngine(EngineClient):
    """An engine on a thread. If it dies, the state becomes "failed"; it is not restarted."""

    def __init__(
        self,
        config: EngineConfig,
        report: ReportProgress = ignore_progress,
        *,
        make_engine: MakeEngine | None = None,
    ) -> None:
        super().__init__(report)
        self._config = config
        self._make_engine = make_engine or load_libraries()  # it imports torch
        self._channel: QueueChannel | None = None
        self._thread: threading.Thread | None = None

    def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        channel = QueueChannel(lambda message: loop.call_soon_threadsafe(self._receive, message))

        def live() -> None:
            if not run(self._make_engine, self._config, channel):
                loop.call_soon_threadsafe(self._give_up)

        self._channel = channel
        self._send(Hello())
        self._thread = threading.Thread(target=live, name="engine", daemon=True)
        self._thread.start()

    def _give_up(self) -> None:
        if self.state != "stopped":
            what = "could not start" if self.info is None else "died"
            self._down("failed", f"the engine {what}: {self._last_words}")

    def _send(self, message: ToEngine) -> None:
        if self._channel is not None:
            self._channel.inbox.put(message)

    async def stop(self) -> None:
        self._down("stopped", "the engine was stopped")
        self._send(Shutdown())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
