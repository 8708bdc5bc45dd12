"""Keys: who is let in, and how a request shows which key it came with."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from asgi import Call, get, post
from scripted_client import ScriptedClient
from served import Served
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.server.base.request_key import key_digest, request_key
from outrider.server.http.api_keys import ApiKeys
from outrider.server.observe.metrics import Metrics

Serve = Callable[..., Served]


def ask(path: str, authorization: str, keys: tuple[str, ...] = ("one", "zwölf")) -> Any:
    """The key of a request as its route sees it."""

    async def reply(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(request_key(Request(scope)))(scope, receive, send)

    async def run() -> Any:
        app = ApiKeys(reply, keys, Metrics(ScriptedClient(lambda _: (), vocab_size=1), "tiny"))
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


def test_failed_keys_are_counted_and_logged_on_every_route(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(api_keys=("one",))
    wrong = {"authorization": "Bearer guess"}
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/docs", "/health", "/nowhere"):
        get(served.app, path, wrong)
    post(served.app, {"prompt": "Hi"})
    get(served.app, "/health")
    text = get(served.app, "/metrics", {"authorization": "Bearer one"}).body.decode()
    assert 'outrider_failed_keys_total{reason="wrong"} 6.0' in text
    assert 'outrider_failed_keys_total{reason="missing"} 1.0' in text
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 7
    assert lines[0] == "wrong key from test: GET /v1/models"
    assert "guess" not in caplog.text
