"""Items, of which conversations in OpenAI's responses are made, and their meaning as a chat."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from ..base.content import TextOr, TextParts, text_of, type_of
from ..base.fields import APIRequest
from .namespaces import one_name

MAX_ITEMS = 65_536  # of one request


class Item(APIRequest):
    """A piece of a conversation; clients send items of earlier answers back unchanged."""

    ignored_fields: ClassVar = frozenset(
        {"status", "phase", "caller", "created_by", "encrypted_content"}
    )

    id: str | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[TextParts]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: TextParts = Field(default_factory=list)
    content: TextParts = Field(default_factory=list)


class CallItem(Item):
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None

    @property
    def one_name(self) -> str:
        return one_name(self.name, self.namespace)


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOr[TextParts]


_ITEM_TYPES = {
    None: "message",
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}


def _item_kind(value: object) -> str | None:
    given = type_of(value)
    kind = _ITEM_TYPES.get(given) if given is None or isinstance(given, str) else None
    return kind and f"<{kind}>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<output>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="expected an item of type "
        + ", ".join(kind for kind in _ITEM_TYPES if kind),
    ),
]
InputItems = TypeAliasType(
    "InputItems", Annotated[list[InputItem], FailFast(), Field(max_length=MAX_ITEMS)]
)


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as messages of a chat; consecutive texts and calls of the assistant are one turn."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's turn, if more may follow

    def assistant() -> dict[str, Any]:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": []}
            messages.append(turn)
        return turn

    def say(field: str, text: str) -> None:
        pieces = assistant().setdefault(field, [])  # joined at the end: there may be thousands
        if text:
            pieces.append(text)

    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if "tool_calls" in assistant():
                    turn = None  # a text after calls begins a new turn
                say("content", text_of(item.content))
            case ReasoningItem():
                if turn is not None and (turn["content"] or "tool_calls" in turn):
                    turn = None
                say("reasoning_content", text_of(item.content or item.summary))
            case FunctionCallItem():
                function = {"name": item.one_name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case CustomCallItem():
                custom = {"name": item.one_name, "input": item.input}
                call = {"id": item.call_id, "type": "custom", "custom": custom}
                assistant().setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                turn = None
                output = text_of(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case MessageItem():
                turn = None
                messages.append({"role": item.role, "content": text_of(item.content)})
    for message in messages:
        for field in ("content", "reasoning_content"):
            if isinstance(pieces := message.get(field), list):
                message[field] = "".join(pieces)
    return messages
