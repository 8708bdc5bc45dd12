"""The keys that clients must send, and which of them a request came with."""

import hashlib
import hmac
import logging
from collections.abc import Collection, Mapping

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ..observe.metrics import Metrics
from .errors import APIError, cut

log = logging.getLogger("outrider.server.requests")

OPEN_PATHS = ("/health", "/live", "/ready")  # of probes, which send no key
OPEN_FOLDER = "/ui"  # of files that tell nothing: a browser sends no key for a page


def key_digest(key: str) -> str:
    """What stands for a key wherever it must be told from others: SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def request_key(request: HTTPConnection) -> str | None:
    """The digest of the key that a request came with; None on a server without keys."""
    digest: str | None = getattr(request.state, "key_digest", None)
    return digest


class ApiKeys:
    """Ask for one of the keys, everywhere but on the paths of probes and for the files of
    the page: as a bearer token, or as `x-api-key`, as Anthropic's clients send it.

    The digest of a right key is `key_digest` in the scope's state, on the paths of probes too.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._digests = [key_digest(key) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        header = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        digest = self._match(_given_key(headers))
        path = scope["path"]
        is_open = path.rstrip("/") in (*OPEN_PATHS, OPEN_FOLDER) or path.startswith(
            f"{OPEN_FOLDER}/"
        )
        if digest is not None:
            scope.setdefault("state", {})["key_digest"] = digest
        elif header or not is_open:
            self._tell(scope, "wrong" if header else "missing")
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

    def _tell(self, scope: Scope, reason: str) -> None:
        self._metrics.failed_keys.labels(reason).inc()
        client, _ = scope.get("client") or ("an unknown address", 0)
        path = cut(scope["raw_path"].decode("latin-1"))
        log.warning("%s key from %s: %s %s", reason, client, scope["method"], path)

    def _match(self, key: bytes | None) -> str | None:
        """The digest of the key, if it is one of ours."""
        digest = hashlib.sha256(key or b"").hexdigest()
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(digest, ours) for ours in self._digests]
        return digest if key is not None and any(matches) else None


def _given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """What a request came with: a bearer token, or else an x-api-key."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme:
        return token.strip() if scheme.lower() == b"bearer" else None
    return headers.get(b"x-api-key")
