"""Where a body of JSON is received, counted, read, passed to its route, and let go."""

import inspect
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..api.answer import Answer
from ..api.protocol import APIResponse
from ..base.errors import EXPECTED, APIError, cut, response_to, route_path
from ..base.off_loop import off_loop


class JSONRoutes:
    """Call routes that have a JSON body by their path; `app` answers all other requests.

    FastAPI describes these routes, but does not call them: its own middleware, router and exit
    stacks would take a quarter of the time until the engine has the request. And this is stricter:
    a body is plain JSON that says so, without NaN. It is validated off the event loop if it is
    large. Nothing here refers to it while an `Answer` is generated: that keeps what it needs.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._routes = {  # by path: the endpoint, and what reads its body
            route.path: (route.endpoint, _body_type(route.endpoint))
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and route.body_field is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(route_path(scope)) if scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await _answered(Request(scope, receive, send), *route)
        except Exception as error:
            await response_to(error, scope)(scope, receive, send)
            if not isinstance(error, EXPECTED):
                raise
            return
        await response(scope, receive, send)


async def _answered(
    request: Request, endpoint: Callable[..., Any], kind: TypeAdapter[Any]
) -> Response:
    _check_headers(request)
    try:
        body = await _body(request, kind)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    answer = await endpoint(body=body, http=request)
    del body
    if isinstance(answer, Answer):
        request.state.held.keep(answer.kept_bytes, body=answer.keeps_body)
        return await answer.respond(request)
    if isinstance(answer, APIResponse):
        return Response(answer.to_json(), media_type="application/json")
    assert isinstance(answer, Response)
    return answer


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
