"""One client's connection: how long it may keep the server waiting, and how much it may pile up.

Uvicorn's own protocol closes a connection that is idle between two requests. This one also ends
those that never finish the head of a request, that send what is no part of any, or that ask for
answers and do not read them. The server calls `sweep` on each, twice a second.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Longer than clients keep idle connections, so that none is closed under a request of theirs.
KEEP_ALIVE_S = 75
HEAD_TIMEOUT_S = 30  # for a request's first line and headers; its body has a time of its own
MAX_HEAD_BYTES = 65_536  # also of trailers, and of what lies between two parts of a body
HEADER_COST_BYTES = 32  # that each header counts more, as in HTTP/2: small ones cost memory too
MAX_PIPELINED = 16  # requests that wait for the answer to the one before
MIN_READ_BYTES = 16_384  # that a client takes within send_timeout_s if so much waits for it

_BUSY = (
    b'{"error":{"message":"All connections of this server are busy (server.max_connections).",'
    b'"type":"server_error","param":null,"code":"too_many_connections"}}'
)
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


class Connection(HttpToolsProtocol):
    """Uvicorn's, with an end."""

    max_connections = 0  # of one process; 0: any number
    send_timeout_s = 0.0  # in which a client takes MIN_READ_BYTES; 0: any time

    _deadline_s: float | None = None  # for the next head to be whole; None: a request is under way
    _reads_head = False
    _head_bytes = 0  # of the head or the trailers that are being read, as far as they are known
    _stray_bytes = 0  # received since the parser last gave a part of a request
    _running: RequestResponseCycle | None = None
    _unsent_bytes = 0  # when `sweep` last looked
    _taken_bytes = 0  # by the client since then, at least
    _unsent_since_s: float | None = None  # None: all is sent

    # ---- what the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(HEAD_TIMEOUT_S)
        if self.max_connections and len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline_s = None
        # Uvicorn tells the last request that was sent; the one that runs may be another.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._stray_bytes += len(data)
        super().data_received(data)
        if self._stray_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    # ---- what the parser tells

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._head_bytes = self._stray_bytes = 0
        self._await_head(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_COST_BYTES)
        if self._reads_head:  # trailers come too late for anybody to read them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooMuch
        self._deadline_s = None
        self._reads_head = False
        self._head_bytes = self._stray_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._stray_bytes = 0
        super().on_body(body)

    # ---- what uvicorn does next

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline_s is None and self.cycle.response_complete:
            self._await_head(KEEP_ALIVE_S)

    def send_400_response(self, msg: str) -> None:
        running = self._running
        is_due = running is not None and not running.response_complete
        if is_due and (running is not self.cycle or running.response_started):
            self.transport.close()  # another answer comes first, or this one is half sent
            return
        if max(self._head_bytes, self._stray_bytes) > MAX_HEAD_BYTES:
            msg = f"The head of the request exceeds {MAX_HEAD_BYTES} bytes."
        super().send_400_response(msg)

    # ---- what comes to an end

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client is late with a request, or abort it if the client
        does not take what it asked for."""
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self.transport.close()  # which waits for what is still to be sent
        unsent_bytes = self.transport.get_write_buffer_size()
        self._taken_bytes += max(0, self._unsent_bytes - unsent_bytes)
        self._unsent_bytes = unsent_bytes
        if not unsent_bytes:
            self._unsent_since_s = None
        elif self._unsent_since_s is None or self._taken_bytes >= MIN_READ_BYTES:
            self._unsent_since_s, self._taken_bytes = now_s, 0
        elif self.send_timeout_s and now_s - self._unsent_since_s >= self.send_timeout_s:
            self.transport.abort()

    def _make_room(self) -> None:
        """End the connection that waits for a request and is nearest to its deadline; if all have
        requests under way, turn this one away."""
        idle = [
            (other._deadline_s, id(other), other)
            for other in self.connections - {self}
            if isinstance(other, Connection) and other._deadline_s is not None
        ]
        if idle:
            *_, other = min(idle)
            self.connections.discard(other)  # now, as more may come before it is lost
            other.transport.abort()
        else:
            self._deadline_s = None
            self.transport.write(_BUSY_ANSWER)
            self.transport.close()

    def _await_head(self, timeout_s: float) -> None:
        self._deadline_s = self.loop.time() + timeout_s

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooMuch


class _TooMuch(Exception):
    """Stops the parser, wherever in the received bytes it is."""
