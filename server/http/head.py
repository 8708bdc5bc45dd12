"""HEAD, on every route that has GET."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Answer HEAD with the head of what GET answers; a stream ends at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()
        body = [{"type": "http.request"}]

        async def receive_until_answered() -> Message:
            if body:
                return body.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body"})
                answered.set()

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)
