"""OpenTelemetry spans, one for each API request: numbers and names, never text.

The attributes are those of OpenTelemetry's conventions for generative AI and for HTTP, and for
latencies those that vLLM gives. A span is made once its request has ended, with the request's own
times: the packages are needed only where spans are sent (`pip install outrider[tracing]`).
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from ..base.errors import route_path

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("outrider.server")

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Of the requests that generate.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "chat",
}
_ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "max_tokens": "gen_ai.request.max_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "queue_s": "gen_ai.latency.time_in_queue",
    "duration_s": "gen_ai.latency.e2e",
    "draft_tokens": "outrider.draft_tokens",
    "accepted_tokens": "outrider.accepted_tokens",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
}

# Takes a request's scope and, once it has ended, the facts of its log line.
Trace = Callable[[Scope, Mapping[str, Any]], None]


class TracingError(RuntimeError):
    """The settings ask for spans, but the packages that send them are not installed."""


def make_trace(endpoint: str | None, model_name: str) -> Trace | None:
    """A function that sends a request's span to an OTLP endpoint; None if neither the settings nor
    OpenTelemetry's own environment variables name one. Raises TracingError.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return None
    try:
        return _Spans(_provider(endpoint), model_name)
    except ImportError as error:
        wanted_by = "server.otlp_endpoint" if endpoint else _ENDPOINT_VARIABLES[1]
        reason = (
            f"{wanted_by} asks for traces, which need further packages: "
            f"pip install 'outrider[tracing]' ({error})"
        )
        if endpoint is not None:
            raise TracingError(reason) from None
        # Clusters set the variables for everything that runs there: serve without spans.
        log.warning("no traces are sent: %s", reason)
        return None


def _provider(endpoint: str | None) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Sends the remaining spans when the process ends.
    name = os.environ.get("OTEL_SERVICE_NAME", "outrider")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class _Spans:
    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("outrider")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def __call__(self, scope: Scope, facts: Mapping[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = Headers(scope=scope)
        parent = self._propagator.extract(
            {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        )
        end_ns = time.time_ns()
        operation = OPERATIONS.get(route_path(scope))
        name = f"{operation} {self._model_name}" if operation else f"{facts['method']} /v1"
        span = self._tracer.start_span(
            name,
            parent,
            SpanKind.SERVER,
            {_ATTRIBUTES[key]: value for key, value in facts.items() if key in _ATTRIBUTES},
            start_time=end_ns - int(facts["duration_s"] * 1e9),
        )
        if operation is not None:
            span.set_attribute("gen_ai.operation.name", operation)
            span.set_attribute("gen_ai.provider.name", "outrider")
            span.set_attribute("gen_ai.request.model", self._model_name)
        if facts["outcome"] in ("error", "unavailable"):
            span.set_attribute("error.type", facts["outcome"])
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
