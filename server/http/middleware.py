"""Wrapped around every request: its id, its outcome, the drain, the limit of its body.

Plain ASGI, because Starlette's BaseHTTPMiddleware would hide disconnects from the routes. Only HTTP
gets here.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import APIError, cut, path_within, route_path, unavailable
from ..observe.metrics import Metrics
from ..observe.tracing import Trace

log = logging.getLogger("outrider.server.requests")

LINGER_S = 1.0
LINGER_BYTES = 4 * 1024 * 1024
MAX_LOGGED_REASON_CHARS = 500

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RootPath:
    """Give every request's path the prefix under which a proxy shows this server, and take a slash
    at its end away.

    Requests come with the prefix or without. Afterwards ASGI's `path` has it. `errors.route_path`
    is the path without it, and only by that are requests routed and judged.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._prefix = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer = scope.get("root_path", "")  # Ray's prefix
        path = path_within(scope["path"], outer, self._prefix)
        root_path = outer + self._prefix
        scope = {**scope, "root_path": root_path, "path": root_path + path}
        await self._app(scope, receive, send)


class RequestId:
    """Give every answer an `x-request-id`: the client's own if it is printable, else a new one.

    And `x-unknown-fields` to an answer whose request had any.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if unknown := scope["state"].get("unknown_fields"):
                    headers["x-unknown-fields"] = ", ".join(unknown)
            await send(message)

        await self._app(scope, receive, send_with_id)


class Observe:
    """Count each API request by its outcome, time it, log it, and trace it.

    A route whose outcome differs from its status sets `outcome` in the scope's state. A route that
    generates sets `facts`, which is called at the end for the contents of the log line. An error
    leaves its `reason` there.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, paths: Collection[str], trace: Trace | None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._trace = trace
        self._paths = paths  # one label each; others share one: clients can invent any number

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        # Routers poll /v1/loads every few seconds: do not count or log that.
        if not path.startswith("/v1/") or path == "/v1/loads":
            await self._app(scope, receive, send)
            return
        status = 500
        start_s = time.perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            duration_s = time.perf_counter() - start_s
            outcome = scope["state"].get("outcome") or _outcome(status)
            label = path if path in self._paths else "other"
            self._metrics.requests.labels(label, outcome).inc()
            if outcome == "ok":
                self._metrics.request_time.labels(label).observe(duration_s)
            facts = {
                "request_id": scope["state"]["request_id"],
                "method": scope["method"],
                "path": cut(scope["raw_path"].decode("latin-1")),  # still quoted: %0a stays %0a
                "status": status,
                "outcome": outcome,
                "duration_s": round(duration_s, 6),
            }
            if reason := scope["state"].get("reason"):
                facts["reason"] = cut(reason, MAX_LOGGED_REASON_CHARS)
            if facts_of := scope["state"].get("facts"):
                facts |= facts_of()
                self._metrics.observe(facts)
            log.info(access_line(facts), extra={"facts": facts})
            if self._trace is not None:
                self._trace(scope, facts)


class Gate:
    """Open while the server takes requests; counts those being answered."""

    def __init__(self) -> None:
        self.open = True
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._under_way += 1
        self._idle.clear()

    def __exit__(self, *exception: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait for the requests being answered; returns whether the last one ended in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()


class Drain:
    """Turn new requests away with 503 once the gate is closed."""

    always_open = ("/health", "/live", "/ready", "/metrics")

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) in self.always_open:
            await self._app(scope, receive, send)
        elif self._gate.open:
            with self._gate:
                await self._app(scope, receive, send)
        else:
            error = unavailable("The server is shutting down.", code="shutting_down")
            await error.response(scope)(scope, receive, send)


class MetricsPort:
    """On this port, serve /metrics without a key, and nothing else."""

    def __init__(self, app: ASGIApp, api: ASGIApp, port: int) -> None:
        self._app = app
        self._api = api  # the application that `app` guards
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The port of the socket that took the connection, not one that a client names.
        server = scope.get("server")
        if not server or server[1] != self._port:
            await self._app(scope, receive, send)
        elif route_path(scope) == "/metrics":
            await self._api(scope, receive, send)
        else:
            error = APIError(404, "Only /metrics is served on this port.", code="not_found")
            await error.response(scope)(scope, receive, send)


class EarlyAnswer:
    """Close the connection after an answer that is sent before the whole request has arrived.

    For a moment, the rest of the request is read and dropped. Many clients read the answer only
    after they have sent everything, and closing a socket with unread bytes can destroy the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        whole = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        early = False

        async def receive_noting() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)  # also if the client disconnects
            return message

        async def drop_rest(timeout_s: float) -> None:
            dropped_bytes = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not whole and dropped_bytes < LINGER_BYTES:
                        dropped_bytes += len((await receive_noting()).get("body", b""))

        async def send_closing(message: Message) -> None:
            nonlocal early
            if message["type"] == "http.response.start" and not whole:
                if "expect" not in headers:  # otherwise the client waits before it sends its body
                    await drop_rest(0)  # only what has arrived already
                early = not whole
                if early:
                    MutableHeaders(scope=message)["connection"] = "close"
            elif early and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await drop_rest(LINGER_S)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_noting, send_closing)


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "unavailable"
    return "invalid" if status < 500 else "error"


def access_line(facts: Mapping[str, Any]) -> str:
    """A request for people to read: its path and its numbers, never its text."""
    parts = [
        f"{facts['method']} {facts['path']} {facts['status']} {facts['outcome']} "
        f"in {facts['duration_s']:.3f} s"
    ]
    if "completion_tokens" in facts:
        cached = f" ({facts['cached_tokens']} cached)" if facts["cached_tokens"] else ""
        parts.append(f"{facts['prompt_tokens']}{cached} + {facts['completion_tokens']} tokens")
    if "first_token_s" in facts:
        parts.append(f"the first after {facts['first_token_s']:.3f} s")
    if facts.get("draft_tokens"):
        parts.append(f"{facts['accepted_tokens']} of {facts['draft_tokens']} drafts accepted")
    line = ", ".join([*parts, str(facts["request_id"])])
    return f"{line}: {facts['reason']}" if "reason" in facts else line
