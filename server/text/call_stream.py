"""Reports tool calls while they are being written: first the name, then arguments in pieces.

A call that has been reported cannot be taken back. So the readers here accept only the forms that
models are trained to write. Anything else is left to the readers of whole calls (`tool_calls`).
"""

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex
from pydantic_core import from_json

from .call_formats import CallFormat, Tags
from .tool_calls import Tools

MAX_HEAD_CHARS = 512  # before a call's arguments, between two of them, or before a custom text
MAX_LITERAL_CHARS = 4096  # of Python, which takes a second to read a megabyte


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str
    is_free_text: bool = False  # the arguments are the tool's text, not JSON
    id: str | None = None  # if the model wrote one


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Another piece of the JSON arguments of the newest call."""

    text: str


CallPart = CallStart | CallArguments


def started(head: re.Match[str]) -> CallStart:
    return CallStart(head["name"], id=head.groupdict().get("id"))


def start_of_tail(text: str, markers: Collection[str]) -> int:
    """Where the longest end of the text starts that is the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def may_become_call(form: CallFormat, text: str) -> bool:
    """Whether a call could begin with this text, which is cut off."""
    short = len(text) <= MAX_HEAD_CHARS
    return short and any(head.fullmatch(text, partial=True) for head in _partial_heads(form))


@cache
def _partial_heads(form: CallFormat) -> list["regex.Pattern[str]"]:
    return [regex.compile(head.pattern) for head in form.heads]


class CallStream(ABC):
    """Reads a growing text that holds calls. The work is proportional to the text."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._unread = ""
        self._skipped: list[str] = []  # text since it gave up
        self._gave_up = False
        self.begun = False  # whether a call has been reported
        self.in_string = False  # whether the text ends within a string of JSON arguments

    def push(self, text: str) -> list[CallPart]:
        """What this text adds to the calls."""
        if self._gave_up:
            self._skipped.append(text)
            return []
        parts: list[CallPart] = []
        text, at = self._unread + text, 0
        while not self._gave_up and (end := self._read(text, at, parts)) > at:
            at = end
        self._unread = text[at:]
        return parts

    @abstractmethod
    def _read(self, text: str, at: int, parts: list[CallPart]) -> int:
        """Read on from `at`, add the calls found to `parts`, and return how far it got."""

    @abstractmethod
    def finish(self, *, closed: bool) -> list[CallPart]:
        """The rest of the last call, at the end of the text, or `closed` by a marker."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether a call has begun that is not complete."""

    @property
    def rest(self) -> str:
        """The text after the last call that is not a call which can be reported."""
        return "".join([self._unread, *self._skipped])

    def _head(self, text: str, at: int) -> re.Match[str] | None:
        """The head of the next call, if it is there. Gives up if none is and none can follow."""
        matches = (head.match(text, at, at + MAX_HEAD_CHARS) for head in self._form.heads)
        head = next(filter(None, matches), None)
        if head is None:
            self._gave_up = len(text) - at > MAX_HEAD_CHARS
            return None
        # A bare JSON object is a call only if it names a tool.
        self._gave_up = head["name"] not in self._tools and self._form.is_bare(text[at:])
        self.begun |= not self._gave_up
        return None if self._gave_up else head


class JSONCallStream(CallStream):
    """`{"name": …, "arguments": {…}}`, one or several, or Mistral's `name{…}`.

    The arguments are reported as they are written, and keys after them are left out.
    """

    _depth = 0  # of braces within the arguments, or within what is left out; 0: outside of both
    _leaves_out = False  # whether the braces are those of keys after the arguments
    _closes = False  # whether an object around the arguments is still open

    def _read(self, text: str, at: int, parts: list[CallPart]) -> int:
        if self._depth:
            return self._braces(text, at, parts)
        if self._closes:
            mark = _AFTER_ARGUMENTS.match(text, at)
            assert mark is not None  # the pattern matches any text
            self._closes = mark.end() == len(text) and not mark[1]
            self._gave_up = not self._closes and not mark[1]
            if mark[1] == ",":  # another key: on to the brace that closes the object
                self._depth, self._leaves_out = 1, True
            return mark.end()
        if (head := self._head(text, at)) is None:
            return at
        parts += started(head), CallArguments("{")
        self._depth, self._leaves_out, self._closes = 1, False, "object" in head.groupdict()
        return head.end()

    def _braces(self, text: str, at: int, parts: list[CallPart]) -> int:
        """Reads up to the brace that closes the arguments or their object, if it is there."""
        start = at
        while self._depth and (
            mark := (_IN_STRING if self.in_string else _OUTSIDE).search(text, at)
        ):
            if mark[0] == "\\" and mark.end() == len(text):
                at = mark.start()
                break
            at = mark.end() + (mark[0] == "\\")
            if mark[0] == '"':
                self.in_string = not self.in_string
            elif mark[0] != "\\":
                self._depth += 1 if mark[0] == "{" else -1
        else:
            at = len(text) if self._depth else at
        if at > start and not self._leaves_out:
            parts.append(CallArguments(text[start:at]))
        return at

    def finish(self, *, closed: bool) -> list[CallPart]:
        if not self._depth or not self._unread:
            return []
        text, self._unread = self._unread, ""
        return [] if self._leaves_out else [CallArguments(text)]

    @property
    def is_open(self) -> bool:
        return self._depth > 0 or self._closes


