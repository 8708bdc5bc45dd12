"""Spans, sent to a real OTLP receiver on a socket."""

import builtins
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from asgi import get, post
from scripted_client import steps
from served import Served

from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.observe.tracing import TracingError

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Serve = Callable[..., Served]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    def __init__(self, server: HTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        self.requests: list[Any] = []

    def spans(self, number: int) -> list[Any]:
        deadline_s = time.monotonic() + 20
        while True:
            spans = [
                span
                for request in self.requests
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            if len(spans) >= number:
                return spans
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(server)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


def test_span_of_an_answer_continues_the_clients_trace(serve: Serve, receiver: Receiver) -> None:
    served = serve(
        lambda request: steps(request, [70, 71, 72], sizes=(2,), cached_tokens=1, num_drafts=2),
        otlp_endpoint=receiver.url,
        root_path="/a",
    )
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    before_ns = time.time_ns()
    body = {"messages": [{"role": "user", "content": "a secret"}], "stream": True}
    assert post(served.app, body, headers, path="/v1/chat/completions").status == 200
    (span,) = receiver.spans(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat test-model"
    assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    reported = attributes(span)
    assert reported["gen_ai.operation.name"] == "chat"
    assert reported["gen_ai.request.model"] == "test-model"
    assert reported["gen_ai.request.id"] == "mine"
    assert reported["gen_ai.request.max_tokens"] > 3
    assert reported["gen_ai.usage.output_tokens"] == 3
    assert reported["gen_ai.usage.cache_read.input_tokens"] == 1
    assert reported["gen_ai.latency.time_to_first_token"] > 0
    assert reported["gen_ai.latency.time_in_queue"] >= 0
    assert (reported["outrider.draft_tokens"], reported["outrider.accepted_tokens"]) == (4, 1)
    assert reported["http.response.status_code"] == 200
    assert "secret" not in str(receiver.requests)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
    ],
)
def test_conversations_of_all_apis_are_chats(
    serve: Serve, receiver: Receiver, path: str, body: dict[str, Any]
) -> None:
    served = serve(otlp_endpoint=receiver.url)
    assert post(served.app, body, path=path).status == 200
    (span,) = receiver.spans(1)
    assert (span.name, attributes(span)["gen_ai.operation.name"]) == ("chat test-model", "chat")


def test_failures_are_marked_and_other_routes_are_spans_too(
    serve: Serve, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url)
    served = serve(lambda request: [EngineUnavailableError("the engine died")])
    assert post(served.app, {"prompt": "Hi"}).status == 503
    assert get(served.app, "/v1/models").status == 200
    assert get(served.app, "/health").status == 200
    failed, other = receiver.spans(2)
    assert (failed.name, failed.status.code) == ("text_completion test-model", 2)
    assert attributes(failed)["error.type"] == "unavailable"
    assert (other.name, other.status.code) == ("GET /v1", 0)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


@pytest.mark.usefixtures("no_packages")
def test_traces_that_the_settings_ask_for_need_their_packages(serve: Serve) -> None:
    with pytest.raises(TracingError, match=r"pip install 'outrider\[tracing\]'"):
        serve(otlp_endpoint="http://127.0.0.1:1/v1/traces")


@pytest.mark.usefixtures("no_packages")
def test_an_environment_that_asks_for_traces_only_warns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert get(serve().app, "/v1/models").status == 200
    assert "pip install 'outrider[tracing]'" in caplog.text
