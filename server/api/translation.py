"""Turns requests of other APIs into chat completions, which this server answers."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..base.errors import APIError
from ..base.unknown_fields import Body
from .chat_protocol import ChatCompletionRequest
from .protocol import SamplingFields


def chat_request(fields: dict[str, Any], *, of: Body) -> ChatCompletionRequest:
    """A chat with these fields, and with those fields of the request that all APIs share.

    Raises ValidationError, which names fields as chats do (see `renamed_fields`).
    """
    names = set(SamplingFields.model_fields)
    common = of.model_dump(include=names, exclude_unset=True, by_alias=True)
    return ChatCompletionRequest.model_validate(common | fields)


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors name the fields of a chat as the client knows them."""
    try:
        yield
    except ValidationError as error:
        problems = [
            {**each, "loc": ("body", *(names.get(str(part), part) for part in each["loc"]))}
            for each in error.errors(include_url=False, include_context=False)
        ]
        raise RequestValidationError(problems) from None
    except APIError as error:
        if (known := names.get(error.param or "")) is not None:
            error.message = re.sub(rf"^{error.param}\b", known, error.message)
            error.param = known
        raise
