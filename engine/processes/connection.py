"""A socket between two processes that carries messages both ways; sending never waits."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

log = logging.getLogger("outrider.engine.processes.connection")

_RECONNECT_MS = 10  # between attempts, until the other process has bound the endpoint

T = TypeVar("T")


class Connection(Generic[T]):
    """One end, on an event loop: `hear` is called with each message of the other end, in order."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        hear: Callable[[T], None],
        *,
        binds: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.reconnect_ivl = _RECONNECT_MS
        if binds:
            self.socket.bind(endpoint)
        else:
            self.socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self.hear = hear
        self._reader = asyncio.create_task(self._read(), name=f"reader of {endpoint}")

    def send(self, message: object) -> None:
        """Send without waiting. The queue has no limit, so only a dead peer could make this wait,
        and closing the socket then cancels it. Raises OverflowError for a number over 64 bits.
        """
        data = self._encoder.encode(message)
        if not self.socket.closed:
            self.socket.send(data)

    def close(self) -> None:
        """Handle what has arrived already, and receive nothing more."""
        self._reader.cancel()
        arrived: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket)
        with self.socket, contextlib.suppress(zmq.Again):
            while True:
                self._act(arrived.recv(zmq.NOBLOCK))

    async def _read(self) -> None:
        while True:
            self._act(await self.socket.recv())

    def _act(self, data: bytes) -> None:
        try:
            self.hear(self._decoder.decode(data))
        except Exception:  # a bad message must not affect the others
            log.exception("could not act on a message (%d bytes)", len(data))
