"""The bodies of requests: how large each may be, and how long it may take to arrive."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import APIError
from ..base.held import Held, HeldBudget


class Bodies:
    """Refuse bodies above a size, by their declared length or while reading them, bodies that do
    not arrive in time, and those for which there is no room beside the others.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, max_bytes: int, timeout_s: float | None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._budget = HeldBudget(max_bytes, max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await self._too_large().response(scope)(scope, receive, send)
            return
        read_bytes, more = 0, True
        held = scope["state"]["held"] = Held(self._budget)
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

    def _too_slow(self) -> APIError:
        return APIError(
            408,
            f"The request body did not arrive within {self._timeout_s:g} s, the maximum "
            "(server.body_timeout_s).",
            code="body_timeout",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"The request body is larger than {self._max_body_bytes} bytes, the maximum "
            "(server.max_body_bytes).",
            code="body_too_large",
            headers={"Connection": "close"},
        )
