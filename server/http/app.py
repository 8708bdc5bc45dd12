"""The HTTP application over one engine."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.processes.client import EngineClient

from ..api.answer import Answer
from ..api.chat import create_chat_completion
from ..api.chat_protocol import ChatCompletion, ChatCompletionRequest
from ..api.completions import create_completion
from ..api.json_route import JSONRoute
from ..api.messages import count_tokens, create_message
from ..api.messages_protocol import (
    AnthropicAnswer,
    AnthropicError,
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
)
from ..api.ollama import add_ollama_routes
from ..api.protocol import (
    Completion,
    CompletionRequest,
    ErrorResponse,
    Health,
)
from ..api.response_store import ResponseStore
from ..api.responses import (
    count_input_tokens,
    create_response,
)
from ..api.responses_protocol import (
    DeletedResponse,
    InputTokensCount,
    ResponseItemList,
    ResponseObject,
    ResponsesRequest,
)
from ..api.sampling_defaults import NEUTRAL, SamplingDefaults
from ..api.service import VERSION, Service
from ..api.stored_responses import (
    cancel_response,
    delete_response,
    stored_input_items,
    stored_response,
)
from ..api.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
    tokenizer_info,
)
from ..base import errors
from ..base.request_key import key_digest
from ..base.unknown_fields import IGNORED
from ..config.server_settings import ANY_NAME
from ..config.settings import Settings
from ..grammar.structured_outputs import GrammarChecker
from ..observe.metrics import Metrics
from ..observe.tracing import make_trace
from ..text.fill_in_the_middle import FillInTheMiddle
from ..text.message_format import MessageFormat
from ..text.tokenizer import Tokenizer
from . import unmet
from .api_keys import ApiKeys
from .bodies import Bodies
from .head import HeadRequests
from .hosts import Hosts
from .info import add_info_route
from .json_routes import JSONRoutes
from .loads import add_load_routes
from .middleware import (
    Drain,
    Gate,
    MetricsPort,
    Observe,
    RequestId,
    RootPath,
)
from .models import model_routes
from .stats import add_stats_route
from .ui import add_ui

# What the OpenAPI document says about answers other than whole ones.
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": "An error."} for status in ("4XX", "5XX")
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, its chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


# Origins of web pages that this machine serves to itself.
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    gate: Gate,
    pair: Settings,
    *,
    compiler: GrammarCompiler | None = None,
    sampling_defaults: SamplingDefaults = NEUTRAL,
) -> ASGIApp:
    """The application; it answers 503 unless the engine is ready and the gate is open.

    `pair`: its settings, and the server's. `compiler`: checks grammars; None: they are refused.
    """
    settings = pair.server
    keys = settings.read_api_keys()
    service = _service(client, tokenizer, pair, compiler, sampling_defaults, has_keys=bool(keys))
    api = FastAPI(
        title="Outrider",
        version=VERSION,
        redirect_slashes=False,
        description="OpenAI-compatible completions and chat by speculative decoding. Accepted and "
        f"without effect: {', '.join(f'`{name}`' for name in sorted(IGNORED))}. An unknown field "
        "is named in the header `x-unknown-fields`, or refused (`server.unknown_fields`).",
    )
    errors.install(api)
    unmet.install(api)
    store = ResponseStore(settings.response_store_bytes if settings.api_workers == 1 else 0)
    openai, anthropic = _openai_routes(service, store), _anthropic_routes(service)
    ollama = APIRouter(route_class=JSONRoute, prefix=errors.OLLAMA_PATH, include_in_schema=False)
    add_ollama_routes(ollama, service)
    tokenizer_routes = _tokenizer_routes(service)
    models = model_routes(service, _ERRORS)
    api.include_router(openai)
    api.include_router(models, prefix="/v1")
    api.include_router(models, include_in_schema=False)  # for base URLs without /v1
    api.include_router(anthropic)
    api.include_router(ollama)
    api.include_router(tokenizer_routes)
    api.include_router(_status_routes(service, gate, pair))
    if settings.ui:
        add_ui(api)
    for_http = _guarded(api, (openai, anthropic, ollama), tokenizer_routes, service, gate, keys)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Ray also says when the application starts and ends.
        await (for_http if scope["type"] == "http" else api)(scope, receive, send)

    return answer


def _service(
    client: EngineClient,
    tokenizer: Tokenizer,
    pair: Settings,
    compiler: GrammarCompiler | None,
    sampling_defaults: SamplingDefaults,
    *,
    has_keys: bool,
) -> Service:
    settings = pair.server
    priority_keys = frozenset(map(key_digest, settings.read_priority_keys()))
    return Service(
        client=client,
        tokenizer=tokenizer,
        metrics=Metrics(client, pair.served_model_names[0]),
        message_format=MessageFormat.of(tokenizer.data, settings),
        grammars=GrammarChecker(
            compiler, max_bytes=settings.max_grammar_bytes, timeout_s=settings.grammar_timeout_s
        ),
        model_names=pair.served_model_names,
        unlisted_name=None if settings.served_model_name else pair.target.model,
        takes_any_name=ANY_NAME in settings.served_model_name,
        settings=settings,
        sampling_defaults=sampling_defaults,
        priority_keys=priority_keys if has_keys else None,
        fill_in_the_middle=FillInTheMiddle.of(tokenizer),
    )


def _guarded(
    api: FastAPI,
    generating: Sequence[APIRouter],
    tokenizer_routes: APIRouter,
    service: Service,
    gate: Gate,
    keys: list[str],
) -> ASGIApp:
    """The application behind all that a request passes first: what comes last here, it meets first.

    Requests to the routes that are `generating` are counted by their paths.
    """
    settings, metrics = service.settings, service.metrics
    served = HeadRequests(api)
    app: ASGIApp = Bodies(
        JSONRoutes(served, (*generating, tokenizer_routes)),
        max_body_bytes=settings.max_body_bytes,
        max_bytes=settings.max_bodies_bytes,
        timeout_s=settings.body_timeout_s or None,
    )
    if keys:
        app = ApiKeys(app, keys, metrics)
    app = Drain(app, gate)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=[origin for origin in settings.cors_origins if origin != "localhost"],
            allow_origin_regex=LOCAL_ORIGIN if "localhost" in settings.cors_origins else None,
            allow_credentials=settings.cors_credentials,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-unknown-fields", "retry-after"],
        )
    if settings.metrics_port is not None:
        app = MetricsPort(app, served, settings.metrics_port)
    app = Hosts(app, settings)
    trace = make_trace(settings.otlp_endpoint, service.model_name)
    app = Observe(app, metrics, frozenset[str]().union(*map(_paths, generating)), trace)
    return RootPath(RequestId(app), settings.root_path)


def _openai_routes(service: Service, store: ResponseStore) -> APIRouter:
    router = APIRouter(route_class=JSONRoute, prefix="/v1", responses=_ERRORS)

    @router.post("/completions", response_model=Completion, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Answer:
        """Continue a prompt, or several; as a whole, or as server-sent events."""
        return await create_completion(service, body, request)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_STREAM)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Answer:
        """Answer a conversation; as a whole, or as server-sent events."""
        return await create_chat_completion(service, body, request)

    _add_responses_routes(router, service, store)
    return router


def _add_responses_routes(router: APIRouter, service: Service, store: ResponseStore) -> None:
    @router.post("/responses", response_model=ResponseObject, responses=_STREAM)
    async def responses(body: ResponsesRequest, request: Request) -> Answer:
        """Answer a conversation with a list of items; as a whole, or as server-sent events."""
        return await create_response(service, store, body, request)

    @router.post("/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, request: Request) -> InputTokensCount:
        """Count the tokens of a conversation."""
        return await count_input_tokens(service, store, body, request)

    @router.get("/responses/{response_id}", response_model=ResponseObject)
    async def response(response_id: str, request: Request) -> Response:
        """A response that was stored, or that is made in the background."""
        return stored_response(store, response_id, request)

    @router.get("/responses/{response_id}/input_items", response_model=ResponseItemList)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that it was asked with, a page at a time."""
        return stored_input_items(
            store, response_id, request, limit=limit, order=order, after=after
        )

    @router.post("/responses/{response_id}/cancel", response_model=ResponseObject)
    async def cancel(response_id: str, request: Request) -> Response:
        """End a response that is made in the background."""
        return await cancel_response(store, response_id, request)

    @router.delete("/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> DeletedResponse:
        await delete_response(store, response_id, request)
        return DeletedResponse(id=response_id, object="response", deleted=True)


def _anthropic_routes(service: Service) -> APIRouter:
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicError, "description": "An error."} for status in ("4XX", "5XX")
    }
    router = APIRouter(route_class=JSONRoute, prefix=errors.ANTHROPIC_PATH, responses=responses)

    @router.post("", response_model=AnthropicAnswer, responses=_STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Answer:
        """Answer a conversation as Anthropic's API does; as a whole, or as server-sent events."""
        return await create_message(service, body, request)

    @router.post("/count_tokens")
    async def tokens(body: CountTokensRequest, request: Request) -> CountTokensResponse:
        """Count the tokens of a conversation."""
        return await count_tokens(service, body, request)

    return router


def _tokenizer_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JSONRoute, responses=_ERRORS)

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokens_of_text(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt, or of a conversation as the chat template writes it."""
        return await tokenize(service, body, request)

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def text_of_tokens(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        return await detokenize(service, body, request)

    @router.get("/tokenizer_info")
    async def info() -> dict[str, Any]:
        """The tokenizer's special tokens and chat template."""
        return tokenizer_info(service)

    return router


def _status_routes(service: Service, gate: Gate, pair: Settings) -> APIRouter:
    router = APIRouter(responses=_ERRORS)
    client = service.client

    @router.get("/ready", response_model=Health, responses={503: {"model": Health}})
    @router.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health(request: Request) -> JSONResponse:
        """200 while requests are served; else 503 with the state, and to those who may ask the
        model also its reason.
        """
        if not gate.open:
            return JSONResponse({"status": "draining"}, 503)
        if client.state == "ready":
            return JSONResponse({"status": "ok"})
        report: dict[str, str] = {"status": client.state}
        # It may name files, and quote exceptions. Whoever may ask the model gets it as an error.
        if client.status_reason and not getattr(request.state, "only_probes", False):
            report["reason"] = client.status_reason
        return JSONResponse(report, 503)

    @router.get("/live", response_model=Health, responses={503: {"model": Health}})
    async def live() -> JSONResponse:
        """200 unless only a new start of the server could help: not while it loads or drains."""
        if client.state == "failed":
            return JSONResponse({"status": client.state}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    add_load_routes(router, client)
    add_info_route(router, service, pair)
    add_stats_route(router, client, service.metrics, gate)
    return router


def _paths(router: APIRouter) -> frozenset[str]:
    return frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
