"""Tool calls, as the families of models write them.

A client can influence the model's text. So each reader takes time proportional to the text,
whatever it is.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

CALL, END_CALL = "<tool_call>", "</tool_call>"
# Raised if a text is not a call; RecursionError by json, for deeply nested values.
NOT_A_CALL = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls, starting with one of the markers `open`."""

    shown_by: tuple[str, ...] = ()  # a chat template with all of these uses this format
    open: tuple[str, ...]
    close: str | None = None  # None: calls go on to the end
    at_start: bool = False  # the whole answer is calls, or none of it
    calls: Callable[[str, dict[str, Any]], list[ToolCall]]  # raises one of NOT_A_CALL
    short_ids: bool = False  # ids of calls must have nine letters and digits
    is_list: bool = False  # several calls are a JSON list
    is_xml: bool = False  # arguments are tags, not JSON
    names_before_json: bool = False  # only the arguments are JSON

    is_bindable: bool = False  # a grammar can hold calls to schemas, and leave text free

    def is_bare(self, text: str) -> bool:
        """Whether only its JSON marks a call in this text."""
        return "{" in self.open and text.lstrip().startswith("{")


def call_id(*, short: bool) -> str:
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


def shown_format(chat_template: str) -> CallFormat | None:
    """The first format whose marks are all in the template."""
    formats = FORMATS.values()
    return next((f for f in formats if all(mark in chat_template for mark in f.shown_by)), None)


def _call(given: Any) -> ToolCall:
    """One call from the JSON that models write; raises ValueError."""
    match given:
        case {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters", {}))
            arguments = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                call = ToolCall(name, json.dumps(arguments, ensure_ascii=False))
                (call.name + call.arguments).encode()  # fails at half of a surrogate pair
                return call
    raise ValueError("not a call")


def calls_of_field(value: Any, tools: dict[str, Any]) -> list[ToolCall]:
    """The calls in a field that a response template has read."""
    values = value if isinstance(value, list) else [value]
    return [
        _call(each.get("function", each) if isinstance(each, dict) else each) for each in values
    ]


def _hermes(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>"""
    return [_call(from_json(text.strip().removeprefix("<tool_call>")))]


def _qwen_xml(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""
    text = text.strip().removeprefix("<tool_call>").lstrip()
    opening, _, body = text.partition(">")
    name = opening.removeprefix("<function=")
    if name in ("", opening) or "\n" in name or not body.endswith("</function>"):
        raise ValueError("not a call")
    types = tools.get(name, {}).get("parameters", {}).get("properties")
    arguments = {
        key: typed_value(value, types.get(key) if isinstance(types, dict) else None)
        for key, value in _parameters(body)
    }
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Keys and values; parameters without an end or a key are left out."""
    for text in body.split("</parameter>")[:-1]:
        # Search stepwise, up to ">" or the end of a line: a pattern for a whole tag would search
        # the rest of the text again from each "<parameter=".
        for run in _KEY_RUN.finditer(text):
            key = run[1].partition("<parameter=")[2]
            if key and run[2] == ">":
                yield key, text[run.end() :].removeprefix("\n").removesuffix("\n")
                break


def is_text(schema: Any) -> bool:
    """Whether a parameter's value is a string, as far as its schema says."""
    return not isinstance(schema, dict) or schema.get("type", "string") == "string"


_KEY_RUN = re.compile(r"([^>\n]*)([>\n]|\Z)")


def typed_value(value: str, schema: Any) -> Any:
    """A parameter's text as the value that its schema asks for."""
    if not is_text(schema):
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError:
            pass
    return value


def _mistral(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} for each."""
    calls = []
    for part in text.strip().removeprefix("[TOOL_CALLS]").split("[TOOL_CALLS]"):
        head, brace, rest = part.partition("{")
        name, mark, given_id = head.lstrip().removesuffix("[ARGS]").partition("[CALL_ID]")
        if brace and _NAME.fullmatch(name) and (not mark or _ID.fullmatch(given_id)):
            calls.append(_call({"name": name, "arguments": from_json(brace + rest)}))
        else:
            calls += [_call(given) for given in from_json(part)]
    return calls


_NAME, _ID = re.compile(r"[\w.-]+"), re.compile(r"\w+")


def _llama3_json(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """{"name": …, "parameters": {…}} and nothing else; several are parted by semicolons."""
    text, calls = text.strip(), []
    rest = text.removeprefix("<|python_tag|>").lstrip()
    marked, at = text.startswith("<|python_tag|>"), 0
    while at < len(rest):
        value, at = json.JSONDecoder().raw_decode(rest, at)
        calls.append(_call(value))
        if not marked and calls[-1].name not in tools:
            raise ValueError("JSON, but no call")
        at = _SEMICOLON.match(rest, at).end()  # type: ignore[union-attr]  # matches anything
    return calls


_SEMICOLON = re.compile(r"\s*;?\s*")


def _list(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """[{"name": …, "arguments": {…}}, …]"""
    return [_call(given) for given in from_json(text)]


LIST = CallFormat(open=("[",), at_start=True, calls=_list, is_list=True)
# In this order: the first one that a chat template shows is used.
FORMATS: dict[str, CallFormat] = {
    "qwen_xml": CallFormat(
        shown_by=(CALL, "<function="),
        open=(CALL,),
        close=END_CALL,
        calls=_qwen_xml,
        is_xml=True,
    ),
    "hermes": CallFormat(
        shown_by=(CALL,), open=(CALL,), close=END_CALL, calls=_hermes, is_bindable=True
    ),
    "mistral": CallFormat(
        shown_by=("[TOOL_CALLS]",),
        open=("[TOOL_CALLS]",),
        calls=_mistral,
        short_ids=True,
        is_list=True,
        names_before_json=True,
    ),
    "llama3_json": CallFormat(
        shown_by=('"parameters": ',),
        open=("<|python_tag|>", "{"),
        at_start=True,
        calls=_llama3_json,
    ),
}
