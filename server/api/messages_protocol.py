"""The JSON of Anthropic's messages, and what it means as a chat."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from ..base.content import TextOr, by_type, text_of, type_of
from ..base.fields import MAX_TOOLS, APIRequest, Int, MaxTokens, StopString, UnknownField
from ..base.unknown_fields import IGNORED, Body
from .chat_protocol import ChatCompletionRequest
from .protocol import APIResponse, RequestMetrics, SamplingFields, TracedStep
from .translation import chat_request

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
CACHING = frozenset({"cache_control"})  # ignored: all prefixes are cached here


class TextBlock(APIRequest):
    ignored_fields: ClassVar = CACHING | {"citations"}

    type: Literal["text"]
    text: str


class ThinkingBlock(APIRequest):
    ignored_fields: ClassVar = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(APIRequest):
    """Encrypted reasoning that only its author can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(APIRequest):
    ignored_fields: ClassVar = CACHING | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


TextBlocks = TypeAliasType("TextBlocks", Annotated[list[TextBlock], FailFast()])


def _result_kind(value: object) -> str:
    return "<document>" if type_of(value) == "document" else "<text>"


class PlainText(APIRequest):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str

    @property
    def text(self) -> str:
        return self.data


class BlocksOfText(APIRequest):
    type: Literal["content"]
    content: TextOr[TextBlocks]

    @property
    def text(self) -> str:
        return text_of(self.content)


class DocumentBlock(APIRequest):
    """A document of text: what is in it, below what is said about it."""

    ignored_fields: ClassVar = CACHING | {"citations"}

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainText, Tag("<text>")] | Annotated[BlocksOfText, Tag("<content>")],
        Discriminator(
            by_type("text", "content"),
            custom_error_type="source_type",
            custom_error_message="expected a source of type text or content; other documents are "
            "not supported",
        ),
    ]
    title: str = ""
    context: str = ""

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


ResultBlocks = TypeAliasType(
    "ResultBlocks",
    Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("<text>")] | Annotated[DocumentBlock, Tag("<document>")],
                Discriminator(_result_kind),
            ]
        ],
        FailFast(),
    ],
)


class ToolResultBlock(APIRequest):
    ignored_fields: ClassVar = CACHING

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[ResultBlocks] = ""
    is_error: bool = False

    @property
    def text(self) -> str:
        """The result; that it is an error stands before it, since templates show nothing else."""
        text = text_of(self.content)
        return f"Error: {text}" if self.is_error else text


BLOCKS = ("text", "document", "thinking", "redacted_thinking", "tool_use", "tool_result")
ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        by_type(*BLOCKS),
        custom_error_type="block_type",
        custom_error_message=f"expected a block of type {', '.join(BLOCKS)}; images are not "
        "supported",
    ),
]
Blocks = TypeAliasType("Blocks", Annotated[list[ContentBlock], FailFast()])


class AnthropicMessage(APIRequest):
    role: Literal["user", "assistant", "system"]
    content: TextOr[Blocks]

    def turns(self) -> Iterator[dict[str, Any]]:
        """The turn as messages of a chat; each result of a tool is one message."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        said: list[ContentBlock] = []  # since the last result
        for block in self.content:
            if not isinstance(block, ToolResultBlock):
                said.append(block)
                continue
            if said:
                yield self._turn(said)
                said = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        if said or not self.content:
            yield self._turn(said)

    def _turn(self, blocks: list[ContentBlock]) -> dict[str, Any]:
        turn: dict[str, Any] = {
            "role": self.role,
            "content": "\n".join(
                b.text for b in blocks if isinstance(b, TextBlock | DocumentBlock)
            ),
        }
        if thoughts := [b.thinking for b in blocks if isinstance(b, ThinkingBlock)]:
            turn["reasoning_content"] = "".join(thoughts)
        if calls := [_call(b) for b in blocks if isinstance(b, ToolUseBlock)]:
            turn["tool_calls"] = calls
        return turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _runs_elsewhere(tool: dict[str, Any]) -> bool:
    """Whether Anthropic runs the tool itself: it has a type of its own, and is not offered here."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind != "custom"


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    match value:
        case {"name": str(name), "input_schema": dict()} if name:
            return value
    if _runs_elsewhere(value):
        return value
    raise ValueError('expected {"name": …, "input_schema": {…}, …}')


AnthropicTool = Annotated[dict[str, Any], AfterValidator(_tool)]


class AnthropicToolChoice(APIRequest):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, min_length=1)
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of type 'tool' needs a name")
        return self

    def as_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(APIRequest):
    ignored_fields: ClassVar = frozenset({"display"})

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Int | None = Field(default=None, ge=0)

    @property
    def template_variables(self) -> dict[str, Any]:
        budget = {} if self.budget_tokens is None else {"thinking_budget": self.budget_tokens}
        return {"enable_thinking": self.type != "disabled"} | budget


class OutputFormat(APIRequest):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(APIRequest):
    effort: str | None = None
    format: OutputFormat | None = None


class ConversationFields(Body):
    """The fields that make up the prompt."""

    ignored_fields: ClassVar = IGNORED | {
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
    }

    messages: Annotated[list[AnthropicMessage], FailFast(), Field(min_length=1)]
    system: TextOr[TextBlocks] = ""
    tools: Annotated[list[AnthropicTool], FailFast()] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def _unknown_inside(self, path: str) -> Iterator[UnknownField]:
        yield from super()._unknown_inside(path)
        for i, tool in enumerate(self.tools):
            if _runs_elsewhere(tool):
                yield UnknownField(f"{path}tools[{i}].type", None)

    @property
    def thinks(self) -> bool:
        return self.thinking.type != "disabled"

    def chat_fields(self) -> dict[str, Any]:
        """The same fields as a chat completion names them."""
        turns = [turn for message in self.messages for turn in message.turns()]
        system = text_of(self.system)
        last = turns[-1]
        fields: dict[str, Any] = {
            "messages": [*([{"role": "system", "content": system}] if system else []), *turns],
            "tools": [_function(tool) for tool in self.tools if not _runs_elsewhere(tool)],
            "tool_choice": self.tool_choice.as_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "include_reasoning": self.thinks,
            "chat_template_kwargs": self.thinking.template_variables | self.chat_template_kwargs,
            "reasoning_effort": self.output_config.effort,
            # The answer continues a turn that has begun.
            "continue_final_message": last["role"] == "assistant" and "tool_calls" not in last,
        }
        if self.output_config.format is not None:
            schema = {"schema": self.output_config.format.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class CountTokensRequest(ConversationFields):
    def as_chat(self) -> ChatCompletionRequest:
        return chat_request(self.chat_fields(), of=self)


class MessagesRequest(SamplingFields, ConversationFields):
    other_names: ClassVar = SamplingFields.other_names | {"n_predict": "max_tokens"}

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[StopString], FailFast()] = Field(default_factory=list)

    def as_chat(self) -> ChatCompletionRequest:
        own: dict[str, Any] = {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }
        if self.thinks and self.thinking.budget_tokens is not None:
            own["thinking_token_budget"] = self.thinking.budget_tokens
        return chat_request(self.chat_fields() | own, of=self)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
    return {"type": "function", "function": function}


class CountTokensResponse(APIResponse):
    input_tokens: int


class MessagesUsage(APIResponse):
    input_tokens: int  # without those found in the cache
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicAnswer(APIResponse):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: RequestMetrics | None = None
    trace: list[TracedStep] | None = None


class AnthropicErrorBody(APIResponse):
    type: str
    message: str


class AnthropicError(APIResponse):
    """Every answer of these routes that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorBody
