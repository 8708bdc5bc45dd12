"""The tools of a request, and the calls in the turns that it repeats."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast, WithJsonSchema
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from ..base.fields import UnknownField, unknown_names
from ..grammar.tool_choice import INPUT

TOOL_FIELDS = frozenset({"type", "function", "custom"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict", "return", "format"})


def checked_tool(value: dict[str, Any]) -> dict[str, Any]:
    """Check a tool, and leave it as it is: templates print tools with their keys in order."""
    if value.get("type") is None:  # older clients leave it out
        value = {"type": "function"} | {key: each for key, each in value.items() if key != "type"}
    match value:
        case {"type": "function", "function": {"name": str(name)} as function} if name:
            # Null stands for what is left out.
            given = {key: each for key, each in function.items() if each is not None}
            if isinstance(given.get("parameters", {}), dict):
                return {**value, "function": given}
        case {"type": "custom", "custom": {"name": str(name), **rest}} if name:
            if _is_format(rest.get("format")):
                return value
    raise ValueError(
        'expected {"type": "function", "function": {"name": …, "parameters": {…}, …}}, or '
        '{"type": "custom", "custom": {"name": …, "format": {…}, …}}'
    )


def _is_format(value: object) -> bool:
    match value:
        case None | {"type": "text"}:
            return True
        case {"type": "grammar", "grammar": {"syntax": "lark" | "regex", "definition": str()}}:
            return True
    return False


def _tool_call(value: dict[str, Any]) -> dict[str, Any]:
    """A call of a function, with its arguments as an object, as templates expect, if they are."""
    match value:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}, **rest}:
            function = {"name": name, "arguments": {INPUT: text}}
            return {**rest, "type": "function", "function": function}
        # Older clients leave the type out.
        case {"function": {"name": str()} as function, **rest} if rest.get("type") in (
            None,
            "function",
        ):
            read = {"arguments": arguments_of(function.get("arguments"))}
            return {**rest, "type": "function", "function": function | read}
    raise ValueError('expected {"id": …, "type": "function", "function": {"name": …, …}}')


def arguments_of(given: object) -> dict[str, Any] | str:
    """The arguments of a call, which may be JSON in a text, or left out.

    A text that was cut off, as by max_tokens, gives the arguments up to there. A text that is no
    JSON object stays a text: a model may have written anything. Raises ValueError for anything
    that is neither text nor object.
    """
    read = given
    if isinstance(given, str):
        with suppress(ValueError):
            read = from_json(given or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    if read is None:
        return {}
    if isinstance(read, dict):
        return read
    if isinstance(given, str):
        return given
    raise ValueError("expected arguments that are a text or an object")


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments that a model wrote; nothing of them if they are no JSON object."""
    read = arguments_of(arguments)
    return read if isinstance(read, dict) else {}


def _schema(kind: str, *, required: list[str], name: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The OpenAPI schema of a dict that is passed on unchanged."""
    return {
        "type": "object",
        "required": required,
        "properties": {
            "type": {"const": kind} if "type" in required else {"enum": [kind, None]},
            kind: {
                "type": "object",
                "required": ["name", *(["input"] if "input" in more else [])],
                "properties": {"name": name, **more},
            },
        },
    }


_NAME = {"type": "string", "minLength": 1}
_FORMAT = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
        {
            "type": "object",
            "required": ["type", "grammar"],
            "properties": {
                "type": {"const": "grammar"},
                "grammar": {
                    "type": "object",
                    "required": ["syntax", "definition"],
                    "properties": {
                        "syntax": {"enum": ["lark", "regex"]},
                        "definition": {"type": "string"},
                    },
                },
            },
        },
    ]
}
Tool = Annotated[
    dict[str, Any],
    AfterValidator(checked_tool),
    WithJsonSchema(
        {
            "anyOf": [
                _schema(
                    "function",
                    required=["function"],
                    name=_NAME,
                    parameters={"type": ["object", "null"]},
                ),
                _schema("custom", required=["type", "custom"], name=_NAME, format=_FORMAT),
            ]
        }
    ),
]
GivenToolCall = Annotated[
    dict[str, Any],
    AfterValidator(_tool_call),
    WithJsonSchema(
        {
            "anyOf": [
                _schema(
                    "function",
                    required=["function"],
                    name={"type": "string"},
                    # A string holds the object as JSON, or what a model wrote in its place.
                    arguments={"type": ["object", "string", "null"]},
                ),
                _schema(
                    "custom",
                    required=["type", "custom"],
                    name={"type": "string"},
                    input={"type": "string"},
                ),
            ]
        }
    ),
]
ToolCalls = TypeAliasType("ToolCalls", Annotated[list[GivenToolCall], FailFast()])


def unknown_in_tools(tools: list[dict[str, Any]], path: str) -> Iterator[UnknownField]:
    for i, tool in enumerate(tools):
        place = f"{path}tools[{i}]."
        yield from unknown_names(tool, TOOL_FIELDS, path=place)
        kind = tool["type"]
        yield from unknown_names(tool[kind], FUNCTION_FIELDS, path=f"{place}{kind}.")
