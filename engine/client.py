"""The server's handle on an engine: submit sequences, receive their tokens, watch it live."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from outrider.engine.api import EngineInfo, EngineStats, NewRequest, RequestOutput

EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]


class EngineUnavailableError(RuntimeError):
    """The engine is not (or no longer) there: starting, restarting or failed."""


class EngineClient(Protocol):
    """One engine, in this process or in its own."""

    state: EngineState
    info: EngineInfo | None  # set once the engine has been ready
    stats: EngineStats

    async def start(self) -> EngineInfo:
        """Bring the engine up; raises EngineUnavailableError with the engine's own words."""
        ...

    async def generate(self, requests: list[NewRequest]) -> AsyncIterator[RequestOutput]:
        """Submit sequences together; yield their outputs, interleaved, until all have finished.

        Returns once the engine has admitted them. Raises QueueFullError, InvalidRequestError or
        EngineUnavailableError before that, and EngineUnavailableError from the iterator if the
        engine dies under way. Closing the iterator aborts what has not finished.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Stop sequences early; their pages are free within a step. Unknown ids are ignored."""
        ...

    async def stop(self) -> None:
        """Stop the engine and leave nothing of it behind."""
        ...
