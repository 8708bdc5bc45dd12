"""Takes a model's output apart as it arrives: content, reasoning, and tool calls."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from .call_formats import CallFormat, Thoughts
from .call_stream import (
    CallArguments,
    CallPart,
    CallStart,
    CallStream,
    JSONCallStream,
    TagCallStream,
    may_become_call,
    start_of_tail,
)
from .literal_calls import LiteralCallStream
from .tool_calls import NOT_A_CALL, ToolCall, Tools, between, json_calls

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    reasoning: bool = False
    end: int = field(default=0, compare=False)  # in the answer, in characters


MessagePart = Text | CallPart
# Text that may stand between two calls, and after the last.
_SEPARATORS = " \t\r\n]},;"


def call_stream(form: CallFormat, tools: Tools, text: str) -> CallStream:
    """A reader of calls; the first of them begins with this text."""
    if form.tags is not None:
        return TagCallStream(form, tools, form.tags)
    if form.literals is not None and not text.lstrip().startswith("{"):
        return LiteralCallStream(form, tools, form.literals)
    return JSONCallStream(form, tools)


class MessageParser(ABC):
    """Takes a growing text apart. The parts are the same however the text is cut into pieces.

    Text that looks like a call but is not one is content. A call that has begun stays a call, even
    if it is cut off. The work is proportional to the text.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.num_read = 0  # characters whose kind is known
        # Where reasoning begins and ends, including its markers; the last span may be open.
        self.reasoning: list[tuple[int, float]] = []
        self._blanks: list[str] = []  # held back: next to a call, blanks are not content
        self._after_call = False

    @abstractmethod
    def push(self, text: str) -> list[MessagePart]: ...

    @abstractmethod
    def flush(self, hidden: str = "") -> list[MessagePart]:
        """The rest, at the end of the text. It ended before a stop: `hidden` is how that begins."""

    def _begin_reasoning(self, at: int) -> None:
        self.reasoning.append((at, math.inf))

    def _end_reasoning(self, at: int) -> None:
        self.reasoning[-1] = (self.reasoning[-1][0], at)

    def _called(self, read: Callable[[], list[ToolCall]], written: str) -> list[MessagePart]:
        """The calls that `read` returns; if it raises, `written` is content."""
        try:
            calls = read()
        except NOT_A_CALL:
            return self._content(written)
        self._blanks, self._after_call = [], True
        return [
            part for call in calls for part in (CallStart(call.name), CallArguments(call.arguments))
        ]

    def _content(self, text: str) -> list[MessagePart]:
        if self._after_call and (not text or text.isspace()):
            self._blanks.append(text)
            return []
        return self._with_blanks(text)

    def _with_blanks(self, text: str, *, num_unread: int = 0) -> list[MessagePart]:
        """The text after the blanks that were held back; `num_unread` characters follow it."""
        text, self._blanks, self._after_call = "".join([*self._blanks, text]), [], False
        return [Text(text, end=self.num_read - num_unread)] if text else []


