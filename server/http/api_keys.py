"""API keys: which of them a request carries, and whether it may be answered."""

import hashlib
import hmac
import logging
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.errors import APIError, cut, route_path
from ..base.request_key import key_digest
from ..observe.metrics import Metrics

log = logging.getLogger("outrider.server.requests")

OPEN_PATHS = ("/health", "/live", "/ready")  # for probes, which send no key
OPEN_FOLDER = "/ui"  # files without secrets: a browser sends no key when it loads a page
_OPEN = (*OPEN_PATHS, OPEN_FOLDER, "/")  # the last leads to the folder


class ApiKeys:
    """Require one of the keys, except on the paths of probes and for the files of the page.

    A key is sent as a bearer token or, by Anthropic's clients, as `x-api-key`. The digest of a
    valid key becomes `key_digest` in the scope's state, also on the paths of probes.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._digests = [key_digest(key) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(reversed(scope["headers"]))
        header = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        digest = self._match(_given_key(headers))
        path = route_path(scope)
        is_open = path in _OPEN or path.startswith(f"{OPEN_FOLDER}/")
        if digest is not None:
            scope.setdefault("state", {})["key_digest"] = digest
        else:
            scope.setdefault("state", {})["only_probes"] = True
            if header or not is_open:
                self._report(scope, "wrong" if header else "missing")
        if digest is not None or is_open:
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY`, or as "
            "`x-api-key: KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope)(scope, receive, send)

    def _report(self, scope: Scope, reason: str) -> None:
        self._metrics.failed_keys.labels(reason).inc()
        client, _ = scope.get("client") or ("an unknown address", 0)
        path = cut(scope["raw_path"].decode("latin-1"))
        log.warning("%s key from %s: %s %s", reason, client, scope["method"], path)

    def _match(self, key: bytes | None) -> str | None:
        """The digest of the key, if it is one of ours."""
        digest = hashlib.sha256(key or b"").hexdigest()
        # Compare with every key, each in constant time, so that the time reveals nothing.
        matches = [hmac.compare_digest(digest, ours) for ours in self._digests]
        return digest if key is not None and any(matches) else None


def _given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request carries: its bearer token, or else its x-api-key."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme:
        return token.strip() if scheme.lower() == b"bearer" else None
    return headers.get(b"x-api-key")
