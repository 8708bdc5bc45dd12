"""Tool calls, as the families of models write them.

A client can influence the model's text. So the work is proportional to the text, whatever
it is.
"""

import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import from_json

from .call_formats import CallFormat

# Raised if a text is not a call; RecursionError by json, for deeply nested values.
NOT_A_CALL = (ValueError, KeyError, TypeError, RecursionError)
MAX_SCHEMAS = 256  # looked at for the types of one parameter, which may have a million

# By a tool's name, then by a parameter's: a schema that says which types its value may have. It is
# all that answers are read by, and one table serves all answers of a request.
Tools = dict[str, dict[str, dict[str, list[str]]]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


def _call(given: Any) -> ToolCall:
    """One call from the JSON that models write; raises ValueError."""
    match given:
        case {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters"))
            arguments = from_json(arguments or "null") if isinstance(arguments, str) else arguments
            arguments = {} if arguments is None else arguments
            if isinstance(arguments, dict):
                call = ToolCall(name, json.dumps(arguments, ensure_ascii=False))
                (call.name + call.arguments).encode()  # fails at half of a surrogate pair
                return call
    raise ValueError("not a call")


def calls_of_field(value: Any) -> list[ToolCall]:
    """The calls in a field that a response template has read."""
    values = value if isinstance(value, list) else [value]
    return [
        _call(each.get("function", each) if isinstance(each, dict) else each) for each in values
    ]


def tools_by_name(tools: Iterable[dict[str, Any]]) -> Tools:
    """The table of these functions, as chats have them."""
    return {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}


def _parameters(function: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    match function.get("parameters"):
        case {"properties": dict(properties), **rest}:
            definitions = rest.get("$defs")
            return {
                name: {"type": types_of(schema, definitions)} for name, schema in properties.items()
            }
    return {}


def types_of(schema: Any, definitions: Any) -> list[str]:
    """The types that a parameter's value may have, as far as its schema says; else it is a string.

    A `$ref` is looked up in `definitions`, the tool's `$defs`; what is not there has no type.
    """
    left, seen = deque([schema]), set[str]()
    types: dict[str, None] = {}  # in the order of the schema
    for _ in range(MAX_SCHEMAS):
        if not left:
            break
        match left.popleft():
            case {"type": kind, **rest}:
                kinds = kind[:MAX_SCHEMAS] if isinstance(kind, list) else [kind]
                types |= dict.fromkeys(each for each in kinds if isinstance(each, str))
                if rest.get("nullable") is True:
                    types["null"] = None
            case {"$ref": str(ref)}:
                name = ref.removeprefix("#/$defs/")
                if isinstance(definitions, dict) and name in definitions and name not in seen:
                    seen.add(name)
                    left.appendleft(definitions[name])
            case {"anyOf": list(kinds)} | {"oneOf": list(kinds)} | {"allOf": list(kinds)}:
                left.extendleft(reversed(kinds[:MAX_SCHEMAS]))
            case _:
                types["string"] = None
    return list(types)


def json_calls(form: CallFormat, text: str, tools: Tools) -> list[ToolCall]:
    """The calls that a text consists of, as objects or lists of them; raises one of NOT_A_CALL."""
    calls: list[ToolCall] = []
    at, is_bare, separators = 0, form.is_bare(text), between(form)
    while (at := separators.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # matches anything
        value, at = json.JSONDecoder().raw_decode(text, at)
        calls += map(_call, value if isinstance(value, list) else [value])
    if not calls or (is_bare and any(call.name not in tools for call in calls)):
        raise ValueError("not a call")
    return calls


@cache
def between(form: CallFormat) -> re.Pattern[str]:
    """What may stand before, between and after calls."""
    markers = "|".join(map(re.escape, form.markers))
    return re.compile(rf"(?:[\s,;\]]|{markers})*+" if markers else r"[\s,;\]]*+")
