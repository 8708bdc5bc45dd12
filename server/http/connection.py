"""One client's connection: limits how long it may stall and how much data it may pile up.

Uvicorn's own protocol closes connections that are idle between two requests. This one also ends
connections that never finish the head of a request, that send bytes which belong to no request, or
that do not read their answers. The server calls `sweep` on each connection twice a second.

A client that offers another protocol (`Upgrade: h2c`) is answered in HTTP/1.1, as one that did not.
"""

import asyncio
import math
import urllib.parse
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider.kernels.reached import check_reached

from ..base.errors import path_within

check_reached(
    "uvicorn",
    HttpToolsProtocol,
    *("connections", "cycle", "expect_100_continue", "headers", "logger", "loop", "parser"),
    *("pipeline", "scope", "transport"),
    *("_should_upgrade", "_start_asgi_task", "_unset_keepalive_if_required"),
    *("on_message_complete", "on_response_complete", "send_400_response"),
)
check_reached(
    "uvicorn",
    RequestResponseCycle,
    *("chunked_encoding", "disconnected", "expected_content_length", "keep_alive"),
    *("message_event", "response_complete", "response_started", "scope"),
)

# Longer than clients keep idle connections, so that none is closed under a request of theirs.
KEEP_ALIVE_S = 75
HEAD_TIMEOUT_S = 30  # for a request's first line and headers; its body has its own timeout
MAX_HEAD_BYTES = 65_536  # also for trailers, and for the bytes between two chunks of a body
HEADER_COST_BYTES = 32  # added for each header, as in HTTP/2: small ones take memory too
MAX_PIPELINED = 16  # requests that wait until the one before is answered
MIN_READ_BYTES = 16_384  # a client must read this much within send_timeout_s, if so much is due

_BUSY = (
    b'{"error":{"message":"All connections of this server are busy (server.max_connections).",'
    b'"type":"server_error","param":null,"code":"too_many_connections"}}'
)
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nretry-after: 1\r\nconnection: close\r\n\r\n%s" % (len(_BUSY), _BUSY)
)


