"""All answers that are not a success: one form of body, made from one type of exception."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from outrider.engine.api import InvalidRequestError, QueueFullError
from outrider.engine.processes.client import EngineUnavailableError

MAX_PROBLEMS = 10
MAX_VALUE_CHARS = 80
MAX_REASON_CHARS = 200
RETRY_AFTER_S = 1
ANTHROPIC_PATH = "/v1/messages"  # and every path below it
OLLAMA_PATH = "/api"  # likewise
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# Exceptions that are answers to what a client did, or say that the engine is not there.
EXPECTED = (
    HTTPException,
    RequestValidationError,
    QueueFullError,
    EngineUnavailableError,
    InvalidRequestError,
)


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which this server is shown."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def path_within(path: str, *prefixes: str) -> str:
    """The path without these prefixes, and without a slash at its end."""
    for prefix in prefixes:
        if f"{path}/".startswith(f"{prefix}/"):
            path = path.removeprefix(prefix)
    # /ui is a folder, unlike all else
    return path if path.startswith("/ui/") else path.rstrip("/") or "/"


class APIError(HTTPException):
    """An error as OpenAI clients read it.

    It is an HTTPException because FastAPI turns any other exception that is raised while reading
    the body into a 400 of its own.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        """`reason` is what the log says, if the message quotes text of the client."""
        super().__init__(status, message, headers)
        self.message = message
        self.reason = reason or message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def anthropic_body(self) -> dict[str, Any]:
        """The same error, as Anthropic's clients read it."""
        fallback = "invalid_request_error" if self.status_code < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status_code, fallback)
        return {"type": "error", "error": {"type": kind, "message": self.anthropic_message}}

    @property
    def anthropic_message(self) -> str:
        return self.message

    def ollama_body(self) -> dict[str, Any]:
        """The same error, as Ollama's clients read it."""
        return {"error": self.message}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer, in the form of the API that was called; the log gets the reason."""
        scope.setdefault("state", {})["reason"] = self.reason
        path = route_path(scope)
        if path.startswith(ANTHROPIC_PATH):
            body = self.anthropic_body()
        else:
            body = self.ollama_body() if path.startswith(f"{OLLAMA_PATH}/") else self.body()
        return JSONResponse(body, self.status_code, self.headers)


class ContextLengthError(APIError):
    """400: prompt and answer together are longer than the context.

    `at_least`: the prompt is so long that its tokens were not counted.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        prompt_tokens: int,
        max_tokens: int,
        param: str,
        at_least: bool = False,
    ) -> None:
        # Clients search for the first sentence, and for "However, you requested", word for word.
        super().__init__(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {'at least ' if at_least else ''}{prompt_tokens + max_tokens} tokens "
            f"({prompt_tokens} in the {param}, {max_tokens} in the completion). Please shorten the "
            f"{param} or ask for fewer tokens.",
            code="context_length_exceeded",
            param=param,
        )
        self._numbers = prompt_tokens, max_tokens, max_model_len

    @property
    def anthropic_message(self) -> str:
        # Agents read these numbers, to shorten the conversation or lower max_tokens.
        prompt_tokens, max_tokens, max_model_len = self._numbers
        if prompt_tokens >= max_model_len:
            return f"prompt is too long: {prompt_tokens} tokens > {max_model_len} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > "
            f"{max_model_len}, decrease input length or `max_tokens` and try again"
        )


def invalid_value(param: str | None, message: str, *, reason: str | None = None) -> APIError:
    """400: a field has a value that cannot be served; `reason` as for APIError."""
    return APIError(400, message, code="invalid_value", param=param, reason=reason)


def unsupported(param: str, message: str) -> APIError:
    """400: a field asks for something that this server does not do."""
    return APIError(400, message, code="unsupported_parameter", param=param)


def forbidden(param: str, message: str) -> APIError:
    """403: a field asks for something that this client may not have."""
    return APIError(403, message, code="not_allowed", param=param)


def model_not_found(given: str, served: str) -> APIError:
    return APIError(
        404,
        f"The model {cut(given)!r} does not exist; this server serves {served!r}.",
        code="model_not_found",
        param="model",
    )


def unavailable(message: str, *, code: str = "engine_unavailable") -> APIError:
    """503: the engine is not running, or stops; clients may try again."""
    return APIError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def queue_full(message: str) -> APIError:
    """429: the engine works but has no room. Not 503: routers would consider the replica down."""
    return APIError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})


