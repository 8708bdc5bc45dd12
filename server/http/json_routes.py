"""The way of requests with a body of JSON to their routes."""

from collections.abc import Iterable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..api.json_route import JSONRoute
from ..base.errors import EXPECTED, response_to, route_path


class JSONRoutes:
    """Call routes of JSON bodies by their path; `app` answers all other requests.

    FastAPI describes these routes, but does not call them: its own middleware, router and exit
    stacks would take a quarter of the time until the engine has the request.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._handlers = {
            route.path: route.get_route_handler()
            for router in routers
            for route in router.routes
            if isinstance(route, JSONRoute) and route.body_field is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._handlers.get(route_path(scope)) if scope["method"] == "POST" else None
        if handle is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handle(Request(scope, receive, send))
        except Exception as error:
            await response_to(error, scope)(scope, receive, send)
            if not isinstance(error, EXPECTED):
                raise
            return
        await response(scope, receive, send)
