"""A running server, as `outrider chat` and `outrider bench` ask it."""

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(10.0, read=300.0)  # seconds; a request may wait in a queue


class RemoteError(RuntimeError):
    """The server cannot be reached, or refuses; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Which server to ask, with which key, for which model."""

    url: str  # without /v1
    headers: dict[bytes, bytes]
    model: str

    @property
    def chat_url(self) -> str:
        return f"{self.url}/v1/chat/completions"

    def body(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """A streamed chat request; fields that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        return {"model": self.model, "messages": messages, "stream": True, **given}


def find(url: str, api_key: str | None, model: str | None) -> Remote:
    """The server at `url`, which may end in /v1, and the model to ask. Raises RemoteError."""
    if "://" not in url:
        url = f"http://{url}"
    url = url.rstrip("/").removesuffix("/v1")
    headers: dict[bytes, bytes] = {}
    if api_key:
        headers[b"authorization"] = f"Bearer {api_key}".encode(errors="replace")
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise RemoteError(
            f"{url} is no URL of a server ({error}); give one such as {DEFAULT_URL}"
        ) from None
    except httpx.HTTPError as error:
        raise unreachable(url, error) from None
    if response.is_error:
        raise refusal(url, response)
    try:
        names = [entry["id"] for entry in response.json()["data"]]
        asked = model or names[0]
    except (ValueError, LookupError, TypeError):
        raise RemoteError(f"{url} answers, but not as an OpenAI-compatible server does") from None
    if model is not None and model not in names:
        raise RemoteError(f"{url} serves no model {model!r}; it serves {', '.join(names)}")
    return Remote(url, headers, asked)


def unreachable(url: str, error: Exception) -> RemoteError:
    why = str(error) or type(error).__name__
    remedy = "start one with `outrider serve`, or give its URL"
    if "CERTIFICATE_VERIFY_FAILED" in why:
        remedy = "trust its certificate: name the file in the environment variable SSL_CERT_FILE"
    elif "[SSL: " in why:
        remedy = "if it has no certificate, its URL begins with http://"
    return RemoteError(f"cannot reach a server at {url} ({why}); {remedy}")


def refusal(url: str, response: httpx.Response) -> RemoteError:
    """What an answer that is not a success says; it has been read."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.content.decode(errors="replace")[:200]
    hint = "; give --api-key, or set OUTRIDER_API_KEY" if response.status_code == 401 else ""
    return RemoteError(f"{url} answers {response.status_code}: {message}{hint}")


def has_tokens(choice: dict[str, Any]) -> bool:
    """Whether tokens have come: not if a chunk says only who speaks, or how far the prompt is."""
    said = any(value for name, value in choice["delta"].items() if name != "role")
    return said or bool(choice.get("trace") or choice.get("finish_reason"))


def chunk_of(line: str) -> dict[str, Any] | None:
    """The chunk in a line of an event stream, if any. Raises RemoteError for an error event."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    chunk: Any = None
    with contextlib.suppress(ValueError):
        chunk = json.loads(data)
    if not isinstance(chunk, dict):
        raise RemoteError(f"the server's answer has an event that is no object: {data[:80]}")
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise RemoteError(f"the server ended the answer: {message}")
    return chunk