_AFTER_ARGUMENTS = re.compile(r"\s*+([,}]?)")
_OUTSIDE = re.compile(r'["{}]')
_IN_STRING = re.compile(r'["\\]')


class TagCallStream(CallStream):
    """`<function=name><parameter=key>value</parameter></function>`, as Qwen-Coder writes it, and
    other tags.

    String values are reported as they are written, others when they are complete.
    """

    def __init__(self, form: CallFormat, tools: Tools, tags: Tags) -> None:
        super().__init__(form, tools)
        self._tags = tags
        # The line break before the tag is no part of the value.
        self._ends = (tags.end_value, "\n" + tags.end_value) if tags.on_lines else (tags.end_value,)

    _name: str | None = None  # of the current call
    _num_values = 0
    _value: list[str] | None = None  # of the current parameter: what is held of it
    _is_text = False  # whether that value is a string, of which nothing is held
    _may_become_text = False  # whether it is one unless it is null

    def _read(self, text: str, at: int, parts: list[CallPart]) -> int:
        if self._value is not None:
            return self._read_value(self._value, text, at, parts)
        if self._name is None:
            head = self._head(text, at)
            if head is None:
                return at
            self._name, self._num_values = head["name"], 0
            parts += started(head), CallArguments("{")
            return head.end()
        tag = self._tags.value.search(text, at, at + MAX_HEAD_CHARS)
        if tag is None:
            self._gave_up = len(text) - at > MAX_HEAD_CHARS
            return at
        if tag["key"] is None:
            self._name = None
            parts.append(CallArguments("}"))
            return tag.end()
        types = self._tools.get(self._name, {}).get(tag["key"], _A_STRING)["type"]
        if says := tag.groupdict().get("string"):  # the model says what it is
            types = ["string"] if says == "true" else []
        self._may_become_text = "string" in types and "null" in types
        self._is_text = "string" in types and not self._may_become_text
        comma = ", " if self._num_values else ""
        quote = '"' if self._is_text else ""
        key = json.dumps(tag["key"], ensure_ascii=False)
        parts.append(CallArguments(f"{comma}{key}: {quote}"))
        self._num_values += 1
        self._value = []
        return tag.end()

    def _read_value(self, value: list[str], text: str, at: int, parts: list[CallPart]) -> int:
        end = text.find(self._tags.end_value, at)
        tail = at + start_of_tail(text[at:], self._ends) if end < 0 else end
        if end > at and text[end - 1] == "\n" and self._tags.on_lines:
            tail = end - 1
        piece = text[at:tail]
        if not self._is_text:
            value.append(piece)
            held = "".join(value) if self._may_become_text else ""
            if not any(null.startswith(held) for null in _NULLS):
                self._is_text, self._may_become_text = True, False
                parts.append(CallArguments(f'"{escaped(held)}'))
        elif piece:
            parts.append(CallArguments(escaped(piece)))
        if end < 0:
            return tail
        self._end_value(value, parts)
        return end + len(self._tags.end_value)

    def _end_value(self, value: list[str], parts: list[CallPart]) -> None:
        parts.append(CallArguments('"' if self._is_text else as_json("".join(value))))
        self._value = None

    def finish(self, *, closed: bool) -> list[CallPart]:
        parts: list[CallPart] = []
        bare = self._tags.bare
        if closed and self._name is None and bare and (head := bare.fullmatch(self._unread)):
            self._name, self.begun, self._unread = head["name"], True, ""
            parts += started(head), CallArguments("{")
        if closed and self._value is not None:
            text, self._unread = self._unread, ""
            if self._is_text:
                parts.append(CallArguments(escaped(text)))
            self._end_value([*self._value, text], parts)
        if closed and self._name is not None:  # whether or not a tag of its own ended it
            parts.append(CallArguments("}"))
            self._name = None
        return parts

    @property
    def is_open(self) -> bool:
        return self._name is not None


def as_json(text: str) -> str:
    """A value as JSON, which it may be already, or a literal of Python."""
    for read in (_json_value, _python_value):
        with suppress(*_NOT_A_VALUE):
            json_text = json.dumps(read(text), ensure_ascii=False, allow_nan=False)
            json_text.encode()  # fails at half of a surrogate pair
            return json_text
    return json.dumps(text, ensure_ascii=False)


def _json_value(text: str) -> Any:
    return from_json(text, allow_inf_nan=False)


def _python_value(text: str) -> Any:
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape would be quoted in the log
        return ast.literal_eval(text.strip())


_NOT_A_VALUE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_A_STRING = {"type": ["string"]}
_NULLS = ("null", "None")
