"""Where a body of JSON is received, counted, read, and let go."""

import inspect
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from ..base.errors import APIError, cut
from ..base.off_loop import off_loop
from .answer import Answer
from .protocol import APIResponse, ErrorResponse

# What the OpenAPI document says about answers other than whole ones.
Described = dict[int | str, dict[str, Any]]
STREAM: Described = {
    200: {
        "description": "The answer; with `stream`, its chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


def errors_like(model: type[APIResponse]) -> Described:
    """Errors whose bodies are such models."""
    return {status: {"model": model, "description": "An error."} for status in ("4XX", "5XX")}


ERRORS = errors_like(ErrorResponse)


class JSONRoute(APIRoute):
    """Calls its endpoint with the body as a model, and answers with what this returns.

    Stricter than FastAPI: a body is plain JSON that says so, without NaN. It is validated off the
    event loop if it is large. Nothing here refers to it while an `Answer` is generated: that keeps
    what it needs.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        kind = _body_type(self.endpoint)

        async def handle(request: Request) -> Response:
            _check_headers(request)
            try:
                body = await _body(request, kind)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            answer = await self.endpoint(body=body, http=request)
            del body
            if isinstance(answer, Answer):
                request.state.held.keep(answer.kept_bytes, body=answer.keeps_body)
                return await answer.respond(request)
            if isinstance(answer, APIResponse):
                return Response(answer.to_json(), media_type="application/json")
            assert isinstance(answer, Response)
            return answer

        return handle


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type.lower() != "application/json":
        raise APIError(
            400,
            f"The Content-Type is {cut(content_type)!r}; send application/json.",
            code="invalid_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise APIError(
            400,
            f"The Content-Encoding is {cut(encoding)!r}; send the body as it is.",
            code="invalid_content_encoding",
        )


async def _body(request: Request, kind: TypeAdapter[Any]) -> Any:
    """The body as such a model; raises APIError or RequestValidationError."""
    json = b"".join([part async for part in request.stream()])
    request.state.held.read(json)
    return await off_loop(len(json), _validated, json, kind)


def _validated(json: bytes, kind: TypeAdapter[Any]) -> Any:
    problems: list[Any]
    try:
        value = from_json(json.removeprefix(BOM_UTF8), allow_inf_nan=False) if json else None
    except ValueError as error:
        problems = [{"type": "json_invalid", "loc": ("body",), "ctx": {"error": str(error)}}]
        raise RequestValidationError(problems) from None
    if value is None:
        problems = [{"type": "missing", "loc": ("body",), "msg": "Field required"}]
        raise RequestValidationError(problems)
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(problems) from None


def _body_type(endpoint: Callable[..., Any]) -> TypeAdapter[Any]:
    annotation: Any = inspect.signature(endpoint).parameters["body"].annotation
    return TypeAdapter(annotation)
