"""Keys: who is let in, and how a request tells which key it came with."""

import asyncio
from typing import Any

import pytest
from asgi import Call
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.server.api_keys import ApiKeys, key_digest, request_key


def ask(path: str, authorization: str, keys: tuple[str, ...] = ("one", "zwölf")) -> Any:
    """The key of a request as its route sees it."""

    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(request_key(Request(scope)))(scope, receive, send)

    async def run() -> Any:
        app = ApiKeys(tell, keys)
        call = Call(app, "GET", path, [b""], {"authorization": authorization})
        await call.finished
        return call.reply.json()

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_route_sees_which_key_was_sent_and_never_the_key(path: str) -> None:
    assert ask(path, "Bearer one") == key_digest("one")
    assert ask(path, "Bearer zwölf") == key_digest("zwölf")
    assert "one" not in key_digest("one")


def test_a_probe_with_a_wrong_key_has_none() -> None:
    assert ask("/health", "Bearer two") is None
    assert ask("/health", "Basic one") is None
