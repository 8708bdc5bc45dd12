"""Calls an ASGI application as a server would, with the client's leaving under control."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(slots=True)
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        return [line.removeprefix("data: ") for line in lines]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The events of a stream, whose names are their types."""
        found = []
        for event in self.body.decode().split("\n\n")[:-1]:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream that ended well, without its `[DONE]`."""
        *chunks, done = self.events
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


class Call:
    """One request under way. Await `finished`, or `leave` before."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: Sequence[bytes] = (),
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> None:
        self.reply = Reply()
        self.unread = list(body)
        self._left = asyncio.Event()
        self._progress = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.finished = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def until_body(self) -> None:
        """Wait for the first bytes of the answer's body."""
        while not self.reply.body:
            self._progress.clear()
            await self._progress.wait()

    async def _receive(self) -> Message:
        if self.unread:
            part = self.unread.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.unread)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")
            self.reply.ended = not message.get("more_body", False)
        self._progress.set()


def start_post(
    app: ASGIApp, body: object, headers: Mapping[str, str] | None = None, *, path: str
) -> Call:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "content-length": str(len(raw))}
    return Call(app, "POST", path, [raw], sent | dict(headers or {}))


def post(
    app: ASGIApp,
    body: object,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/completions",
) -> Reply:
    """Post a JSON body (bytes go out as they are) and wait for the whole answer."""

    async def run() -> Reply:
        call = start_post(app, body, headers, path=path)
        await call.finished
        return call.reply

    return asyncio.run(run())


def get(app: ASGIApp, path: str, headers: Mapping[str, str] | None = None) -> Reply:
    async def run() -> Reply:
        plain, _, query = path.partition("?")
        call = Call(app, "GET", plain, [b""], headers, query)
        await call.finished
        return call.reply

    return asyncio.run(run())
