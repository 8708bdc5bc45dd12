"""What clients rely on, row by row, over a real socket."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_client import saying, steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.api import NewRequest, RequestOutput, TokenLogprobs
from outrider.engine.processes.client import EngineUnavailableError, QueueFullError
from outrider.server.http import connection, middleware
from outrider.server.text.tokenizer import Tokenizer

OK = {"prompt": "Hi"}
HI = [{"role": "user", "content": "Hi"}]
PATHS = {"/v1/completions": OK, "/v1/chat/completions": {"messages": HI}}
each_endpoint = pytest.mark.parametrize("path", PATHS)
streamed_or_whole = pytest.mark.parametrize("stream", [True, False])


class Site:
    """One server for the whole module; a test says what its engine plays."""

    def __init__(self, served: Served, url: str) -> None:
        self.served = served
        self.http = httpx.Client(base_url=url, headers={"authorization": "Bearer key"}, timeout=10)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.http.post(path, json=PATHS.get(path, {}) | fields)

    def refusal(self, path: str = "/v1/completions", status: int = 400, **fields: Any) -> Any:
        """The error of a request that never reached the engine."""
        before = len(self.served.client.submitted)
        reply = self.post(path, **fields)
        assert reply.status_code == status, reply.text
        assert reply.headers["content-type"] == "application/json"
        assert len(self.served.client.submitted) == before
        return error_of(reply)

    def connection(self) -> socket.socket:
        url = self.http.base_url
        return socket.create_connection((url.host, url.port or 0), timeout=5)

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[str]:
        reply = self.post(path, stream=True, **fields)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]


def error_of(reply: httpx.Response) -> Any:
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    kind = "server_error" if reply.status_code >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if reply.status_code == 429 else kind
    assert body["error"]["type"] == kind
    return body["error"]


def text_of(choice: Any) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.fixture(scope="module")
def running(tokenizer: Tokenizer) -> Iterator[Site]:
    served = Served(
        lambda request: [],
        tokenizer,
        api_keys=("key",),
        max_body_bytes=50_000,
        max_prompts_times_n=8,
        body_timeout_s=0.5,
    )
    with on_a_socket(served) as url:
        yield Site(served, url)


@pytest.fixture
def site(running: Site, tokenizer: Tokenizer) -> Site:
    running.served.client.play = saying(tokenizer, " Hello 🙂 world", sizes=(2, 3))
    running.served.client.refusal = None
    running.served.gate.open = True
    return running


@each_endpoint
@pytest.mark.parametrize("raw", [b"{", b"", b"[1]", b"\xff\xfe", b'{"temperature": NaN}'])
def test_invalid_json_is_400(site: Site, path: str, raw: bytes) -> None:
    reply = site.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert error_of(reply)


@each_endpoint
def test_wrong_fields_are_400_and_named(site: Site, path: str) -> None:
    for fields, param in (
        ({"prompt": None, "messages": None}, "messages" if "chat" in path else "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ):
        assert site.refusal(path, **fields)["param"] == param


@each_endpoint
def test_unknown_model_is_404(site: Site, path: str) -> None:
    assert site.refusal(path, status=404, model="gpt-5")["code"] == "model_not_found"
    assert error_of(site.http.get("/v1/models/gpt-5"))["code"] == "model_not_found"
    for name in ("test-model", "", None):  # without a name there is no doubt
        assert site.post(path, model=name).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v2"])
def test_what_is_not_served_is_404_in_the_shape_of_errors(site: Site, path: str) -> None:
    assert error_of(site.http.post(path, json={}))["code"] == "not_found"


@each_endpoint
@streamed_or_whole
def test_prompt_that_is_too_long_is_refused_before_any_stream(
    site: Site, path: str, stream: bool
) -> None:
    long = {"prompt": "x " * 2000, "messages": [{"role": "user", "content": "x " * 2000}]}
    error = site.refusal(path, stream=stream, **long)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 1000 tokens. However, you requested"
    )
    assert f"in the {error['param']}" in error["message"]
    assert error["param"] in PATHS[path]


@each_endpoint
def test_amounts_are_bounded(site: Site, path: str) -> None:
    for fields in (
        {"n": 9},
        {"stop": ["x"] * 100},
        {"stop": "x" * 10_000},
        {"stop_token_ids": list(range(200))},
        {"bad_words": ["x"] * 200},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"logprobs": True, "top_logprobs": 21} if "chat" in path else {"logprobs": 21},
    ):
        assert site.refusal(path, **fields)["param"] in fields
    if "chat" not in path:
        assert site.refusal(prompt=["x"] * 9)


def test_every_route_but_those_of_probes_asks_for_a_key(site: Site) -> None:
    document = site.http.get("/openapi.json").json()
    routes = [(m, p) for p, operations in document["paths"].items() for m in operations]
    assert len(routes) > 8
    for path in ("/health/", "/live/", "/ready/"):
        assert site.http.get(path, headers={"authorization": ""}).status_code == 200
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/nowhere")]:
        for header in ("", "Bearer", "Bearer wrong", "Basic key"):
            reply = site.http.request(method, path, headers={"authorization": header})
            if path in ("/health", "/live", "/ready"):
                assert reply.status_code == 200
            else:
                assert reply.status_code == 401
                if path.startswith("/v1/messages"):
                    assert reply.json()["error"]["type"] == "authentication_error"
                else:
                    assert error_of(reply)["code"] == "invalid_api_key"


@pytest.mark.parametrize("chunked", [True, False])
def test_body_too_large_is_413(site: Site, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    content: Any = iter([body[i : i + 5000] for i in range(0, len(body), 5000)])
    reply = site.http.post(
        "/v1/completions",
        content=content if chunked else body,
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "body_too_large"


@each_endpoint
def test_body_that_does_not_arrive_is_408(
    site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.1)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\n"
    head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n"
    with site.connection() as slow:
        slow.sendall(head.encode())
        for byte in b'{"pro':
            slow.sendall(bytes([byte]))
            time.sleep(0.01)
        answer = b"".join(iter(lambda: slow.recv(4096), b""))  # and the connection is closed
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer


@pytest.mark.parametrize("first", [b"", b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_head_that_does_not_arrive_ends_the_connection(
    site: Site, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with site.connection() as slow:
        slow.sendall(first + b"GET /version HTT")
        start_s = time.monotonic()
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
    assert answer.count(b"HTTP/1.1 ") == (1 if first else 0)
    assert time.monotonic() - start_s < 3


def test_head_without_end_is_400(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 1000)
    with site.connection() as endless:
        endless.sendall(b"GET /version HTTP/1.1\r\n" + 100 * b"a: bcdefghijk\r\n")
        answer = b"".join(iter(lambda: endless.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"1000 bytes" in answer


@each_endpoint
@streamed_or_whole
def test_full_queue_is_429_and_a_missing_engine_503_with_a_time_to_retry(
    site: Site, path: str, stream: bool
) -> None:
    site.served.client.refusal = QueueFullError("full")
    full = site.post(path, stream=stream)
    site.served.client.refusal = EngineUnavailableError("restarting")
    down = site.post(path, stream=stream)
    site.served.gate.open = False
    draining = site.post(path, stream=stream)
    for reply, status, kind, code in (
        (full, 429, "rate_limit_error", "queue_full"),
        (down, 503, "server_error", "engine_unavailable"),
        (draining, 503, "server_error", "shutting_down"),
    ):
        error = error_of(reply)
        assert (reply.status_code, error["type"], error["code"]) == (status, kind, code)
        assert int(reply.headers["retry-after"]) > 0


@each_endpoint
def test_unknown_fields_are_ignored_and_removed_spellings_refused(site: Site, path: str) -> None:
    harmless = {"colour": "blue", "metadata": {"a": "b"}, "store": True, "user": "me"}
    assert site.post(path, **harmless).status_code == 200
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        assert site.refusal(path, **{name: "x"})["param"] == name


@each_endpoint
def test_null_means_every_default(site: Site, path: str) -> None:
    name = "ChatCompletionRequest" if "chat" in path else "CompletionRequest"
    schema = site.http.get("/openapi.json").json()["components"]["schemas"][name]
    nulls = dict.fromkeys(schema["properties"].keys() - {"prompt", "messages"})
    assert site.post(path, **nulls).status_code == 200


@each_endpoint
def test_failure_in_mid_stream_is_an_error_event_and_no_clean_end(site: Site, path: str) -> None:
    for failure in (EngineUnavailableError("the engine died"), ZeroDivisionError("secret")):
        site.served.client.play = lambda request, failure=failure: [
            *steps(request, [70, 71, 72])[:2],
            failure,
        ]
        *_, last = site.events(path)
        error = json.loads(last)["error"]
        assert error["type"] == "server_error"
        assert "secret" not in error["message"]
        assert "[DONE]" not in site.events(path)


@each_endpoint
@streamed_or_whole
def test_client_that_leaves_frees_its_sequences(site: Site, path: str, stream: bool) -> None:
    forever = asyncio.Event()
    site.served.client.play = lambda request: [steps(request, [70, 71])[0], forever]
    site.served.client.aborted.clear()
    body = json.dumps(PATHS[path] | {"stream": stream, "n": 2}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = len(site.served.client.submitted)
    with socket.create_connection(
        (site.http.base_url.host, site.http.base_url.port or 0)
    ) as client:
        client.sendall(head.encode() + body)
        until(lambda: len(site.served.client.submitted) > before)
    until(lambda: len(site.served.client.aborted) == 2)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@each_endpoint
@streamed_or_whole
def test_first_stop_string_trims_text_ids_logprobs_and_usage(
    site: Site, path: str, stream: bool, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    site.served.client.play = lambda request: steps(request, ids, sizes=(1, 99))
    fields: dict[str, Any] = {"stop": ["four", "wo thr", "three"], "return_token_ids": True}
    fields |= {"logprobs": True} if "chat" in path else {"logprobs": 0}
    if stream:
        events = site.events(path, stream_options={"include_usage": True}, **fields)
        assert events.pop() == "[DONE]"
        *chunks, last = [json.loads(event) for event in events]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        parts = [choice.get("delta", choice) for choice in choices]
        choices = [choice for choice in choices if "token_ids" in choice]
        text = "".join(part.get("content", part.get("text")) or "" for part in parts)
        usage = last["usage"]
    else:
        whole = site.post(path, **fields).json()
        choices, usage, text = whole["choices"], whole["usage"], text_of(whole["choices"][0])
    assert text == "one t"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "wo thr")
    used = [i for choice in choices for i in choice["token_ids"]]
    assert used == ids[: len(used)]
    assert len(used) == usage["completion_tokens"] < len(ids)
    key = "content" if "chat" in path else "tokens"
    assert sum(len(choice["logprobs"][key]) for choice in choices) == len(used)


@each_endpoint
def test_characters_are_whole_in_every_event(site: Site, path: str, tokenizer: Tokenizer) -> None:
    text = "🙂👩‍👩‍👧你好ñ"
    site.served.client.play = saying(tokenizer, text)
    events = site.events(path)
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    pieces = [choice.get("delta", {}).get("content", choice.get("text")) for choice in choices]
    assert not any("\ufffd" in (piece or "") for piece in pieces)
    assert "".join(piece or "" for piece in pieces) == text
    assert text_of(site.post(path).json()["choices"][0]) == text


@each_endpoint
def test_logprob_of_minus_infinity_is_clamped_and_nan_fails_the_request(
    site: Site, path: str
) -> None:
    def play(request: NewRequest, **fields: Any) -> list[RequestOutput]:
        return [RequestOutput(request_id=request.request_id, **fields)]

    lowest = [TokenLogprobs(float("-inf"), [(71, float("-inf"))])]
    site.served.client.play = lambda request: play(
        request, token_ids=[70], logprobs=lowest, finish_reason="length"
    )
    fields = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    places = 2 if "chat" in path else 3  # completions repeat the token among its alternatives
    assert site.post(path, **fields).text.count("-9999.0") == places
    site.served.client.play = lambda request: play(
        request, token_ids=[], finish_reason="error", error="no finite logits"
    )
    reply = site.post(path)
    assert (reply.status_code, error_of(reply)["message"]) == (500, "no finite logits")
    *_, event = site.events(path)
    assert json.loads(event)["error"]["message"] == "no finite logits"


@each_endpoint
@streamed_or_whole
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("bad_words: it left no token to go on with", "bad_words"),
        ("grammar: no token can go on with the text", None),
    ],
)
def test_request_that_leaves_itself_no_token_is_refused_so(
    site: Site, path: str, stream: bool, message: str, param: str | None
) -> None:
    site.served.client.play = lambda request: [
        RequestOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason="error",
            error=message,
            is_dead_end=True,
        )
    ]
    if stream:
        *_, event = site.events(path)
        error = json.loads(event)["error"]
    else:
        reply = site.post(path)
        assert reply.status_code == 400
        error = error_of(reply)
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    assert (error["message"], error["param"]) == (message, param)


@each_endpoint
def test_request_id_comes_back(site: Site, path: str) -> None:
    reply = site.http.post(path, json=PATHS[path], headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert site.post(path).headers["x-request-id"]
    assert site.http.get("/nowhere").headers["x-request-id"]
