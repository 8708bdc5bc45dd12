"""The HTTP application over one engine."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.processes.client import EngineClient

from ..api.chat import add_chat_routes
from ..api.completions import add_completion_routes
from ..api.messages import add_message_routes
from ..api.messages_protocol import AnthropicError
from ..api.ollama import add_ollama_routes
from ..api.protocol import ERRORS, Health, errors_like
from ..api.response_store import ResponseStore
from ..api.responses import add_response_routes
from ..api.sampling_defaults import NEUTRAL, SamplingDefaults
from ..api.service import VERSION, Service
from ..api.stored_responses import add_stored_response_routes
from ..api.tokenization import add_tokenizer_routes
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
from .middleware import Drain, Gate, MetricsPort, Observe, RequestId, RootPath
from .models import model_routes
from .stats import add_stats_route
from .ui import add_ui

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
    openai = APIRouter(prefix="/v1", responses=ERRORS)
    add_completion_routes(openai, service)
    add_chat_routes(openai, service)
    add_response_routes(openai, service, store)
    add_stored_response_routes(openai, store)
    anthropic = APIRouter(prefix=errors.ANTHROPIC_PATH, responses=errors_like(AnthropicError))
    add_message_routes(anthropic, service)
    ollama = APIRouter(prefix=errors.OLLAMA_PATH, include_in_schema=False)
    add_ollama_routes(ollama, service)
    tokenizer_routes = APIRouter(responses=ERRORS)
    add_tokenizer_routes(tokenizer_routes, service)
    models = model_routes(service, ERRORS)
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


def _status_routes(service: Service, gate: Gate, pair: Settings) -> APIRouter:
    router = APIRouter(responses=ERRORS)
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
