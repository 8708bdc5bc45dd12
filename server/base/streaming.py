"""Work that stops when its client disconnects: awaited as a whole, or sent as events."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import APIError, from_exception

log = logging.getLogger(__name__)

T = TypeVar("T")

# Agents give up a stream that is silent for minutes, proxies after one.
SILENCE_S = 10.0
COMMENT = ": the server is at work\n\n"  # clients pass over it

OBFUSCATION_BLOCK_BYTES = 256  # sizes of obfuscated events are multiples of this

# Many clients split a stream into lines as `str.splitlines` does, which breaks at these, too. In
# JSON they stand inside of strings only; all other line breaks are always escaped there.
_LINE_BREAKS = {each: f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await the work; if the client disconnects first, cancel it and raise ClientDisconnect.

    The body of the request must have been read already.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and not task.uncancel():  # nobody else cancelled it, too
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


def server_sent(data: str, name: str | None = None) -> str:
    """One event as it is sent. The data must be JSON or ASCII without line breaks."""
    if not data.isascii():
        for line_break, escaped in _LINE_BREAKS.items():  # `translate` takes 80 times as long
            data = data.replace(line_break, escaped)
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def obfuscation(event: str) -> str:
    """Text that makes events about the same size, which hides how many tokens a step brought.

    It is random, since compression would remove equal characters.
    """
    num_chars = -len(event.encode()) % OBFUSCATION_BLOCK_BYTES
    return secrets.token_hex(num_chars // 2 + 1)[:num_chars]


class EventStream(Response):
    """Server-sent events; `sign` is sent whenever there has been none for SILENCE_S.

    If the work fails, `failed` makes the last event; so an event that reports success must be one
    of `events`. `close` is always awaited at the end, even if the client disconnects before the
    first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        close: Callable[[], Awaitable[None]],
        *,
        failed: Callable[[APIError], Awaitable[str]],
        sign: str = COMMENT,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._failed = failed
        self._sign = sign

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, send))
        except ClientDisconnect:
            scope["state"]["outcome"] = "disconnected"
        finally:
            await self._close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sent_s = loop.time()

        async def send_event(event: str) -> None:
            nonlocal sent_s
            sent_s = loop.time()
            message = {"type": "http.response.body", "body": event.encode(), "more_body": True}
            await send(message)

        # A task beside the events: a timer for each would cost more.
        async def send_signs() -> None:
            while True:
                await asyncio.sleep(sent_s + SILENCE_S - loop.time())
                if loop.time() >= sent_s + SILENCE_S:
                    await send_event(self._sign)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        signs = loop.create_task(send_signs())
        try:
            async for event in self._events:
                await send_event(event)
        except Exception as error:
            answer = from_exception(error)
            if answer.status_code == 500 and answer is not error:
                log.exception("a stream failed")
            scope["state"] |= {"outcome": "error", "reason": answer.reason}
            await send_event(await self._failed(answer))
        finally:
            signs.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
