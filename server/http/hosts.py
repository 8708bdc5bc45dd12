"""The host names by which a request may address this server."""

import functools
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.errors import APIError, cut, route_path
from ..config.server_settings import ServerSettings
from .api_keys import OPEN_PATHS

_PORT = re.compile(r":\d*$")  # of a Host header; an IPv6 address stands in brackets there


@functools.lru_cache(64)  # of names that clients choose
def is_loopback(host: str) -> bool:
    """Whether a name or address, without a port, can be reached from this machine only."""
    name = host.lower().rstrip(".")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class Hosts:
    """Refuse requests that are addressed to another host.

    The owner of a web page can let the page's own name point to this machine (DNS rebinding). To
    the browser of a reader this server is then the page's own site, and the page may read its
    answers. Requests without a Host header do not come from a browser. Probes ask by address:
    `only_probes` in the scope's state says that nothing else would be answered.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._names = tuple(name.lower().rstrip(".") for name in settings.allowed_hosts)
        self._only_loopback = (
            not self._names and settings.uds is None and is_loopback(settings.host)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for given in Headers(scope=scope).getlist("host"):
            if self._admits(given):
                continue
            if route_path(scope) not in OPEN_PATHS:
                await self._refusal(given).response(scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["only_probes"] = True
        await self._app(scope, receive, send)

    def _admits(self, given: str) -> bool:
        name = _PORT.sub("", given.strip()).strip("[]").lower().rstrip(".")
        if self._only_loopback:
            return is_loopback(name)
        return not self._names or any(
            name.endswith(ours[1:]) if ours.startswith("*") else name == ours
            for ours in self._names
        )

    def _refusal(self, given: str) -> APIError:
        return APIError(
            403,
            f"The Host {cut(given)!r} is none of this server's; to let it in, add its name to "
            "server.allowed_hosts.",
            code="host_not_allowed",
        )
