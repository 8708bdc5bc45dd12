"""Requests that meet no route, or come by another method than it has."""

import asyncio
from collections.abc import Callable

import anthropic
import httpx
import pytest
from asgi import Call, Reply, get, post
from served import Served
from socket_server import on_a_socket

from outrider.server.http.unmet import NOT_SERVED

Serve = Callable[..., Served]
GET_PATHS = (
    *("/health", "/ready", "/live", "/version", "/metrics", "/info", "/tokenizer_info"),
    *("/v1/models", "/models", "/v1/models/test-model", "/v1/loads", "/get_load", "/load"),
    *("/openapi.json", "/ui/", "/v1/responses/resp_0"),
)


def ask(served: Served, method: str, path: str) -> Reply:
    async def run() -> Reply:
        call = Call(served.app, method, path, [b""], {"content-type": "application/json"})
        await asyncio.wait_for(call.finished, 5)
        return call.reply

    return asyncio.run(run())


@pytest.mark.parametrize("path", GET_PATHS)
def test_head_is_served_where_get_is(serve: Serve, path: str) -> None:
    with on_a_socket(serve()) as url, httpx.Client(base_url=url) as client:
        head, whole = client.head(path), client.get(path)
        assert client.get("/health").status_code == 200  # on the same connection
    assert head.status_code == whole.status_code
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_the_head_of_a_stream_ends(serve: Serve) -> None:
    reply = ask(serve(), "HEAD", "/stats/stream")
    assert (reply.status, reply.body, reply.ended) == (200, b"", True)
    assert reply.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/responses/resp_0", "DELETE, GET, HEAD"),
        ("PUT", "/v1/responses/resp_0", "DELETE, GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/health", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/ui/app.js", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_named(
    serve: Serve, method: str, path: str, allowed: str
) -> None:
    reply = ask(serve(), method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert reply.error["code"] == "method_not_allowed"
        assert allowed in reply.error["message"]


def test_what_other_servers_have_is_named_with_what_is_served(serve: Serve) -> None:
    served = serve()
    for path, wanted in NOT_SERVED.items():
        for each in (path, f"{path}/abc"):
            reply = post(served.app, {}, path=each)
            assert reply.status == 404
            error = reply.json()["error"]
            message = error if path.startswith("/api/") else error["message"]
            assert f"no {wanted}" in message
            assert "/v1/chat/completions" in message
    assert reply.error["code"] == "not_found"
    batches = post(served.app, {}, path="/v1/messages/batches")
    assert batches.error["type"] == "not_found_error"
    # The rest of a name is another name.
    assert "There is no /v1/embeddingsx" in get(served.app, "/v1/embeddingsx").error["message"]


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1/v1/chat/completions"])
def test_any_other_route_below_v1_is_named_with_what_is_served(serve: Serve, path: str) -> None:
    message = post(serve().app, {}, path=path).error["message"]
    assert message.startswith(f"There is no {path} here. Served are /v1/completions, ")


def test_anthropics_client_lists_the_models(serve: Serve) -> None:
    with on_a_socket(serve(served_model_name=("a", "b"))) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        models = list(client.models.list())
        assert [(model.id, model.type, model.display_name) for model in models] == [
            ("a", "model", "a"),
            ("b", "model", "b"),
        ]
        assert models[0].created_at.tzinfo is not None
        assert models[0].max_input_tokens == 1000
        assert client.models.retrieve("b").id == "b"


def test_models_are_listed_beside_v1_too(serve: Serve) -> None:
    app = serve(api_keys=("key",)).app
    key = {"authorization": "Bearer key"}
    assert get(app, "/models").status == 401
    assert get(app, "/models", key).json() == get(app, "/v1/models", key).json()
