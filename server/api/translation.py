"""Requests of other APIs as chat completions, which is what this server answers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..http.errors import APIError
from .chat_protocol import ChatCompletionRequest
from .protocol import SamplingFields


def chat_request(
    fields: dict[str, Any], *, of: SamplingFields | None = None
) -> ChatCompletionRequest:
    """A chat with these fields, and with those of the request that every API has.

    Raises RequestValidationError, which names fields as chats have them (see `renamed_fields`).
    """
    common: dict[str, Any] = {}
    if of is not None:
        names = set(SamplingFields.model_fields)
        common = of.model_dump(include=names, exclude_unset=True, by_alias=True)
    try:
        return ChatCompletionRequest.model_validate(common | fields)
    except ValidationError as error:
        problems = [
            {**problem, "loc": ("body", *problem["loc"])}
            for problem in error.errors(include_url=False, include_context=False)
        ]
        raise RequestValidationError(problems) from None


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors tell the fields of a chat by the names that the client knows."""
    try:
        yield
    except RequestValidationError as error:
        problems = [
            {**each, "loc": ("body", *(names.get(part, part) for part in each["loc"][1:]))}
            for each in error.errors()
        ]
        raise RequestValidationError(problems) from None
    except APIError as error:
        error.param = names.get(error.param or "", error.param)
        raise
