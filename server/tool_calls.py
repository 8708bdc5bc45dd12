"""What a model says, taken apart: content, reasoning, and calls of tools.

Delimiters are found by transformers' streaming parser of response templates; a model that comes
with a template of its own is read by that, others by the format that their chat template shows.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from outrider.server.settings import ToolCallFormat

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

log = logging.getLogger("outrider.server.tool_calls")

_CALLS, _REASONING = "tool_calls", ("reasoning_content", "reasoning", "thinking")
# A prompt may end within the reasoning that it opens; the parser is then begun there.
_START = r"(?=<think>\s*\Z)|\Z(?<!<think>\s*)"
_MAX_OPENING_CHARS = 32
_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    reasoning: bool = False


Part = Text | ToolCall


@dataclass(frozen=True, slots=True)
class _Format:
    """How a family of models writes calls. `open` matches the place, not the marker, so that what
    turns out to be no call can be given back as it was written."""

    shown_by: tuple[str, ...]  # all are in the chat template
    open: str
    close: str | None  # None: calls go on to the end
    calls: Callable[[str, dict[str, Any]], list[ToolCall]]  # raises ValueError
    short_ids: bool = False  # ids of calls must have nine letters and digits


class MessageFormat:
    """How the served model marks what is not content; makes the parsers of answers."""

    def __init__(
        self,
        chat_template: str,
        response_template: dict[str, Any] | None = None,
        *,
        name: ToolCallFormat = "auto",
        reasoning: bool = False,
    ) -> None:
        known = _FORMATS.get(name) or (_shown(chat_template) if name == "auto" else None)
        self._format = known if response_template is None or name != "auto" else None
        self._template = response_template if name == "auto" else None
        self.has_calls = self._format is not None or self._template is not None
        self.has_reasoning = reasoning
        self.short_ids = self._format is not None and self._format.short_ids

    @property
    def delimiters(self) -> tuple[str, ...] | None:
        """Special tokens that the parser must see; None: all."""
        return None if self._template is not None else _MARKERS + _THINK

    def parser(
        self, prompt: str, tools: Sequence[dict[str, Any]], *, must_call: bool = False
    ) -> "MessageParser | None":
        """For one answer to this prompt; None where content is all that can be told apart.

        An answer that must call is a JSON list of calls, whatever the model's own format.
        """
        if must_call:
            template = {"start_anchor_pattern": _START, "fields": _fields_of(_LIST)}
            return MessageParser(template, "", tools, _LIST.calls)
        if self._template is not None and (tools or self.has_reasoning):
            return MessageParser(self._template, prompt, tools, _calls_of_field)
        fields = _fields_of(self._format if tools else None)
        if self.has_reasoning:
            fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
        if len(fields) == 1:
            return None
        template = {"start_anchor_pattern": _START, "fields": fields}
        calls = self._format.calls if self._format else _calls_of_field
        return MessageParser(template, prompt[-_MAX_OPENING_CHARS:], tools, calls)


class MessageParser:
    """Takes a growing text apart. The parts are the same however the text is cut into pieces.

    Text that looks like a call and is none, or is cut off, is content.
    """

    def __init__(
        self,
        template: dict[str, Any],
        prompt: str,
        tools: Sequence[dict[str, Any]],
        calls: Callable[[Any, dict[str, Any]], list[ToolCall]],
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # brings in torch

        self._parser: ResponseParser | None = ResponseParser(
            template, prefix=prompt, tools=list(tools)
        )
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._calls = calls
        self._close = template["fields"].get(_CALLS, {}).get("close") or ""
        self._call_text = ""  # of the call that is being written
        self._held = ""  # by the parser, as it may be part of a delimiter
        self._space: str | None = None  # None before a call; blanks between calls are no content

    def push(self, text: str) -> list[Part]:
        return self._read(text, lambda parser: parser.feed(text), ended=False)

    def flush(self) -> list[Part]:
        return self._read("", lambda parser: parser.finalize()[1], ended=True)

    def _read(
        self, text: str, read: "Callable[[ResponseParser], list[dict[str, Any]]]", *, ended: bool
    ) -> list[Part]:
        if self._parser is None:
            return [Text(text)] if text else []
        try:
            events = read(self._parser)
        except (ValueError, KeyError, TypeError) as error:
            # Only the template of a model itself can fail: the rest is content.
            log.warning("the response template of the model failed: %s", error)
            self._parser = None
            rest = self._call_text + self._held + text
            return [Text(rest)] if rest else []
        self._held = "" if events else self._held + text
        return [part for event in events for part in self._parts(event, ended=ended)]

    def _parts(self, event: dict[str, Any], *, ended: bool) -> Iterable[Part]:
        field, kind = event["field"], event["type"]
        if field == _CALLS and kind == "region_chunk":
            self._call_text += event["text"]
        elif field == _CALLS and kind == "region_close":
            written, self._call_text = self._call_text, ""
            try:
                calls = self._calls(event["value"], self._tools)
            except (ValueError, KeyError, TypeError):
                return self._content(written + ("" if ended else self._close))
            self._space = ""
            return calls
        elif kind == "region_chunk" and field in _REASONING:
            return [Text(event["text"], reasoning=True)]
        elif kind == "region_chunk" and field == "content":
            return self._content(event["text"])
        return []

    def _content(self, text: str) -> list[Part]:
        if self._space is None:
            return [Text(text)] if text else []
        self._space += text
        if self._space.isspace() or not self._space:
            return []
        text, self._space = self._space, None
        return [Text(text)]


def call_id(*, short: bool) -> str:
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"


def _fields_of(form: _Format | None) -> dict[str, Any]:
    """Of a response template: the text of a call is left as it is, for `form.calls` to read."""
    fields: dict[str, Any] = {"content": {"content": "text"}}
    if form is not None:
        fields[_CALLS] = {"open_pattern": form.open, "repeats": True}
        fields[_CALLS] |= {"content": "text", "content_args": {"strip": False}}
        if form.close:
            fields[_CALLS]["close"] = form.close
    return fields


def _shown(chat_template: str) -> _Format | None:
    formats = _FORMATS.values()
    return next((f for f in formats if all(mark in chat_template for mark in f.shown_by)), None)


def _call(given: Any) -> ToolCall:
    """One call of the JSON that models write; raises ValueError."""
    match given:
        case {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters", {}))
            arguments = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    raise ValueError("not a call")


def _calls_of_field(value: Any, tools: dict[str, Any]) -> list[ToolCall]:
    """What a response template makes of a call, or of several."""
    values = value if isinstance(value, list) else [value]
    return [_call(each.get("function", each)) for each in values]


def _hermes(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>"""
    return [_call(from_json(text.strip().removeprefix("<tool_call>")))]


