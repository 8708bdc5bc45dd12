"""The page at /ui, where / leads too, from files beside this code."""

from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ..base.errors import route_path

FILES = Path(__file__).parents[1] / "ui"

_HEADERS = {
    # Only our own files, and no other site may frame the page: it may hold an API key.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser may keep it, but must ask whether it has changed
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def add_ui(api: FastAPI) -> None:
    """Serve the page. It holds no secrets, and asks its reader for a key if one is needed."""

    @api.get("/", include_in_schema=False)
    @api.get("/ui", include_in_schema=False)
    async def ui(request: Request) -> Response:
        # Relative, because a proxy may add a prefix. The path may end with our own: /models/a.
        last = request.scope["raw_path"].decode("latin-1").rpartition("/")[2]
        if not last or route_path(request.scope) == "/ui":
            return RedirectResponse("ui/")
        return RedirectResponse(f"{last}/ui/")

    api.mount("/ui", _Files(directory=FILES, html=True))
