"""Which API key a request carries: known by a digest, which does not reveal the key."""

import hashlib

from starlette.requests import HTTPConnection


def key_digest(key: str) -> str:
    """Identifies a key without revealing it: SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def request_key(request: HTTPConnection) -> str | None:
    """The digest of a request's key; None on a server without keys."""
    digest: str | None = getattr(request.state, "key_digest", None)
    return digest
