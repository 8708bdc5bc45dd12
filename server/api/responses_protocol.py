"""The JSON of OpenAI's responses, and what it means as a chat."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, FailFast, Field
from typing_extensions import TypeAliasType

from ..base.content import TextOr
from ..base.errors import unsupported
from ..base.fields import MAX_TOOLS, APIRequest, MaxTokens, NumLogprobs, UnknownField
from ..base.unknown_fields import IGNORED, REFUSED
from ..grammar.structured_outputs import JSONSchema
from .chat_protocol import ChatCompletionRequest
from .input_items import InputItems, Item, MessageItem, chat_messages
from .namespaces import one_name, tools_in
from .protocol import APIResponse, RequestMetrics, SamplingFields, TracedStep
from .tools import checked_tool
from .translation import chat_request

# Types of tools; others OpenAI runs itself.
RUN_BY_CLIENTS = ("function", "custom", "namespace")
LOGPROBS = "message.output_text.logprobs"
Metadata = TypeAliasType(
    "Metadata",
    Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        FailFast(),
        Field(max_length=16),
    ],
)


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse tools that OpenAI runs itself: they have a type of their own."""
    match value:
        case {"type": "function" | "custom" | "namespace", "name": str()}:
            with suppress(ValueError):
                for tool in tools_in(value):
                    checked_tool(_chat_tool(tool))
                return value
        case {"type": str(kind)} if kind not in RUN_BY_CLIENTS:
            return value
    raise ValueError(
        'expected {"type": "function", "name": …, "parameters": {…}}, '
        '{"type": "custom", "name": …, "format": {…}}, or '
        f'{{"type": "namespace", "name": …, "tools": […]}} with at most {MAX_TOOLS} of these'
    )


ResponseTool = Annotated[dict[str, Any], AfterValidator(_tool)]


def _choice(value: object) -> object:
    match value:
        case "none" | "auto" | "required" | {"type": "function" | "custom", "name": str()}:
            return value
        case {"type": str(kind)} if kind not in ("function", "custom"):
            return value
    raise ValueError('expected "none", "auto", "required", or {"type": …, "name": …}')


class TextFormat(APIRequest):
    ignored_fields: ClassVar = frozenset({"description", "strict"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: JSONSchema | None = Field(default=None, alias="schema")


class TextConfig(APIRequest):
    ignored_fields: ClassVar = frozenset({"verbosity"})

    format: TextFormat = TextFormat()


class Reasoning(APIRequest):
    ignored_fields: ClassVar = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: str | None = None


class ResponseStreamOptions(APIRequest):
    include_obfuscation: bool = False


class ResponsesRequest(SamplingFields):
    other_names: ClassVar = SamplingFields.other_names | {"n_predict": "max_output_tokens"}
    refused_fields: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED | {
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "prompt": (),
        "truncation": ("disabled",),
    }
    ignored_fields: ClassVar = IGNORED | {
        "access_programs",
        "background_options",
        "client_metadata",
        "max_tool_calls",
    }

    input: TextOr[InputItems] = Field(default_factory=list, validate_default=True)
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[ResponseTool], FailFast()] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: Annotated[Any, AfterValidator(_choice)] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    include: Annotated[list[str], FailFast()] = Field(default_factory=list)
    top_logprobs: NumLogprobs = 0
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    metadata: Metadata = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def _unknown_inside(self, path: str) -> Iterator[UnknownField]:
        yield from super()._unknown_inside(path)
        for i, tool in enumerate(self.tools):
            if tool["type"] not in RUN_BY_CLIENTS:
                yield UnknownField(f"{path}tools[{i}].type", None)

    @property
    def items(self) -> list[Item]:
        """The new part of the conversation."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return list(self.input)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs != 0

    def as_chat(self, earlier: Iterable[Item]) -> ChatCompletionRequest:
        """The chat that continues `earlier` items with the items of this request."""
        messages = chat_messages([*earlier, *self.items])
        if self.instructions:
            messages.insert(0, {"role": "developer", "content": self.instructions})
        fields: dict[str, Any] = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for given in self.tools for tool in tools_in(given)],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        form = self.text.format
        if form.type == "json_schema":
            schema = {"name": form.name, "schema": form.json_schema}
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        elif form.type == "json_object":
            fields["response_format"] = {"type": form.type}
        return chat_request(fields, of=self)


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form that chats use."""
    if tool["type"] == "function":
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        return {"type": "function", "function": function}
    custom = {name: tool[name] for name in ("name", "description") if tool.get(name)}
    match tool.get("format"):
        case {"type": "grammar", **grammar}:
            custom["format"] = {"type": "grammar", "grammar": grammar}
        case form:
            custom["format"] = form
    return {"type": "custom", "custom": custom}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    match choice:
        case {"type": "function" | "custom" as kind, "name": name, "namespace": str(namespace)}:
            return _chat_choice({"type": kind, "name": one_name(name, namespace)})
        case {"type": "function" | "custom" as kind, "name": name}:
            return {"type": kind, kind: {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            allowed = {"mode": mode, "tools": [_chat_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise unsupported(
        "tool_choice", "tool_choice names no function and no custom tool: others are not run here."
    )


class InputTokensDetails(APIResponse):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(APIResponse):
    reasoning_tokens: int


class ResponseUsage(APIResponse):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(APIResponse):
    """A response: as a whole, or as far as it has come."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metrics: RequestMetrics | None = None
    trace: list[TracedStep] | None = None


class ResponseItemList(APIResponse):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensCount(APIResponse):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(APIResponse):
    id: str
    object: Literal["response"]
    deleted: bool