def _qwen_xml(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"""
    found = re.fullmatch(r"\s*<tool_call>\s*<function=([^>\n]+)>(.*)</function>\s*", text, re.S)
    if not found:
        raise ValueError("not a call")
    name, body = found.groups()
    types = tools.get(name, {}).get("parameters", {}).get("properties")
    arguments = {
        key: _typed(value, types.get(key) if isinstance(types, dict) else None)
        for key, value in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.S)
    }
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as the value that its schema asks for."""
    if isinstance(schema, dict) and schema.get("type", "string") != "string":
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError:
            pass
    return value


def _mistral(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} for each."""
    calls = []
    for part in text.strip().removeprefix("[TOOL_CALLS]").split("[TOOL_CALLS]"):
        if found := re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(\{.*)", part, re.S):
            calls.append(_call({"name": found[1], "arguments": from_json(found[2])}))
        else:
            calls += [_call(given) for given in from_json(part)]
    return calls


def _llama3_json(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """{"name": …, "parameters": {…}} and nothing else; several are parted by semicolons."""
    marked = text.lstrip().startswith("<|python_tag|>")
    rest, calls = text.strip().removeprefix("<|python_tag|>"), []
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest.lstrip())
        calls.append(_call(value))
        if not marked and calls[-1].name not in tools:
            raise ValueError("JSON, but no call")
        rest = rest.lstrip()[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _list(text: str, tools: dict[str, Any]) -> list[ToolCall]:
    """[{"name": …, "arguments": {…}}, …]"""
    return [_call(given) for given in from_json(text)]


_LIST = _Format((), r"\A(?=\s*\[)", None, _list)
# The first that a chat template shows is taken.
_FORMATS: dict[str, _Format] = {
    "qwen_xml": _Format(
        ("<tool_call>", "<function="), r"(?=\s*<tool_call>)", "</tool_call>", _qwen_xml
    ),
    "hermes": _Format(("<tool_call>",), r"(?=\s*<tool_call>)", "</tool_call>", _hermes),
    "mistral": _Format(("[TOOL_CALLS]",), r"(?=\s*\[TOOL_CALLS\])", None, _mistral, short_ids=True),
    "llama3_json": _Format(
        ('"parameters": ',), r"\A(?=\s*(?:<\|python_tag\|>|\{))", None, _llama3_json
    ),
}
