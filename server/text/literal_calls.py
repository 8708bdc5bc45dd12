"""Reads calls whose arguments are literals, and reports them as JSON while they are written."""

import json

from .call_formats import CallFormat, Literals
from .call_stream import (
    CallArguments,
    CallPart,
    CallStream,
    as_json,
    escaped,
    start_of_tail,
    started,
)
from .tokenizer import INCOMPLETE
from .tool_calls import Tools

_CLOSING = {"{": "}", "[": "]", "(": "]"}  # a tuple is a list
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}  # of escapes that give a character's number


class LiteralCallStream(CallStream):
    """`f(a="x", b=[1, None])` of Python, or `call:f{a:<|"|>x<|"|>,b:[1,null]}` of Gemma."""

    def __init__(self, form: CallFormat, tools: Tools, literals: Literals) -> None:
        super().__init__(form, tools)
        self._literals = literals
        self._closing: list[str] = []  # what closes the arguments and brackets that are open
        self._quote: str | None = None  # of the string that is open
        self._word: list[str] = []  # text since the last of brackets, commas, keys and strings
        self._is_value = False  # whether a key came before the word

    def _read(self, text: str, at: int, parts: list[CallPart]) -> int:
        if not self._closing:
            head = self._head(text, at)
            if head is None:
                return at
            parts += started(head), CallArguments("{")
            self._closing, self._is_value = ["}"], False
            return head.end()
        pieces: list[str] = []
        start = None
        while self._closing and at != start and at < len(text):
            start = at
            at = self._string(text, at, pieces) if self._quote else self._token(text, at, pieces)
        if any(pieces):
            parts.append(CallArguments("".join(pieces)))
        return at

    def _string(self, text: str, at: int, pieces: list[str]) -> int:
        """Reads up to the end of a string, or to what may be a part of it."""
        assert self._quote is not None
        marks = (self._quote, "\\") if self._literals.escapes else (self._quote,)
        found = [end for mark in marks if (end := text.find(mark, at)) >= 0]
        end = min(found) if found else at + start_of_tail(text[at:], marks)
        pieces.append(escaped(text[at:end]))
        if not found:
            return end
        if text.startswith(self._quote, end):
            pieces.append('"')
            end += len(self._quote)
            self._quote = None
            return end
        return self._escape(text, end, pieces)

    def _escape(self, text: str, at: int, pieces: list[str]) -> int:
        kind = text[at + 1 : at + 2]
        num_chars = 2 + _NUM_DIGITS.get(kind, 0)
        if not kind or len(text) - at < num_chars:
            return at
        written, digits = text[at : at + num_chars], text[at + 2 : at + num_chars]
        said = written
        if digits:
            try:
                said = chr(int(digits, 16))
                said.encode()  # fails at half of a surrogate pair
            except (ValueError, OverflowError):
                said = INCOMPLETE
        elif kind in _ESCAPES:
            said = _ESCAPES[kind]
        elif kind in ("\\", "'", '"'):
            said = kind
        pieces.append(escaped(said))
        return at + num_chars

    def _token(self, text: str, at: int, pieces: list[str]) -> int:
        for quote in self._literals.quotes:
            if text.startswith(quote, at):
                self._end_word(pieces)
                pieces.append('"')
                self._quote = quote
                return at + len(quote)
            if len(text) - at < len(quote) and quote.startswith(text[at:]):
                return at
        pattern = self._literals.value if self._is_value else self._literals.key
        if word := pattern.match(text, at):
            self._word.append(word[0])
            return word.end()
        char = text[at]
        if char in ":=":
            key = "".join(self._word).strip()
            self._word = []
            pieces.append(f"{json.dumps(key, ensure_ascii=False)}: " if key else ": ")
            self._is_value = True
            return at + 1
        self._end_word(pieces)
        if char in _CLOSING:
            self._closing.append(_CLOSING[char])
            pieces.append("[" if char == "(" else char)
            self._is_value = char != "{"
        elif char == ",":
            pieces.append(", ")
            self._is_value = self._closing[-1] == "]"
        else:
            pieces.append(self._closing.pop())
            self._is_value = False
        return at + 1

    def _end_word(self, pieces: list[str]) -> None:
        word, self._word = "".join(self._word).strip(), []
        if word:
            pieces.append(as_json(word))

    def finish(self, *, closed: bool) -> list[CallPart]:
        if not closed or not self._closing:
            return []
        pieces, text, self._unread = list[str](), self._unread, ""
        if self._quote:
            pieces.append(f'{escaped(text)}"')
        else:
            self._end_word(pieces)
        pieces += reversed(self._closing)
        self._quote, self._closing = None, []
        return [CallArguments("".join(pieces))]

    @property
    def is_open(self) -> bool:
        return bool(self._closing)