class _State(Enum):
    START = auto()  # at the start of an answer that may consist of calls
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class MarkerParser(MessageParser):
    """Parses the formats that we know, whose markers are fixed texts.

    With `thoughts`, the text between their markers is reasoning; the prompt may have `begun` it.
    """

    def __init__(
        self,
        form: CallFormat | None,
        tools: Tools,
        *,
        thoughts: Thoughts | None,
        begun: bool,
        calls_are_json: bool = False,
    ) -> None:
        super().__init__(tools)
        self._form = form
        self._calls_are_json = calls_are_json
        self._open = form.open if form else ()
        self._think = thoughts.open if thoughts else ""
        self._close = (form.close if form else None) or ""
        self._may_call_within = form is not None and not form.at_start
        # Where calls come at the start or not at all, so do thoughts.
        self._begins_once = form.at_start if form is not None else False
        self._state: _State = _State.CONTENT
        if begun:
            self._state = _State.REASONING
            self._begin_reasoning(0)
        elif self._begins_once:
            self._state = _State.START
        opening = (*self._open, *((self._think,) if self._think else ()))
        self._ends: dict[_State, tuple[str, ...]] = {
            _State.START: opening,
            _State.CONTENT: () if self._begins_once else opening,
            _State.REASONING: (thoughts.close,) if thoughts else (),
            _State.CALL: (self._close,) if self._close else (),
        }
        # No marker contains the first character of another, so markers cannot overlap.
        self._markers = {
            marker
            for state, markers in self._ends.items()
            if state is not _State.START
            for marker in markers
        }
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")
        self._call: list[str] = []  # text of the current call, unless it is reported as it arrives
        self._stream: CallStream | None = None
        self._tail = ""  # text that may be the beginning of a marker

    def push(self, text: str) -> list[MessagePart]:
        return self._read(text, ended=False)

    def flush(self, hidden: str = "") -> list[MessagePart]:
        is_cut_off = self._after_call and any(mark.startswith(self._tail) for mark in self._open)
        if is_cut_off or self._is_marker(self._tail, hidden):
            self._tail = ""
        parts = self._read("", ended=True)
        if self._state is _State.CALL:
            parts += self._end_call("")
        return parts if self._after_call else [*parts, *self._with_blanks("")]

    def _read(self, text: str, *, ended: bool) -> list[MessagePart]:
        text, self._tail = self._tail + text, ""
        if self._state is _State.START:
            num_given, text = len(text), self._begin(text, ended=ended)
            self.num_read += num_given - len(text)
            if self._state is _State.START:
                self._tail = text
                return []
        parts, at, start = list[MessagePart](), 0, self.num_read
        for marker in self._pattern.finditer(text):
            if marker[0] in self._ends[self._state]:
                self.num_read = start + marker.start()
                parts += self._add(text[at : marker.start()])
                if self._is_text_of_call:
                    at = marker.start()
                    continue
                self.num_read = start + marker.end()
                if self._state is _State.REASONING:
                    self._end_reasoning(self.num_read)
                elif marker[0] == self._think:
                    self._begin_reasoning(start + marker.start())
                parts += self._turn(marker[0])
                at = marker.end()
                if self._begins_once:  # calls or more thoughts may follow
                    return parts + self._read(text[at:], ended=ended)
        end = len(text) if ended else max(at, start_of_tail(text, self._markers))
        self._tail = text[end:]
        self.num_read = start + end
        return parts + self._add(text[at:end])

    def _is_marker(self, tail: str, hidden: str) -> bool:
        """Whether the end of the text is the shown part of a marker that a stop begins within."""
        ends = self._ends[self._state]
        if not hidden or not tail or self._is_text_of_call:
            return False
        written = tail + hidden
        return any(written.startswith(end) or end.startswith(written) for end in ends)

    @property
    def _is_text_of_call(self) -> bool:
        """Whether a marker would be text, because it stands within a string of a call."""
        return self._calls_are_json and self._stream is not None and self._stream.in_string

    def _begin(self, text: str, *, ended: bool) -> str:
        """Decide by the first characters; returns the text after leading blanks."""
        said = text.lstrip()
        blanks = text[: len(text) - len(said)]
        if not self.reasoning:
            self._blanks.append(blanks)
        if self._think and said.startswith(self._think):
            self._state, self._blanks = _State.REASONING, []
            self._begin_reasoning(self.num_read + len(blanks))
            return said[len(self._think) :]
        if said.startswith(self._open):
            self._state = _State.CALL
        elif ended or (said and not any(m.startswith(said) for m in self._ends[_State.START])):
            self._state = _State.CONTENT
        return said

    def _add(self, text: str) -> list[MessagePart]:
        if not text:
            return []
        if self._state is _State.CALL:
            return self._add_to_call(text)
        if self._state is _State.REASONING:
            return [Text(text, reasoning=True, end=self.num_read)]
        return self._content(text)

    def _turn(self, marker: str) -> list[MessagePart]:
        if self._state is _State.CALL:
            self._state = _State.CONTENT
            return self._end_call(marker)
        if self._state is _State.REASONING:
            self._state = _State.START if self._begins_once else _State.CONTENT
            return []
        if marker == self._think:
            self._state = _State.REASONING
            return [] if self._after_call else self._with_blanks("", num_unread=len(marker))
        self._state = _State.CALL
        return self._add_to_call(marker)

    def _add_to_call(self, text: str) -> list[MessagePart]:
        assert self._form is not None  # only a format opens calls
        if self._stream is None:
            self._stream = call_stream(self._form, self._tools, text)
        parts = self._stream.push(text)
        if not self._stream.begun:
            self._call.append(text)
        return [*parts]

    def _end_call(self, marker: str) -> list[MessagePart]:
        stream, self._stream = self._stream, None
        written, self._call = "".join(self._call), []
        parts: list[MessagePart] = (
            [*stream.finish(closed=bool(marker))] if stream is not None else []
        )
        assert self._form is not None  # only a format opens calls
        if stream is None or not stream.begun:
            # The first call of an answer may be none; another one has been cut off.
            is_cut_off = self._after_call and not marker and may_become_call(self._form, written)
            read = partial(json_calls, self._form, written, self._tools)
            return [] if is_cut_off else self._called(read, written + marker)
        self._blanks, self._after_call = [], True
        if not marker and (stream.is_open or may_become_call(self._form, stream.rest)):
            return parts
        rest = stream.rest.lstrip(_SEPARATORS)
        rest = rest[between(self._form).match(rest).end() :]  # type: ignore[union-attr]  # matches anything
        is_marker = any(mark.startswith(rest) for mark in self._form.markers)  # cut off
        if rest.rstrip(_SEPARATORS) and not is_marker:
            parts += self._called(partial(json_calls, self._form, rest, self._tools), rest)
        return parts

    def _content(self, text: str) -> list[MessagePart]:
        if not self._may_call_within:
            return super()._content(text)
        said = text.rstrip()
        blanks = text[len(said) :]
        parts = self._with_blanks(said, num_unread=len(blanks)) if said else []
        self._blanks.append(blanks)
        return parts
