"""Parses answers by the response template that comes with a model.

The operator chose the template, but a client can influence the text. So whatever the text, each
delimiter is searched for once, within a bounded part of it.
"""

import json
import logging
import math
from functools import partial
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS, parse_content

from outrider.kernels.reached import check_reached

from .message_parser import REASONING_FIELDS, MessageParser, MessagePart, Text
from .tool_calls import NOT_A_CALL, Tools, calls_of_field

log = logging.getLogger(__name__)

check_reached("transformers", ResponseParser, "_body", "_buffer", "_current", "_pos", "_spec")

# A delimiter may be a pattern that matches texts of any length, such as white space and a marker.
MAX_DELIMITER_CHARS = 512
# Searched at a time, in characters; a pattern may take time proportional to its square.
MAX_PIECE_CHARS = 1024
# Kept of the text already read, for patterns that look back.
KEPT_CHARS = 256
# Processor time for the tags of one call, whose pattern reads the whole call.
MAX_TAGS_S = 0.25

_CALLS = "tool_calls"


class TemplateParser(MessageParser):
    """transformers' parser of response templates, made to work in time proportional to the text.

    Left alone, it would keep the whole answer and copy it for every token; so its buffers are cut.
    If it fails, the rest is content.
    """

    def __init__(self, template: dict[str, Any], prompt: str, tools: Tools) -> None:
        super().__init__(tools)
        self._parser: ResponseParser | None = ResponseParser(
            template,
            prefix=prompt,
            tools=[
                {"name": name, "parameters": {"properties": properties}}
                for name, properties in tools.items()
            ],
        )
        calls = template["fields"].get(_CALLS, {})
        self._closes_by_pattern = "close_pattern" in calls
        close = calls.get("close") or ""
        self._close = close if isinstance(close, str) else close[0]
        self._call: list[str] = []  # text of the current call
        self._num_call_chars = 0
        self._unread: list[str] = []  # text of a long call that the parser has not got yet
        self._num_unread_chars = 0
        self._num_given = 0  # characters given to the parser

    def push(self, text: str) -> list[MessagePart]:
        self._unread.append(text)
        self._num_unread_chars += len(text)
        return [] if self._num_unread_chars < self._least_chars() else self._read(ended=False)

    def flush(self, hidden: str = "") -> list[MessagePart]:
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> list[MessagePart]:
        text, self._unread, self._num_unread_chars = "".join(self._unread), [], 0
        parts, start = list[MessagePart](), 0
        while start < len(text):
            end = start + max(MAX_PIECE_CHARS, self._least_chars())
            parts += self._feed(text[start:end])
            start = end
        return parts + self._feed(None) if ended else parts

    def _least_chars(self) -> int:
        """The least text worth giving to the parser, which copies the whole call each time."""
        share = self._num_call_chars // 16
        return min(share, MAX_PIECE_CHARS) if self._closes_by_pattern else share

    def _feed(self, text: str | None) -> list[MessagePart]:
        """One piece, or the end."""
        parser = self._parser
        self._num_given += len(text or "")
        if parser is None:
            return self._rest(text or "")
        held = parser._buffer[parser._pos :]
        try:
            events = parser.finalize()[1] if text is None else parser.feed(text)
            if len(parser._buffer) - parser._pos > MAX_DELIMITER_CHARS and text is not None:
                raise ValueError(f"no delimiter has more than {MAX_DELIMITER_CHARS} characters")
        except NOT_A_CALL as error:
            # Without the error's text, which contains the model's.
            log.warning("the response template of the model failed (%s)", type(error).__name__)
            self._parser = None
            return self._rest("".join([*self._blanks, *self._call, held, text or ""]))
        self._forget(parser)
        self._look_for_reasoning(parser, text)
        return [part for event in events for part in self._parts(event, ended=text is None)]

    def _rest(self, text: str) -> list[MessagePart]:
        self.num_read = self._num_given
        return [Text(text, end=self.num_read)] if text else []

    def _look_for_reasoning(self, parser: ResponseParser, text: str | None) -> None:
        """Find where reasoning begins and ends, as closely as can be seen from outside."""
        self.num_read = self._num_given - (len(parser._buffer) - parser._pos)
        is_open = bool(self.reasoning) and self.reasoning[-1][1] == math.inf
        if parser._current in REASONING_FIELDS and not is_open:
            self._begin_reasoning(max(0, self.num_read - len(text or "")))
        elif is_open and parser._current not in REASONING_FIELDS:
            self._end_reasoning(self.num_read)

    def _forget(self, parser: ResponseParser) -> None:
        """Drop what the parser does not need any more."""
        if parser._pos > MAX_PIECE_CHARS + KEPT_CHARS:
            parser._buffer = parser._buffer[parser._pos - KEPT_CHARS :]
            parser._pos = KEPT_CHARS
        name = parser._current
        if name not in (None, _CALLS) and parser._spec.fields[name].content == "text":
            parser._body = ""  # it has been reported in chunks

    def _parts(self, event: dict[str, Any], *, ended: bool) -> list[MessagePart]:
        field, kind = event["field"], event["type"]
        if field == _CALLS and kind == "region_chunk":
            self._call.append(event["text"])
            self._num_call_chars += len(event["text"])
        elif field == _CALLS and kind == "region_close":
            written, self._call, self._num_call_chars = "".join(self._call), [], 0
            read = partial(calls_of_field, event["value"])
            return self._called(read, written + ("" if ended else self._close))
        elif kind == "region_chunk" and field in REASONING_FIELDS:
            return [Text(event["text"], reasoning=True, end=self.num_read)]
        elif kind == "region_chunk" and field == "content":
            return self._content(event["text"])
        return []


