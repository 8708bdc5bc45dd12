"""Reads one answer, and returns those parts that its request wants."""

import json
import re
from collections import deque
from collections.abc import Collection, Iterable

from .call_stream import MAX_HEAD_CHARS, CallArguments, CallStart
from .message_parser import MessageParser, MessagePart, Text
from .tokenizer import INCOMPLETE


class MessageReader:
    """Reads a growing text with a parser, and leaves out what the request does not want.

    `calls_only`: any text besides calls and reasoning is the rest of a call that was cut off.
    `free_text`: names of tools whose argument is a text; the answer calls them with
    `{"input": TEXT}`, and only the text is reported.
    """

    def __init__(
        self,
        parser: MessageParser | None,
        *,
        calls_only: bool,
        with_reasoning: bool,
        max_calls: int | None,
        free_text: Collection[str],
    ) -> None:
        self._parser = parser
        self._calls_only = calls_only
        self._with_reasoning = with_reasoning
        self._max_calls = max_calls
        self._free_text = frozenset(free_text)
        self._input: _InputStream | None = None  # of the current call
        self._skips_call = False
        self._ids = set[str | None]()  # that the model has written
        self._offsets: deque[int] = deque()  # of tokens not yet known to be reasoning or not
        self._num_reasoning = 0
        self._num_chars = 0  # read without a parser
        self._num_spans = 0  # spans of reasoning that all tokens so far begin after
        self._ended = False
        self.num_calls = 0

    @property
    def parses(self) -> bool:
        """Whether it can separate calls or reasoning from content."""
        return self._parser is not None

    def read(self, text: str, *, ended: bool, hidden: str = "") -> list[MessagePart]:
        """The parts that this text adds; `ended` if it is the last. `hidden` as in `flush`."""
        if self._parser is None:
            self._num_chars += len(text)
            return [Text(text, end=self._num_chars)] if text and not self._calls_only else []
        parts = self._parser.push(text)
        if ended:
            parts += self._parser.flush(hidden)
            self._ended = True
        return [shown for part in parts if (shown := self._shown(part)) is not None]

    def num_reasoning(self, offsets: Iterable[int]) -> int:
        """How many tokens of reasoning there are so far, including new tokens whose texts begin at
        these offsets.
        """
        if self._parser is None:
            return 0
        self._offsets += offsets
        while self._offsets and (self._ended or self._offsets[0] < self._parser.num_read):
            offset, spans = self._offsets.popleft(), self._parser.reasoning
            while self._num_spans < len(spans) and spans[self._num_spans][1] <= offset:
                self._num_spans += 1
            self._num_reasoning += (
                self._num_spans < len(spans) and spans[self._num_spans][0] <= offset
            )
        return self._num_reasoning

    def _shown(self, part: MessagePart) -> MessagePart | None:
        match part:
            case Text():
                hidden = not self._with_reasoning if part.reasoning else self._calls_only
                return None if hidden else part
            case CallStart(name, id=call_id):
                self._skips_call = self.num_calls == self._max_calls
                if self._skips_call:
                    return None
                self.num_calls += 1
                is_free = name in self._free_text
                wrapped = is_free and not isinstance(self._parser, RawCall)
                self._input = _InputStream() if wrapped else None
                if call_id in self._ids:  # clients distinguish calls by them
                    call_id = None
                self._ids.add(call_id)
                return CallStart(name, is_free_text=is_free, id=call_id)
            case CallArguments(text):
                if self._input is not None:
                    text = self._input.push(text)
                return CallArguments(text) if text and not self._skips_call else None


class RawCall(MessageParser):
    """Reads answers that are, as a whole, the argument of one call."""

    def __init__(self, name: str) -> None:
        super().__init__({})
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[MessagePart]:
        start: list[MessagePart] = [] if self._begun or not text else [CallStart(self._name)]
        self._begun |= bool(text)
        return [*start, CallArguments(text)] if text else []

    def flush(self, hidden: str = "") -> list[MessagePart]:
        return []


class _InputStream:
    """Turns pieces of `{"input": "TEXT"}` into pieces of the text; leaves other JSON as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._inside: bool | None = None  # whether within the text; None: not known yet
        self._ended = False

    def push(self, piece: str) -> str:
        if self._ended:
            return ""
        self._held += piece
        if self._inside is None:
            if head := _INPUT_HEAD.match(self._held):
                self._inside, self._held = True, self._held[head.end() :]
            elif len(self._held) > MAX_HEAD_CHARS or not _INPUT_HEAD_BEGUN.fullmatch(self._held):
                self._inside = False
        if self._inside is None:
            return ""
        if not self._inside:
            text, self._held = self._held, ""
            return text
        whole = _WHOLE_CHARS.match(self._held)
        assert whole is not None  # the pattern matches any text
        self._ended = self._held[whole.end() : whole.end() + 1] == '"'
        self._held = self._held[whole.end() :]
        try:
            text = json.loads(f'"{whole[0]}"', strict=False)
        except ValueError:
            return whole[0]  # an escape that JSON does not know
        return _LONE_SURROGATE.sub(INCOMPLETE, text)


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_INPUT_HEAD = re.compile(r'\{\s*+"input"\s*+:\s*+"')
_INPUT_HEAD_BEGUN = re.compile(r'\{\s*+("(i(n(p(u(t("(\s*+(:\s*+)?)?)?)?)?)?)?)?)?')
# Up to the closing quote or to an incomplete escape; a surrogate pair is one character.
_WHOLE_CHARS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+"
)
