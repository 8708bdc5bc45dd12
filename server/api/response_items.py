"""The output of a response, item by item, and the events that report how it grows."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from ..text.message_format import MessageFormat
from ..text.message_parser import MessagePart
from .answer import Event
from .growth import AnswerBlock, Growth
from .responses_protocol import ResponseStatus

# By the type of an item: what the events about its text are named after, and the text's field.
TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


class OutputItems:
    """Grows by the parts of an answer; each call returns the events for what it added."""

    def __init__(self, form: MessageFormat, names: Mapping[str, dict[str, str]]) -> None:
        """`names` are those of tools in namespaces (`names_of_calls`)."""
        self._form = form
        self._names = names
        self.items: list[dict[str, Any]] = []  # the complete items
        self._growth = Growth()
        self._item: dict[str, Any] = {}  # the item that is still growing
        self._logprobs: list[dict[str, Any]] = []  # of the growing item's text

    def add(self, part: MessagePart, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are those of the part's tokens: none, unless it is text of a message."""
        for how, block, text in self._growth.add(part):
            if how == "opens":
                yield from self._open(block)
            elif how == "grows":
                yield self._grow(text, logprobs)
            else:
                yield from self._close(block, "completed")

    def close(self, status: ResponseStatus) -> Iterator[Event]:
        """Complete the growing item."""
        for _, block, _ in self._growth.close():
            yield from self._close(block, status)

    def _open(self, block: AnswerBlock) -> Iterator[Event]:
        self._item, self._logprobs = self._begun(block), []
        parts = self._item.get("content", [])
        shown = self._item | ({"content": []} if parts else {})
        yield "response.output_item.added", {"output_index": block.index, "item": shown}
        for part in parts:
            yield "response.content_part.added", self._place() | {"part": dict(part)}

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._logprobs += logprobs
        delta: dict[str, Any] = {"delta": text}
        if self._item["type"] == "message":
            delta["logprobs"] = logprobs
        return f"response.{TEXTS[self._item['type']][0]}.delta", self._place() | delta

    def _close(self, block: AnswerBlock, status: ResponseStatus) -> Iterator[Event]:
        item, place = self._item, self._place()
        name, field = TEXTS[item["type"]]
        said: dict[str, Any] = {field: block.text}
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
        yield "response.output_item.done", {"output_index": block.index, "item": item}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._item["id"], "output_index": len(self.items)}
        return place | {"content_index": 0} if "content" in self._item else place

    def _begun(self, block: AnswerBlock) -> dict[str, Any]:
        item: dict[str, Any]
        if block.kind == "reasoning":
            item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        elif block.kind == "text":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": [part]}
        else:
            name = block.started_call.name
            item = {"call_id": self._form.call_id(block.started_call)}
            item |= self._names.get(name, {"name": name})
            if block.kind == "free_text_call":
                item |= {"id": _new_id("ctc"), "type": "custom_tool_call", "input": ""}
            else:
                item |= {"id": _new_id("fc"), "type": "function_call", "arguments": ""}
        return item | {"status": "in_progress"}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
