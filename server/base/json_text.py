"""How this server writes JSON, unless a model of pydantic writes itself."""

from typing import Any

from pydantic_core import to_json


def json_text(value: Any) -> str:
    """The value without spaces, on one line; `json` takes six times as long."""
    return to_json(value).decode()