def timed_out(timeout_s: float) -> APIError:
    return APIError(
        504,
        f"The request was not answered within {timeout_s:g} s, the maximum "
        "(server.request_timeout_s).",
        code="request_timeout",
    )


def dead_end(message: str) -> APIError:
    """400: the request's own parameters leave no token that is allowed; a retry is useless."""
    field = _field_named_by(message)
    # Of several fields of grammars the engine does not know which was sent.
    param = None if field == "grammar" else field
    return APIError(400, message, code="no_token_left", param=param)


def internal_error(message: str = "The server failed to answer this request.") -> APIError:
    return APIError(500, message, code="internal_error")


def from_exception(error: BaseException) -> APIError:
    """The error that a client gets for an exception of the layers below."""
    match error:
        case APIError():
            return error
        case QueueFullError():
            return queue_full(str(error))
        case EngineUnavailableError():
            return unavailable(str(error))
        case InvalidRequestError():
            return invalid_value(_field_named_by(str(error)), str(error))
        case RequestValidationError():
            return _from_validation(error.errors())
        case HTTPException(status_code=status, detail=detail, headers=headers):
            return APIError(status, str(detail), code="invalid_request", headers=headers)
    return internal_error()


def response_to(error: Exception, scope: Scope) -> JSONResponse:
    """The answer to an exception. One that is not EXPECTED must be raised again: then uvicorn logs
    it and closes the connection.
    """
    response = from_exception(error).response(scope)
    if not isinstance(error, EXPECTED):
        response.headers["Connection"] = "close"
    return response


def cut(value: object, max_chars: int = MAX_VALUE_CHARS) -> str:
    """The value as text, cut so that it can be echoed."""
    text = str(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def install(app: FastAPI) -> None:
    """Answer every exception of the app's routes with an error body."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return response_to(error, request.scope)

    for kind in (*EXPECTED, Exception):  # Starlette raises others again once they are answered
        app.add_exception_handler(kind, answer)


def _field_named_by(message: str) -> str | None:
    """The field that a message of the engine begins with."""
    path, colon, _ = message.partition(": ")
    field, *inner = path.split(".")
    return field if colon and all(map(str.isidentifier, (field, *inner))) else None


def _from_validation(problems: Sequence[Mapping[str, Any]]) -> APIError:
    first = problems[0]
    if first["type"] == "json_invalid":
        return APIError(
            400, f"The body is not valid JSON: {first['ctx']['error']}", code="invalid_json"
        )
    lines = [_describe(problem) for problem in problems[:MAX_PROBLEMS]]
    more = [f"and {len(problems) - MAX_PROBLEMS} more problems"] * (len(problems) > MAX_PROBLEMS)
    missing = first["type"] == "missing"
    return APIError(
        400,
        "; ".join([line + given for line, given in lines] + more),
        code="missing_required_parameter" if missing else "invalid_value",
        param=next((str(part) for part in _path(first)), None),
        reason="; ".join([line for line, _ in lines] + more),
    )


def _describe(problem: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong, and what was given."""
    message = _in_words(problem) or problem["msg"].removeprefix("Value error, ")
    message = cut(message, MAX_REASON_CHARS)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _path(problem))
    if problem["type"] == "dict_type":
        message = "expected an object"
    elif not path and problem["type"] == "missing":
        message = "The body is empty; expected an object."
    colon = "" if message.startswith("must ") else ":"
    where = f"{cut(path.removeprefix('.'))}{colon} " if path else ""
    given = problem.get("input")
    shown = isinstance(given, str | int | float) and problem["type"] != "missing"
    quoted = f" ({problem['type']}; given: {cut(repr(given))})" if shown else ""
    return f"{where}{message}", quoted


def _in_words(problem: Mapping[str, Any]) -> str | None:
    """What is wrong with the length of a field; None for other problems."""
    match problem:
        case {"type": "too_short" | "string_too_short", "ctx": {"min_length": 1}}:
            return "must not be empty"
        case {"type": "too_long", "ctx": {"max_length": most, "actual_length": given}}:
            return f"must have at most {most} items, not {given}"
    return None


def _path(problem: Mapping[str, Any]) -> list[int | str]:
    """The path to a field: names and list indices, without the tags of unions."""
    return [
        part
        for part in problem["loc"][1:]
        if isinstance(part, int) or (part.isidentifier() and part.islower())
    ]
