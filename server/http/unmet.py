"""Requests that meet no route: what is not served here, what is, and by which methods."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match, Mount
from starlette.types import Scope

from ..base.errors import APIError, cut, from_exception, route_path
from ..observe.tracing import OPERATIONS

# Routes of other servers, each with all below it, and what clients want there.
NOT_SERVED = {
    "/api/embed": "embeddings; run a server for them beside this one",
    "/api/embeddings": "embeddings; run a server for them beside this one",
    "/api/pull": "models to pull; the model is chosen when the server starts",
    "/v1/assistants": "assistants",
    "/v1/audio": "audio",
    "/v1/batches": "batches; `outrider run-batch` answers files of requests",
    "/v1/classify": "classification",
    "/v1/conversations": "conversations; /v1/responses goes on from a previous_response_id",
    "/v1/embeddings": "embeddings; run a server for them beside this one",
    "/v1/files": "files",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images": "images",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/messages/batches": "batches; `outrider run-batch` answers files of requests",
    "/v1/moderations": "moderation",
    "/v1/pooling": "pooling",
    "/v1/realtime": "realtime sessions",
    "/v1/rerank": "reranking",
    "/v1/responses/compact": "compaction of conversations; send a shorter one as input",
    "/v1/score": "scoring of pairs",
    "/v1/threads": "assistants",
    "/v1/unload_lora_adapter": "LoRA adapters",
    "/v1/uploads": "files",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "videos",
}


def install(app: FastAPI) -> None:
    """Say more than that there is no such route or method."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and not isinstance(error, APIError):
            error = _refusal(request.app, _outer(request.scope), error)
        return from_exception(error).response(request.scope)

    for status in (404, 405):
        app.add_exception_handler(status, answer)


def _outer(scope: Scope) -> Scope:
    """The scope as it came to the application: a mounted folder changes it."""
    return {**scope, "root_path": scope.get("app_root_path", scope.get("root_path", ""))}


def _refusal(app: FastAPI, scope: Scope, error: HTTPException) -> APIError:
    path = route_path(scope)
    served = f"Served are {', '.join([*OPERATIONS, '/v1/models'])}; /openapi.json lists all routes."
    for prefix, wanted in NOT_SERVED.items():
        if f"{path}/".startswith(f"{prefix}/"):
            message = f"This server has no {wanted}. {served}"
            return APIError(404, message, code="not_found")
    if error.status_code == 405:
        methods = ", ".join(_methods(app, scope))
        return APIError(
            405,
            f"{cut(path)} takes no {scope['method']}, but {methods}.",
            code="method_not_allowed",
            headers={"Allow": methods},
        )
    if path.startswith("/v1/"):
        return APIError(404, f"There is no {cut(path)} here. {served}", code="not_found")
    # Most often a base URL without /v1.
    message = "There is no such route. The APIs are below /v1; /openapi.json lists all routes."
    return APIError(404, message, code="not_found")


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods of all routes with this path."""

    def served(method: str) -> bool:
        return any(
            route.matches({**scope, "method": method})[0] is Match.FULL
            for route in app.routes
            if method == "GET" or not isinstance(route, Mount)  # a folder of files
        )

    methods = [method for method in ("DELETE", "GET", "POST") if served(method)]
    return sorted([*methods, "HEAD"]) if "GET" in methods else methods
