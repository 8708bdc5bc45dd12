"""What surrounds every request, and what watches the server."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import Call, Reply, get, post, start_post
from scripted_client import steps
from served import Served
from socket_server import on_a_socket
from starlette.types import Message, Receive, Scope, Send

from outrider.engine.api import EngineStats, NewRequest, RequestOutput
from outrider.engine.processes.client import EngineState, EngineUnavailableError
from outrider.server.config.server_settings import ServerSettings

Serve = Callable[..., Served]
OK = {"prompt": "Hi"}


def test_request_id_is_echoed_or_made(serve: Serve) -> None:
    served = serve()
    assert post(served.app, OK, {"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    assert get(served.app, "/nowhere", {"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    made = {get(served.app, "/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    unfit = get(served.app, "/health", {"x-request-id": "x" * 500}).headers["x-request-id"]
    assert len(unfit) == 32


def test_a_proxy_may_find_the_application_starting(serve: Serve) -> None:
    received = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    heard: list[str] = []

    async def receive() -> Message:
        return next(received)

    async def send(message: Message) -> None:
        heard.append(message["type"])

    app = serve(api_keys=("one",), metrics_port=9000).app
    asyncio.run(app({"type": "lifespan", "app": app}, receive, send))
    assert heard == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_unknown_route_and_method_have_error_bodies(serve: Serve) -> None:
    error = post(serve().app, OK, path="/chat/completions").error
    assert error["code"] == "not_found"
    assert "below /v1" in error["message"]
    reply = get(serve().app, "/v1/completions")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Basic one"},
        {"authorization": "one"},
        {"authorization": "Bearer \xff"},
    ],
)
def test_missing_or_wrong_key_is_401(serve: Serve, headers: dict[str, str]) -> None:
    served = serve(api_keys=("one", "two"))
    for reply in (
        post(served.app, OK, headers),
        get(served.app, "/v1/models", headers),
        get(served.app, "/metrics", headers),
        get(served.app, "/version", headers),
    ):
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert get(served.app, "/health", headers).status == 200


@pytest.mark.parametrize("authorization", ["Bearer one", "bearer two"])
def test_any_of_the_keys_opens(serve: Serve, authorization: str) -> None:
    served = serve(api_keys=("one", "two"))
    assert post(served.app, OK, {"authorization": authorization}).status == 200


def test_keys_come_from_a_file_as_well(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffthree\n# ours\n\n  four \n", "utf-8")  # with a byte order mark
    served = serve(api_keys=("one",), api_key_file=file)
    for key, status in (("one", 200), ("three", 200), ("four", 200), ("# ours", 401), ("", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert post(served.app, OK, headers).status == status, key
    file.write_text("# none\n")
    with pytest.raises(OSError, match="no keys in it"):  # rather than an open server
        serve(api_key_file=file)
    with pytest.raises(OSError, match=r"server\.api_key_file: cannot read .*none: No such file"):
        serve(api_key_file=tmp_path / "none")


def test_browsers_are_let_in_only_from_the_origins_that_are_set(serve: Serve) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization,content-type"

    def preflight(**settings: object) -> Reply:
        async def run() -> Reply:
            call = Call(serve(**settings).app, "OPTIONS", "/v1/completions", [b""], ask)
            await call.finished
            return call.reply

        return asyncio.run(run())

    allowed = preflight(cors_origins=("https://a.example",), api_keys=("one",))
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    for reply in (preflight(), preflight(cors_origins=("https://b.example",))):
        assert reply.status >= 400
        assert "access-control-allow-origin" not in reply.headers
    reply = post(serve().app, OK, {"origin": "https://a.example"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example:80", False),
    ],
)
def test_pages_of_this_machine_are_let_in_from_any_port(
    serve: Serve, origin: str, allowed: bool
) -> None:
    settings: dict[str, Any] = {"cors_origins": ("localhost",), "cors_credentials": True}
    headers = post(serve(**settings).app, OK, {"origin": origin}).headers
    assert headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert headers["access-control-allow-credentials"] == "true"
    headers = post(serve(cors_origins=("localhost",)).app, OK, {"origin": origin}).headers
    assert "access-control-allow-credentials" not in headers


@pytest.mark.filterwarnings("error::fastapi.exceptions.FastAPIDeprecationWarning")
def test_server_below_a_path_is_asked_with_it_or_without(serve: Serve) -> None:
    served = serve(root_path="/models/a", api_keys=("one",))
    key = {"authorization": "Bearer one"}
    for prefix in ("/models/a", ""):
        assert get(served.app, f"{prefix}/health").status == 200
        assert get(served.app, f"{prefix}/v1/models").status == 401
        assert get(served.app, f"{prefix}/v1/models", key).status == 200
        assert post(served.app, OK, key, path=f"{prefix}/v1/completions").status == 200
    assert get(served.app, "/models/b/v1/models", key).status == 404
    document = get(served.app, "/openapi.json", key).json()
    assert document["servers"] == [{"url": "/models/a"}]
    metrics = get(served.app, "/metrics", key).body.decode()
    assert 'outrider_requests_total{outcome="ok",path="/v1/completions"} 2.0' in metrics.replace(
        'path="/v1/completions",outcome="ok"', 'outcome="ok",path="/v1/completions"'
    )


@pytest.mark.parametrize("outer", ["", "/ui"])  # /ui: a prefix of Ray's, which settings refuse
def test_a_request_is_judged_by_the_path_by_which_it_is_routed(serve: Serve, outer: str) -> None:
    served = serve(root_path="/a", api_keys=("one",))

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await served.app(scope | {"root_path": outer}, receive, send)

    key = {"authorization": "Bearer one"}
    assert get(mounted, f"{outer}/a/ui/").status == 200
    assert get(mounted, f"{outer}/a/v1/models").status == 401
    assert get(mounted, f"{outer}/a/v1/models", key).status == 200
    assert get(mounted, f"{outer}/a/a/v1/models", key).status == 404
    error = post(mounted, {}, key, path=f"{outer}/a/v1/messages").json()
    assert error["type"] == "error"  # as Anthropic's clients read it


@pytest.mark.parametrize("path", ["/ui", "/ui/a"])
def test_a_server_is_not_shown_below_its_own_page(path: str) -> None:
    with pytest.raises(ValueError, match="where the page is"):
        ServerSettings(root_path=path)


def test_body_that_is_declared_too_large_is_not_read(serve: Serve) -> None:
    async def run() -> None:
        served = serve(max_body_bytes=1024)
        headers = {"content-type": "application/json", "content-length": "2000"}
        call = Call(served.app, "POST", "/v1/completions", [b"x" * 2000], headers)
        await call.finished
        assert (call.reply.status, call.reply.error["code"]) == (413, "body_too_large")
        assert call.unread

    asyncio.run(run())


def test_chunked_body_is_counted_while_it_is_read(serve: Serve) -> None:
    async def run() -> None:
        served = serve(max_body_bytes=1024)
        parts = [b'{"prompt": "'] + [b"x" * 100] * 50
        headers = {"content-type": "application/json"}
        call = Call(served.app, "POST", "/v1/completions", parts, headers)
        await call.finished
        assert (call.reply.status, call.reply.error["code"]) == (413, "body_too_large")
        assert len(call.unread) > 30

    asyncio.run(run())


def test_closed_gate_turns_new_requests_away_and_lets_others_finish(serve: Serve) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        served = serve(lambda request: [(o := steps(request, [70, 71]))[0], go_on, o[1]])
        running = start_post(served.app, OK | {"stream": True}, path="/v1/completions")
        await running.until_body()
        served.gate.open = False
        late = start_post(served.app, OK, path="/v1/completions")
        await late.finished
        assert (late.reply.status, late.reply.error["code"]) == (503, "shutting_down")
        for path in ("/health", "/ready"):
            health = Call(served.app, "GET", path, [b""])
            await health.finished
            assert (health.reply.status, health.reply.json()["status"]) == (503, "draining")
        assert not await served.gate.drained(0.01)
        go_on.set()
        assert await served.gate.drained(1)
        assert running.reply.events[-1] == "[DONE]"

    asyncio.run(run())


def test_stopped_engine_ends_streams_with_an_error_event(serve: Serve) -> None:
    async def run() -> None:
        forever = asyncio.Event()
        served = serve(lambda request: [steps(request, [70, 71])[0], forever])
        call = start_post(served.app, OK | {"stream": True}, path="/v1/completions")
        await call.until_body()
        await served.client.stop()
        await asyncio.wait_for(call.finished, 1)
        assert "error" in json.loads(call.reply.events[-1])

    asyncio.run(run())


# ---- what watches


def test_health_of_a_server_that_starts_has_no_reason(serve: Serve) -> None:
    (served := serve()).client.state = "starting"
    assert get(served.app, "/health").json() == {"status": "starting"}


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_shows_its_reason_to_those_whom_a_request_would_show_it(
    serve: Serve, path: str
) -> None:
    served, open_to_all = serve(api_keys=("one",)), serve()
    key, wrong = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    assert get(served.app, path).json() == {"status": "ok"}
    for client in (served.client, open_to_all.client):
        client.state, client.status_reason = "restarting", "no model in /home/me"
    reply = get(served.app, path, key)
    assert reply.status == 503
    assert reply.json() == {"status": "restarting", "reason": "no model in /home/me"}
    # Without keys anybody may ask, unless a web page has led its reader's browser here.
    assert get(open_to_all.app, path).json() == reply.json()
    foreign = get(open_to_all.app, path, {"host": "evil.example"})
    for reply in (get(served.app, path), get(served.app, path, wrong), foreign):
        assert (reply.status, reply.json()) == (503, {"status": "restarting"})


def test_a_page_can_read_a_refusal_while_the_server_drains(serve: Serve) -> None:
    served = serve(cors_origins=("https://a.example",))
    served.gate.open = False
    reply = post(served.app, OK, {"origin": "https://a.example"})
    assert reply.status == 503
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert "retry-after" in reply.headers["access-control-expose-headers"]


def test_live_only_fails_where_a_new_start_could_help(serve: Serve) -> None:
    served = serve(api_keys=("one",))
    served.gate.open = False  # draining
    for state in ("starting", "ready", "restarting", "stopped"):
        served.client.state = state  # type: ignore[assignment]
        assert get(served.app, "/live").json() == {"status": "ok"}
    served.client.state, served.client.status_reason = "failed", "it keeps dying"
    reply = get(served.app, "/live")
    assert reply.status == 503
    assert reply.json() == {"status": "failed"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/v1/models"])
@pytest.mark.parametrize("state", ["ready", "failed"])
def test_probes_may_ask_for_the_head_alone(serve: Serve, path: str, state: EngineState) -> None:
    served = serve()
    served.client.state = state
    with on_a_socket(served) as url, httpx.Client(base_url=url) as client:
        head, whole = client.head(path), client.get(path)
    assert head.status_code == whole.status_code
    assert head.content == b""
    for name in ("content-type", "content-length"):
        assert head.headers[name] == whole.headers[name]


def test_models_show_the_context_length(serve: Serve) -> None:
    served = serve()
    (model,) = get(served.app, "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("test-model", 1000)
    assert get(served.app, "/v1/models/test-model").json() == model
    reply = get(served.app, "/v1/models/gpt-5")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(serve: Serve, root_path: str) -> None:
    app = serve(root_path=root_path, api_keys=("key",)).app
    key = {"authorization": "Bearer key"}
    assert get(app, f"{root_path}/health/").status == 200
    assert get(app, f"{root_path}/metrics/").status == 401
    assert get(app, f"{root_path}/v1/models/", key).json()["object"] == "list"
    assert post(app, OK, key, path=f"{root_path}/v1/completions/").status == 200


def test_metrics_count_outcomes_and_show_the_engine(serve: Serve) -> None:
    served = serve()
    served.client.stats = EngineStats(
        num_running=3,
        num_waiting=2,
        pages_used=5,
        pages_total=10,
        generation_tokens=100,
        preemptions=1,
        dead_drafts=2,
        drafted_per_position=[10, 8],
        accepted_per_position=[7, 4],
    )
    post(served.app, OK)
    post(served.app, OK | {"stream": True})
    post(served.app, {})
    post(served.app, OK, path="/v1/nowhere")
    text = get(served.app, "/metrics").body.decode()
    for line in (
        'outrider_requests_total{outcome="ok",path="/v1/completions"} 2.0',
        'outrider_requests_total{outcome="invalid",path="/v1/completions"} 1.0',
        'outrider_requests_total{outcome="invalid",path="other"} 1.0',
        "outrider_draft_share_of_text 1.0",
        "outrider_requests_running 3.0",
        "outrider_requests_waiting 2.0",
        "outrider_pages_used 5.0",
        "outrider_pages_total 10.0",
        "outrider_generation_tokens_total 100.0",
        "outrider_preemptions_total 1.0",
        "outrider_dead_drafts_total 2.0",
        "outrider_draft_tokens_total 18.0",
        "outrider_accepted_tokens_total 11.0",
        'outrider_accepted_tokens_per_position_total{position="1"} 4.0',
        "outrider_time_to_first_token_seconds_count 2.0",
        'outrider_request_duration_seconds_count{path="/v1/completions"} 2.0',
        # Of ten steps, two drafted one token and eight two; three accepted none and four two.
        'outrider_step_draft_tokens_bucket{le="0.0"} 0.0',
        'outrider_step_draft_tokens_bucket{le="1.0"} 2.0',
        'outrider_step_draft_tokens_bucket{le="2.0"} 10.0',
        "outrider_step_draft_tokens_sum 18.0",
        'outrider_step_accepted_tokens_bucket{le="0.0"} 3.0',
        'outrider_step_accepted_tokens_bucket{le="1.0"} 6.0',
        'outrider_step_accepted_tokens_bucket{le="+Inf"} 10.0',
        "outrider_step_accepted_tokens_sum 11.0",
    ):
        assert line in text.splitlines()


def test_sequences_are_counted_by_how_they_ended(serve: Serve) -> None:
    def play(request: NewRequest) -> list[Any]:
        (first, *_) = request.prompt_token_ids
        if first == 5:
            error = {"finish_reason": "error", "error": "broken"}
            return [RequestOutput(request_id=request.request_id, token_ids=[], **error)]
        if first == 4:
            return [steps(request, [70, 71])[0], EngineUnavailableError("the engine died")]
        return steps(request, [70, 71, 72], finish="stop" if first == 6 else "length")

    served = serve(play)
    post(served.app, OK | {"prompt": [[6], [7], [7]]})
    post(served.app, OK | {"prompt": [[5], [7]]})  # the second is aborted with the first
    post(served.app, OK | {"prompt": [[4], [4]]})  # and here both end with the engine
    text = get(served.app, "/metrics").body.decode()
    ends = dict(re.findall(r'outrider_sequences_ended_total{finished_reason="(\w+)"} (\S+)', text))
    assert ends == {"stop": "1.0", "length": "2.0", "error": "3.0", "abort": "1.0"}


def test_without_steps_the_histograms_of_the_engine_are_empty(serve: Serve) -> None:
    text = get(serve().app, "/metrics").body.decode()
    assert "outrider_step_draft_tokens_count 0.0" in text.splitlines()


def test_openapi_document_names_the_request_fields(serve: Serve) -> None:
    schemas = get(serve().app, "/openapi.json").json()["components"]["schemas"]
    assert "max_tokens" in schemas["CompletionRequest"]["properties"]
    assert "max_completion_tokens" in schemas["ChatCompletionRequest"]["properties"]
