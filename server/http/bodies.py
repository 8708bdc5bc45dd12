"""The bodies of requests: how large each may be, and all that are held at a time together.

What JSON takes in memory is counted before it is read: as lists and objects it may take 200 times
its bytes. A request holds this much of the server's budget until its answer needs less.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import APIError, queue_full

# Bytes of memory at most, for each such sign, as measured: of an object with the model that is made
# of it, of a list, and of a value in either. Signs within texts count: a text may be JSON, too.
OBJECT_BYTES = 1024
LIST_BYTES = 96
VALUE_BYTES = 72
# What a body may take in memory, in multiples of server.max_body_bytes. No prompt needs as much:
# the densest are ids of tokens, of which a body of 4 MB may have 900,000.
MAX_GROWTH = 16


def memory_of(json: bytes) -> int:
    """The most memory that this JSON takes once it is read, in bytes."""
    text = len(json) * (1 if json.isascii() else 4)  # one such character widens the whole text
    values = json.count(b",") + json.count(b":")
    objects, lists = json.count(b"{"), json.count(b"[")
    return len(json) + text + values * VALUE_BYTES + objects * OBJECT_BYTES + lists * LIST_BYTES


def json_bytes(request: HTTPConnection) -> int:
    """How many bytes of JSON were read for a request: about as long is the work for it."""
    num_bytes: int = request.state.held.json_bytes
    return num_bytes


class Held:
    """What one request holds of the budget; `request.state.held`."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._bytes = 0
        self.json_bytes = 0  # of JSON that was read for the request

    def hold(self, num_bytes: int) -> None:
        """From now on it holds so many; raises APIError if there is no room."""
        if num_bytes > self._bodies.max_bytes:
            raise self._bodies.too_dense(num_bytes)
        self._bodies.take(num_bytes - self._bytes)
        self._bytes = num_bytes

    def pass_on(self) -> "Held":
        """What it holds, for work that goes on after the request; it holds nothing any more."""
        other = Held(self._bodies)
        other._bytes, self._bytes = self._bytes, 0
        return other

    def arrived(self, num_bytes: int) -> None:
        """More bytes of the body have come; raises APIError."""
        self.hold(self._bytes + num_bytes)

    def read(self, json: bytes) -> None:
        """This JSON is about to be read; raises APIError. What came of the body is a part of it."""
        num_bytes = memory_of(json)
        if num_bytes > self._bodies.max_bytes_each:
            raise self._bodies.too_dense(num_bytes)
        self.hold(num_bytes if not self.json_bytes else self._bytes + num_bytes)
        self.json_bytes += len(json)

    def keep(self, num_bytes: int, *, body: bool) -> None:
        """The answer needs no more than so many, and, if so, the body; raises APIError."""
        self.hold(num_bytes + body * self._bytes)


class Bodies:
    """Refuse bodies above a size, by their declared length or while reading them, bodies that do
    not arrive in time, and those for which there is no room beside the others."""

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, max_bytes: int, timeout_s: float | None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self.max_bytes = max_bytes
        self._timeout_s = timeout_s
        self.max_bytes_each = min(max_bytes, MAX_GROWTH * max_body_bytes)
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take so many bytes of the budget, or give them back; raises APIError if it has not as
        many."""
        if num_bytes > 0 and self.held_bytes + num_bytes > self.max_bytes:
            raise queue_full(
                "The requests that are being answered take all the memory that this server gives "
                f"them, {self.max_bytes:,} bytes (server.max_bodies_bytes). Try again."
            )
        self.held_bytes += num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await self._too_large().response(scope)(scope, receive, send)
            return
        read_bytes, more = 0, True
        held = scope["state"]["held"] = Held(self)
        deadline_s = None
        if self._timeout_s is not None:
            deadline_s = asyncio.get_running_loop().time() + self._timeout_s

        async def receive_counting() -> Message:
            nonlocal read_bytes, more
            if not more:
                return await receive()  # after the body comes only the client's disconnect
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            if message["type"] == "http.disconnect":
                scope["state"]["outcome"] = "disconnected"
            part_bytes = len(message.get("body", b""))
            read_bytes += part_bytes
            more = message.get("more_body", False)
            if read_bytes > self._max_body_bytes:
                raise self._too_large()
            held.arrived(part_bytes)
            return message

        try:
            await self._app(scope, receive_counting, send)
        finally:
            held.hold(0)

    def too_dense(self, num_bytes: int) -> APIError:
        return APIError(
            413,
            f"The JSON of this request may take {num_bytes:,} bytes of memory, for its lists, "
            f"objects and numbers; this server gives a request at most {self.max_bytes_each:,} "
            "(server.max_body_bytes, server.max_bodies_bytes). Send fewer.",
            code="body_too_large",
        )

    def _too_slow(self) -> APIError:
        return APIError(
            408,
            f"The request body did not arrive within {self._timeout_s:g} s, the most that this "
            "server waits for it (server.body_timeout_s).",
            code="body_timeout",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"The request body is larger than {self._max_body_bytes} bytes, the most this server "
            "takes (server.max_body_bytes).",
            code="body_too_large",
            headers={"Connection": "close"},
        )
