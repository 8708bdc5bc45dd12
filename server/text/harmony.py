"""Takes answers in gpt-oss's format apart: messages on channels.

Not by the package `openai-harmony`: its parser reads tokens of one vocabulary, which it fetches
over the network at the first use, and knows neither stop strings nor where in the text it is. The
checkpoint's own chat template writes the prompt.
"""

import math
import re

from .call_stream import MAX_HEAD_CHARS, CallArguments, CallStart, start_of_tail
from .message_parser import MessageParser, MessagePart, Text
from .tool_calls import Tools

START, MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", START, "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
# A message goes to a tool if its header says so, before the channel or after it.
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_BEGINS = ("<|", "to=")


class HarmonyParser(MessageParser):
    """`<|channel|>analysis<|message|>…<|end|>` is reasoning, a message to a function is a call, and
    any other is content. So is text without a header.

    The prompt ends with the header of the answer's first message, or within the message.
    """

    def __init__(self, prompt: str, tools: Tools) -> None:
        super().__init__(tools)
        self._in_header = True
        self._unread = ""
        self._is_reasoning = False
        self._name: str | None = None  # of the tool that the message calls
        self._is_empty = True  # nothing has come of the call
        tail = prompt[prompt.rfind(START) :] if START in prompt else ""
        self._at = -len(tail)  # of the unread text in the answer, in characters
        self.push(tail)
        self.num_read = 0
        self.reasoning = [(0, math.inf)] if self._is_reasoning and not self._in_header else []

    def push(self, text: str) -> list[MessagePart]:
        text, at, parts = self._unread + text, 0, list[MessagePart]()
        before = None
        while before != (at, self._in_header):
            before = at, self._in_header
            at = self._header(text, at) if self._in_header else self._body(text, at, parts)
        self._unread = text[at:]
        self._at += at
        self.num_read = max(0, self._at)
        return parts

    def flush(self, hidden: str = "") -> list[MessagePart]:
        text, self._unread = self._unread, ""
        self._at += len(text)
        self.num_read = max(0, self._at)
        if self._in_header:
            return []
        # The text is the beginning of a marker, which is no argument, and may be cut off by a stop.
        is_marker = self._name is not None or (text + hidden) in _ENDS
        parts = self._text("" if is_marker else text, self._at)
        # Without a marker that ends it, the call may have been cut off before its arguments.
        return [*parts, *(self._empty_call() if hidden in _ENDS else self._start_of_call())]

    def _header(self, text: str, at: int) -> int:
        end = text.find(MESSAGE, at, at + MAX_HEAD_CHARS)
        if end < 0:
            said = text[at : at + MAX_HEAD_CHARS].lstrip()
            begins = any(said.startswith(m) or m.startswith(said) for m in _HEADER_BEGINS)
            if begins and len(text) - at <= MAX_HEAD_CHARS:
                return at
            end, header = at, ""
        else:
            header, end = text[at:end], end + len(MESSAGE)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[2] if recipient is not None else ""
        is_function = recipient is not None and (bool(recipient[1]) or name in self._tools)
        self._name = name if is_function and self._tools else None
        # What is meant for a tool of the model's own is not for the client.
        is_for_others = bool(name) and not is_function
        self._is_reasoning = is_for_others or (channel is not None and channel[1] == "analysis")
        if self._is_reasoning:
            self._begin_reasoning(max(0, self._at + at))
        self._in_header, self._is_empty = False, True
        return end

    def _body(self, text: str, at: int, parts: list[MessagePart]) -> int:
        mark = _END.search(text, at)
        end = mark.start() if mark else at + start_of_tail(text[at:], _ENDS)
        parts += self._text(text[at:end], self._at + end)
        if mark is None:
            return end
        parts += self._empty_call()
        self._in_header = True
        after = end if mark[0] in (START, "<|channel|>") else mark.end()
        if self.reasoning and self.reasoning[-1][1] == math.inf:
            self._end_reasoning(self._at + after)
        return after

    def _text(self, text: str, end: int) -> list[MessagePart]:
        if self._name is not None:
            text = text.lstrip() if self._is_empty else text
            start = self._start_of_call() if text else []
            return [*start, CallArguments(text)] if text else []
        return [Text(text, reasoning=self._is_reasoning, end=end)] if text else []

    def _start_of_call(self) -> list[MessagePart]:
        if self._name is None or not self._is_empty:
            return []
        self._is_empty = False
        return [CallStart(self._name)]

    def _empty_call(self) -> list[MessagePart]:
        """A call that ends without arguments."""
        start = self._start_of_call()
        return [*start, CallArguments("{}")] if start else []
