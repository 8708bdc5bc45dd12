"""The output of a response, item by item, and the events that report how it grows."""

import uuid
from collections.abc import Iterator
from typing import Any

from ..text.call_stream import CallArguments, CallStart
from ..text.message_parser import Part, Text
from ..text.tool_calls import call_id
from .answer import Event
from .responses_protocol import Status


class OutputItems:
    """Grows by the parts of an answer; each call returns the events for what it added."""

    def __init__(self, *, short_ids: bool) -> None:
        self._short_ids = short_ids  # for calls
        self.items: list[dict[str, Any]] = []  # the complete items
        self._item: dict[str, Any] | None = None  # the item that is still growing
        self._pieces: list[str] = []  # of the growing item's text
        self._logprobs: list[dict[str, Any]] = []  # of the growing item's text

    def add(self, part: Part, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are those of the part's tokens, if it is text of a message."""
        match part:
            case Text():
                if not self._is_open("reasoning" if part.reasoning else "message"):
                    yield from self._open_text("reasoning" if part.reasoning else "message")
                yield from self._grow(part.text, logprobs)
            case CallStart():
                yield from self._open_call(part)
            case CallArguments():
                yield from self._grow(part.text, [])

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """Complete the growing item."""
        item, self._item = self._item, None
        if item is None:
            return
        text, place = "".join(self._pieces), self._place(item)
        match item["type"]:
            case "message":
                part = item["content"][0]
                part |= {"text": text, "logprobs": self._logprobs}
                place_in = place | {"content_index": 0}
                said = {"text": text, "logprobs": self._logprobs}
                yield "response.output_text.done", place_in | said
                yield "response.content_part.done", place_in | {"part": dict(part)}
            case "reasoning":
                part = item["content"][0]
                part["text"] = text
                place_in = place | {"content_index": 0}
                yield "response.reasoning_text.done", place_in | {"text": text}
                yield "response.content_part.done", place_in | {"part": dict(part)}
            case "function_call":
                item["arguments"] = text
                done = place | {"arguments": text, "name": item["name"]}
                yield "response.function_call_arguments.done", done
            case "custom_tool_call":
                item["input"] = text
                yield "response.custom_tool_call_input.done", place | {"input": text}
        if "status" in item:
            item["status"] = status
        self.items.append(item)
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items)}

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
        place = self._place(item) | {"content_index": 0}
        yield "response.content_part.added", place | {"part": dict(part)}

    def _open_call(self, start: CallStart) -> Iterator[Event]:
        item = {"call_id": call_id(short=self._short_ids), "name": start.name}
        if start.is_free_text:
            item |= {"id": _new_id("ctc"), "type": "custom_tool_call", "input": ""}
        else:
            item |= {"id": _new_id("fc"), "type": "function_call", "arguments": ""}
        yield from self._open(item | {"status": "in_progress"})

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        item = self._item
        assert item is not None
        self._pieces.append(text)
        place = self._place(item) | {"delta": text}
        match item["type"]:
            case "message":
                self._logprobs += logprobs
                more = {"content_index": 0, "logprobs": logprobs}
                yield "response.output_text.delta", place | more
            case "reasoning":
                yield "response.reasoning_text.delta", place | {"content_index": 0}
            case "function_call":
                yield "response.function_call_arguments.delta", place
            case "custom_tool_call":
                yield "response.custom_tool_call_input.delta", place


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
