"""Log lines for people and machines: a record is one line, even if it quotes what clients sent."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

MAX_MESSAGE_CHARS = 4096


def one_line(text: str) -> str:
    """The text without characters that begin a line or move the cursor, cut to a length."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}…"
    return _printable(text, lambda char: char.encode("unicode_escape").decode())


def _printable(text: str, escaped: Callable[[str], str]) -> str:
    if text.isprintable():  # as nearly every line is, and looking at each character takes longer
        return text
    return "".join(char if char.isprintable() else escaped(char) for char in text)


class LineFormatter(logging.Formatter):
    """Plain text: one line for each record, and its traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message.rstrip())
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return format_exception(ei[1])


class JSONFormatter(logging.Formatter):
    """One JSON object for each line; a record's `facts`, if any, are fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = format_exception(record.exc_info[1])
        text = json.dumps(line, ensure_ascii=False, default=str)
        # JSON allows characters that some readers take for a line end or a terminal command.
        return _printable(text, lambda char: json.dumps(char)[1:-1])


def format_exception(error: BaseException | None) -> str:
    """The traceback as Python writes it, but with each exception's message on one line."""
    return "" if error is None else "\n".join(_exception_lines(error, set()))


def _exception_lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _exception_lines(before, seen)
        yield "which led to:"
    yield "Traceback (most recent call last):"
    yield from "".join(traceback.format_tb(error.__traceback__)).splitlines()
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _exception_lines(part, seen)
            yield "which was part of:"
    yield one_line(f"{type(error).__name__}: {error}")