class Unsent:
    """How much of their answers all clients of this process have yet to read."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class HttpConnection(HttpToolsProtocol):
    """Uvicorn's protocol, with limits."""

    unsent = Unsent(2**63)  # of all connections
    max_connections = 0  # of one process; 0: no limit
    send_timeout_s = 0.0  # time for a client to read MIN_READ_BYTES; 0: no limit
    prefix = ""  # the path under which a proxy shows this server

    _is_one_too_many = False  # it may only ask whether the server lives
    _deadline_s: float | None = None  # for the next head; None: a request is being answered
    _reads_head = False
    _head_bytes = 0  # received of the head or trailers that are being read
    _stray_bytes = 0  # received since the parser last found a part of a request
    _running: RequestResponseCycle | None = None
    _unsent_bytes = 0  # when it was last looked at; a part of `unsent`
    _taken_bytes = 0  # read by the client since then, at least
    _unsent_since_s: float | None = None  # None: everything is sent

    # ---- called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(HEAD_TIMEOUT_S)
        if self.max_connections and len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline_s = None
        # Uvicorn disconnects the newest request; the one that runs may be another.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._note_unsent(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._stray_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        if self._stray_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the head again without the offer: the parser has taken what follows it for bytes of
        the other protocol.
        """
        version = self.scope["http_version"].encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        head += (b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)  # the old one may be past its last request
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"".join([*head, b"\r\n", rest]))

    # ---- called by the parser

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
        if self._reads_head:  # trailers come too late to be read by anybody
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED or self.parser.get_method() == b"CONNECT":
            raise _Refused
        self._deadline_s = None
        self._reads_head = False
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        self._head_bytes = self._stray_bytes = 0
        if self.transport.is_closing():
            return
        is_busy = self._is_one_too_many and len(self.connections) > self.max_connections
        if is_busy and not self._asks_for_life():
            self.transport.write(_BUSY_ANSWER)
            self.transport.close()
            return
        super().on_headers_complete()
        if is_busy:
            self.cycle.keep_alive = False

    def _asks_for_life(self) -> bool:
        """Whether the request is for /live, by the path by which it is routed, and whole."""
        path = urllib.parse.unquote(httptools.parse_url(self.url).path.decode("ascii"))
        return (
            self.parser.get_method() in (b"GET", b"HEAD")
            and path_within(path, self.prefix) == "/live"
            and not any(_announces_a_body(*header) for header in self.headers)
        )

    def on_body(self, body: bytes) -> None:
        self._stray_bytes = 0
        if not self.transport.is_closing():  # else this request was refused, and has no cycle
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    # ---- called by uvicorn

    def _should_upgrade(self) -> bool:
        return True  # so that it leaves such a request to `data_received`

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle

        async def run(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, self._sending(cycle, send))

        super()._start_asgi_task(cycle, run)

    def _sending(self, cycle: RequestResponseCycle, send: Send) -> Send:
        """Send an answer. To a client of HTTP/1.0, which knows no chunks, an answer of unknown
        length ends with the connection.
        """
        ends_with_connection = False

        async def send_framed(message: Message) -> None:
            nonlocal ends_with_connection
            if message["type"] == "http.response.start" and cycle.scope["http_version"] == "1.0":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if b"content-length" not in names:
                    ends_with_connection = True
                    cycle.chunked_encoding = False
            elif ends_with_connection:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)
            self._note_unsent(self.transport.get_write_buffer_size())
            if self.unsent.num_bytes > self.unsent.max_bytes:
                self._close_the_slowest()

        return send_framed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline_s is None and self.cycle.response_complete:
            self._await_head(KEEP_ALIVE_S)

    def send_400_response(self, msg: str) -> None:
        running = self._running
        is_due = running is not None and not running.response_complete
        if is_due and (running is not self.cycle or running.response_started):
            self.transport.close()  # another answer goes first, or this one is half sent
            return
        if max(self._head_bytes, self._stray_bytes) > MAX_HEAD_BYTES:
            msg = f"The head of the request exceeds {MAX_HEAD_BYTES} bytes."
        super().send_400_response(msg)

    # ---- limits

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client is late with a request, or abort it if the client
        does not read its answer.
        """
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self.transport.close()  # sends what is left first
        self._note_unsent(self.transport.get_write_buffer_size())
        if not self._unsent_bytes:
            self._unsent_since_s = None
        elif self._unsent_since_s is None or self._taken_bytes >= MIN_READ_BYTES:
            self._unsent_since_s, self._taken_bytes = now_s, 0
        elif self.send_timeout_s and now_s - self._unsent_since_s >= self.send_timeout_s:
            self.transport.abort()

    def _note_unsent(self, num_bytes: int) -> None:
        grown_bytes = num_bytes - self._unsent_bytes
        self._taken_bytes += max(0, -grown_bytes)
        self._unsent_bytes = num_bytes
        self.unsent.num_bytes += grown_bytes

    def _close_the_slowest(self) -> None:
        """Abort those that have not read MIN_READ_BYTES for the longest, and of such as are equal
        those that have the most to read, until the rest is within the budget. One may be beyond it
        alone: answers have a limit of their own.
        """
        late: list[HttpConnection] = []
        for other in self.connections:
            assert isinstance(other, HttpConnection)
            other._note_unsent(other.transport.get_write_buffer_size())
            if other._unsent_bytes:
                late.append(other)
        late.sort(key=lambda each: (-(each._unsent_since_s or math.inf), each._unsent_bytes))
        while len(late) > 1 and self.unsent.num_bytes > self.unsent.max_bytes:
            slowest = late.pop()
            slowest.transport.abort()
            slowest._note_unsent(0)

    def _make_room(self) -> None:
        """Close the idle connection that is nearest to its deadline. If all are busy, this one is
        refused once its head is there: a probe for liveness must not find a busy server dead.
        """
        idle = [
            (other._deadline_s, id(other), other)
            for other in self.connections - {self}
            if isinstance(other, HttpConnection) and other._deadline_s is not None
        ]
        if idle:
            *_, other = min(idle)
            self.connections.discard(other)  # now: more may arrive before it is closed
            other.transport.abort()
        else:
            self._is_one_too_many = True

    def _await_head(self, timeout_s: float) -> None:
        self._deadline_s = self.loop.time() + timeout_s

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _Refused


def _announces_a_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")


class _Refused(Exception):
    """Stops the parser in the middle of the received bytes."""
