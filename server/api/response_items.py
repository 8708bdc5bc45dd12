"""The output of a response, item by item, and the events that report how it grows."""

import uuid
from collections.abc import Iterator
from typing import Any

from ..text.call_stream import CallStart
from ..text.message_format import MessageFormat
from ..text.message_parser import Part, Text
from .answer import Event
from .responses_protocol import Status

# By the type of an item: what the events about its text are named after, and the text's field.
TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


class OutputItems:
    """Grows by the parts of an answer; each call returns the events for what it added."""

    def __init__(self, form: MessageFormat) -> None:
        self._form = form
        self.items: list[dict[str, Any]] = []  # the complete items
        self._item: dict[str, Any] | None = None  # the item that is still growing
        self._pieces: list[str] = []  # of the growing item's text
        self._logprobs: list[dict[str, Any]] = []  # of the growing item's text

    def add(self, part: Part, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are those of the part's tokens: none, unless it is text of a message."""
        if isinstance(part, CallStart):
            yield from self._open_call(part)
            return
        if isinstance(part, Text):
            kind = "reasoning" if part.reasoning else "message"
            if self._item is None or self._item["type"] != kind:
                yield from self._open_text(kind)
        yield from self._grow(part.text, logprobs)

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """Complete the growing item."""
        item, self._item = self._item, None
        if item is None:
            return
        name, field = TEXTS[item["type"]]
        place = self._place(item)
        said: dict[str, Any] = {field: "".join(self._pieces)}
        if item["type"] == "message":
            said["logprobs"] = self._logprobs
        parts = item.get("content", [])
        (parts[0] if parts else item).update(said)
        if item["type"] == "function_call":
            said["name"] = item["name"]
        yield f"response.{name}.done", place | said
        for part in parts:
            yield "response.content_part.done", place | {"part": dict(part)}
        item["status"] = status
        self.items.append(item)
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self.items)}
        return place | {"content_index": 0} if "content" in item else place

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._item, self._pieces, self._logprobs = item, [], []
        shown = item | ({"content": []} if "content" in item else {})
        yield "response.output_item.added", {"output_index": len(self.items), "item": shown}

    def _open_text(self, kind: str) -> Iterator[Event]:
        part: dict[str, Any]
        item: dict[str, Any]
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _new_id("rs"), "type": kind, "summary": [], "status": "in_progress"}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
            item["status"] = "in_progress"
        item["content"] = [part]
        yield from self._open(item)
        yield "response.content_part.added", self._place(item) | {"part": dict(part)}

    def _open_call(self, start: CallStart) -> Iterator[Event]:
        item = {"call_id": self._form.new_call_id(), "name": start.name}
        if start.is_free_text:
            item |= {"id": _new_id("ctc"), "type": "custom_tool_call", "input": ""}
        else:
            item |= {"id": _new_id("fc"), "type": "function_call", "arguments": ""}
        yield from self._open(item | {"status": "in_progress"})

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        item = self._item
        assert item is not None
        self._pieces.append(text)
        self._logprobs += logprobs
        delta: dict[str, Any] = {"delta": text}
        if item["type"] == "message":
            delta["logprobs"] = logprobs
        yield f"response.{TEXTS[item['type']][0]}.delta", self._place(item) | delta


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
