"""A socket between two processes that carries messages both ways; sending never waits."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

log = logging.getLogger(__name__)

_RECONNECT_MS = 10  # between attempts, until the other process has bound the endpoint

T = TypeVar("T")
ZmqContext = zmq.Context["zmq.Socket[bytes]"]


class Connection(Generic[T]):
    """One end, on an event loop: `hear` is called with each message of the other end, in order."""

    def __init__(
        self,
        context: ZmqContext,
        endpoint: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        hear: Callable[[T], None],
        *,
        binds: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.reconnect_ivl = _RECONNECT_MS
        if binds:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self.hear = hear
        self._unsent: deque[bytes] = deque()
        self._is_due = False  # whether a turn will come
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._turn)

    def send(self, message: object) -> None:
        """Send without waiting. The queue has no limit; what a dead peer has not received is
        dropped when this is closed. Raises OverflowError for a number over 64 bits.
        """
        self._unsent.append(self._encoder.encode(message))
        self._send_all()  # now: the other end may begin while this loop is busy with more
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Handle what has arrived already, and receive nothing more."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket)
            with self._socket:
                self._turn()

    def _send_all(self) -> None:
        with contextlib.suppress(zmq.Again):  # no peer is there yet
            while self._unsent and not self._socket.closed:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()

    def _turn(self) -> None:
        """Send and receive whatever can be.

        The socket's descriptor is edge-triggered, and sending may consume the edge: so a turn comes
        after every send, and receives until there is nothing.
        """
        self._is_due = False
        self._send_all()
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self._act(self._socket.recv(zmq.NOBLOCK))

    def _act(self, data: bytes) -> None:
        try:
            self.hear(self._decoder.decode(data))
        except Exception:  # a bad message must not affect the others
            log.exception("could not act on a message (%d bytes)", len(data))
