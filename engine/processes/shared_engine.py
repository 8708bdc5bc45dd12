"""An engine that several processes share: all but its owner reach it through this."""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from .client import EngineClient
from .connection import Connection
from .messages import EngineStatus, FromEngine, FromOwner, Hello, Ready, Shutdown, Up


class SharedEngine(EngineClient):
    """An engine that the parent of this process owns. The parent sends its state and endpoint; all
    else goes directly to the engine. Only the owner can stop it.

    `endpoint`: where the parent connects to; `on_shutdown` is called when this process must leave.
    """

    def __init__(self, endpoint: str, on_shutdown: Callable[[], None]) -> None:
        super().__init__()
        self.has_heard = asyncio.Event()  # set once the engine's state is known
        self._endpoint = endpoint
        self._on_shutdown = on_shutdown
        self._context = zmq.Context()
        self._owner: Connection[FromOwner] | None = None

    def _launch(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromOwner)
        self._owner = Connection(self._context, self._endpoint, decoder, self._hear, binds=True)

    def report_up(self) -> None:
        """Report to the owner that this process is ready."""
        if self._owner is not None:
            self._owner.send(Up())

    async def stop(self) -> None:
        """End all streams here; the engine drops the sequences when it cannot send to us."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None
        self._leave_engine()
        self._down("stopped", "the engine was stopped")
        self._context.destroy(linger=0)

    def _leave_engine(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _hear(self, message: FromOwner) -> None:
        match message:
            case Shutdown():
                self._on_shutdown()
            case EngineStatus(state, reason, info, endpoint, past_stats):
                self._leave_engine()
                if info is not None and endpoint is not None:
                    decoder = msgspec.msgpack.Decoder(FromEngine)
                    self._connection = Connection(self._context, endpoint, decoder, self._receive)
                    self._connection.send(Hello())
                    self._receive(Ready(info))
                elif state != "starting":
                    self._down(state, reason or state)
                self._past_stats = past_stats
                self.has_heard.set()
