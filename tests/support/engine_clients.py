"""Engine clients with the scripted engine behind them, and what tests do with any client."""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from typing import Any, cast

import msgspec
import scripted_engine
from in_process import InProcessEngine

from outrider.engine.api import (
    EngineInfo,
    NewRequest,
    ReportProgress,
    SamplingParams,
    ignore_progress,
)
from outrider.engine.config import EngineConfig, ModelConfig, SchedulerConfig
from outrider.engine.processes.client import EngineClient, OutputStream
from outrider.engine.processes.connection import Connection
from outrider.engine.processes.messages import Up
from outrider.engine.processes.process_engine import ProcessEngine
from outrider.engine.processes.shared_engine import SharedEngine

TIMEOUT_S = 60  # a hang is a failure, not a wait


class ScriptedProcessEngine(ProcessEngine):
    _command = (sys.executable, "-P", scripted_engine.__file__)


def scripted_in_process(
    config: EngineConfig, report: ReportProgress = ignore_progress
) -> InProcessEngine:
    make_engine = cast(Any, scripted_engine.ScriptedEngine)
    return InProcessEngine(config, report, make_engine=make_engine)


class ScriptedSharedEngine(SharedEngine):
    """Shares an engine that somebody else on this event loop owns."""

    def __init__(self, config: EngineConfig, report: ReportProgress = ignore_progress) -> None:
        self.owner = ScriptedProcessEngine(config, report, is_shared=True)
        self._directory = tempfile.TemporaryDirectory()
        super().__init__(f"ipc://{self._directory.name}/socket", on_shutdown=lambda: None)
        self._to_sharer: Connection[Up] | None = None

    async def start(self) -> EngineInfo:
        decoder = msgspec.msgpack.Decoder(Up)
        self._to_sharer = Connection(self._context, self._endpoint, decoder, lambda message: None)
        self.owner.on_change = self.report
        starting = asyncio.create_task(self.owner.start())
        try:
            return await super().start()
        finally:
            await asyncio.wait({starting})
            starting.exception()

    def report(self) -> None:
        assert self._to_sharer is not None
        self._to_sharer.send(self.owner.status)

    async def stop(self) -> None:
        if self._to_sharer is not None:
            self.owner.on_change = lambda: None
            self._to_sharer.close()
            self._to_sharer = None
        await super().stop()
        await self.owner.stop()
        self._directory.cleanup()


def scripted_config(path: str = "model") -> EngineConfig:
    return EngineConfig(target=ModelConfig(path=path), scheduler=SchedulerConfig(max_queue_len=4))


def scripted_request(
    request_id: str, *, max_tokens: int = 3, script: str | None = None
) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=[scripted_engine.SCRIPT[script] if script else 0, 9],
        params=SamplingParams(max_tokens=max_tokens),
    )


async def collect(stream: OutputStream) -> dict[str, list[int]]:
    """Token ids by request id, once all sequences have finished."""
    tokens: dict[str, list[int]] = {}
    async with asyncio.timeout(TIMEOUT_S):
        async for output in stream:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


async def becomes_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def state_becomes(client: EngineClient, state: str) -> None:
    await becomes_true(lambda: client.state == state)


async def pages_used_become(client: EngineClient, expected: int) -> None:
    await becomes_true(lambda: client.stats.pages_used == expected)