def _json(text: str, args: dict[str, Any]) -> Any:
    """Like transformers' parser; strings may have delimiters of their own."""
    delims = args.get("string_delims", [])
    if delims and ("\x01" in text or "\x02" in text):
        raise ValueError("the text has characters that stand for strings here")
    working, strings = text, list[str]()
    for opening, closing in delims:
        pieces, at = list[str](), 0
        while (start := working.find(opening, at)) >= 0:
            end = working.find(closing, start + len(opening))
            if end < 0:
                break
            pieces += [working[at:start], f"\x01{len(strings)}\x02"]
            strings.append(working[start + len(opening) : end])
            at = end + len(closing)
        working = "".join([*pieces, working[at:]])
    if args.get("unquoted_keys", False):
        working = _BARE_KEY.sub(r'"\1":', working)
    if strings:
        working = _PLACE.sub(lambda place: json.dumps(strings[int(place[1])]), working)
    try:
        return json.loads(working)
    except json.JSONDecodeError:
        if args.get("allow_non_json"):
            return parse_content(text, "text", args)
        raise


_BARE_KEY = regex.compile(r"(?<=[{,])(\w+):")
_PLACE = regex.compile(r"\x01(\d+)\x02")


def _xml_inline(text: str, args: dict[str, Any]) -> dict[str, Any]:
    """Like transformers' parser, with a limit on the time of its pattern."""
    values: dict[str, Any] = {}
    value_parser = args.get("value_parser") or {"name": "text", "args": {"strip": False}}
    try:
        for tag in regex.finditer(
            args["tag_pattern"], text, flags=regex.DOTALL, timeout=MAX_TAGS_S
        ):
            groups = tag.groupdict()
            key = groups["key"]
            value = parse_content(
                groups.get("value", ""),
                value_parser.get("name", "text"),
                value_parser.get("args", {}),
            )
            if key in values and args.get("merge_duplicates", False):
                earlier = values[key]
                values[key] = earlier if isinstance(earlier, list) else [earlier]
                values[key].append(value)
            else:
                values[key] = value
    except TimeoutError:
        raise ValueError(f"the pattern of the tags takes more than {MAX_TAGS_S} s") from None
    return values


# In place of transformers' own, which take quadratic time; nothing else in this process uses those.
CONTENT_PARSERS |= {"json": _json, "xml-inline": _xml_inline}
