"""The parts of an answer put together again, and what two answers have in common."""

from collections.abc import Iterable
from typing import Any

from outrider.server.text.call_stream import CallArguments, CallStart
from outrider.server.text.message_parser import MessagePart, Text
from outrider.server.text.tool_calls import ToolCall


def joined(parts: Iterable[MessagePart]) -> list[Text | ToolCall]:
    """Neighbouring texts of a kind as one text, and calls with all of their arguments."""
    result: list[Text | ToolCall] = []
    for part in parts:
        last = result[-1] if result else None
        match part, last:
            case CallStart(), _:
                result.append(ToolCall(part.name, ""))
            case CallArguments(), ToolCall():
                result[-1] = ToolCall(last.name, last.arguments + part.text)
            case Text(), Text(reasoning=part.reasoning):
                result[-1] = Text(last.text + part.text, part.reasoning)
            case _:
                assert isinstance(part, Text)
                result.append(part)
    return result


def merged_calls(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream of chat completions, from what its chunks add to them."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        more = {key: value for key, value in chunk.items() if key != "index"}
        if "id" in chunk:
            assert chunk["index"] == len(calls)
            calls.append(more)
        else:
            assert chunk["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += more["function"]["arguments"]
    return calls


def without_ids(value: Any) -> Any:
    """A response, or any part of it, without what is new in each."""
    if isinstance(value, dict):
        new = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: without_ids(each) for key, each in value.items() if key not in new}
    return [without_ids(each) for each in value] if isinstance(value, list) else value
