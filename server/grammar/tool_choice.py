"""`tool_choice`: whether an answer may, must or must not call tools, and which."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..api.fields import APIRequest
from ..http.errors import invalid_value
from .structured_outputs import GrammarText, lark_of_schema


class NamedFunction(APIRequest):
    name: str = Field(min_length=1)


class NamedTool(APIRequest):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<tool>")],
    Discriminator(lambda value: "<mode>" if isinstance(value, str) else "<tool>"),
]


def callable_tools(choice: ToolChoice, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that an answer may call; raises APIError if the choice is none of them."""
    if choice == "none":
        return []
    if choice == "auto":
        return tools
    if not tools:
        raise invalid_value("tool_choice", "tool_choice asks for a call, and there are no tools.")
    if choice == "required":
        return tools
    named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not named:
        raise invalid_value(
            "tool_choice",
            f"tool_choice names {choice.function.name!r}, which is not among the tools.",
        )
    return named


def calls_grammar(tools: list[dict[str, Any]], *, max_calls: int | None) -> GrammarText:
    """A grammar of JSON lists of calls to these tools, one at least; raises APIError."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object"})
        if "properties" in parameters:  # what a function does not know is of no use to it
            parameters.setdefault("additionalProperties", False)
        # References start at the root, wherever the schema they are in has gone.
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise invalid_value(
                    "tools", f"Two tools define {name!r} in their $defs, each in another way."
                )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return lark_of_schema(schema)
