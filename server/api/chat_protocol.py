"""The JSON of chat completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, FailFast, Field, JsonValue, model_validator

from ..base.content import TextOr, TextParts, text_of
from ..base.fields import MAX_TOOLS, APIRequest, MaxTokens, NumLogprobs, UnknownField
from ..base.off_loop import MANY_CHARS
from ..grammar.tool_choice import ToolChoice
from .protocol import APIResponse, ChoiceFields, GenerationResponse, PromptLogprobs, TracedStep
from .tools import Tool, ToolCalls, unknown_in_tools

# What an assistant may have sent instead of content; clients send it back.
SAYING = frozenset({"refusal", "reasoning", "reasoning_content"})
# Other roles are up to the model's template.
ROLES: list[JsonValue] = ["system", "developer", "user", "assistant", "tool"]


class Message(APIRequest):
    """A turn of the conversation; any other field goes to the template unchanged."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {
                    "required": ["tool_calls"],
                    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array"}},
                },
                {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
            ]
        }
    )

    role: str = Field(min_length=1, json_schema_extra={"anyOf": [{"enum": ROLES}, {}]})
    content: TextOr[TextParts] | None = None
    tool_calls: ToolCalls | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        # An empty list of calls is an answer of nothing, as some servers report it.
        says = self.tool_calls is not None or (self.model_extra or {}).keys() & SAYING
        if self.content is None and not says:
            raise ValueError("a message of role 'assistant' needs content or tool_calls")
        return self

    @property
    def text(self) -> str:
        """Its content, or the refusal in place of content."""
        if self.content is None:
            return str((self.model_extra or {}).get("refusal") or "")
        return text_of(self.content)

    def for_template(self) -> dict[str, Any]:
        """With its content as one text."""
        message = self.model_dump(exclude_unset=True)
        if message.get("reasoning"):  # answers have both names; templates know only the other one
            message.setdefault("reasoning_content", message["reasoning"])
        message["content"] = self.text  # many templates write it in any case
        if not self.tool_calls:  # some templates ask only whether the list is there
            message.pop("tool_calls", None)
        return message

    def unknown_fields(self, path: str = "") -> Iterator[UnknownField]:
        yield from self._unknown_inside(path)  # other fields are the template's business


class ChatFields(APIRequest):
    """The fields that make up the prompt of a chat."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def _unknown_inside(self, path: str) -> Iterator[UnknownField]:
        yield from super()._unknown_inside(path)
        yield from unknown_in_tools(self.tools, path)

    @property
    def num_chars(self) -> int:
        """About how many characters its template reads: many, if it reads more than texts."""
        if self.tools or any(each.tool_calls or each.model_extra for each in self.messages):
            return MANY_CHARS
        return sum(64 + len(each.text) for each in self.messages)  # 64 for the template's own

    @property
    def prompts_an_answer(self) -> bool:
        """Whether the prompt ends with the header of a new turn of the assistant."""
        return self.add_generation_prompt and not self.continue_final_message

    @property
    def continued(self) -> str:
        """The text of the turn that the answer continues, if it does."""
        return self.messages[-1].text if self.continue_final_message else ""

    @property
    def has_two_ends(self) -> bool:
        """Whether the request itself, not a default, asks for both ways of ending the prompt."""
        asked = "add_generation_prompt" in self.model_fields_set
        return asked and self.add_generation_prompt and self.continue_final_message


class ChatCompletionRequest(ChoiceFields, ChatFields):
    other_names: ClassVar = ChoiceFields.other_names | {"n_predict": "max_tokens"}

    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None  # older name of max_completion_tokens
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True  # if reasoning can be separated from content
    echo: bool = False
    reasoning_effort: str | None = None

    @property
    def echoed(self) -> str:
        """What the answer begins with: the assistant's turn that it continues."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        variables |= self.chat_template_kwargs
        if "enable_thinking" in variables:  # as other templates call it
            variables.setdefault("thinking", variables["enable_thinking"])
        return variables


# An answer may have hundreds of thousands of these: a pydantic model takes ten times the memory.
@dataclass(frozen=True, slots=True)
class TopLogprob:
    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(APIResponse):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(APIResponse):
    name: str | None = None
    arguments: str


class CustomCall(APIResponse):
    name: str | None = None
    input: str


class ToolCallObject(APIResponse):
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ToolCallChunk(ToolCallObject):
    """What a stream adds to a call; only the first chunk has more than arguments."""

    index: int


class ChatMessage(APIResponse):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallObject] | None = None


class ChatChoice(APIResponse):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    trace: list[TracedStep] | None = None


class ChatCompletion(GenerationResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(APIResponse):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChatChunkChoice(APIResponse):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    trace: list[TracedStep] | None = None


class ChatCompletionChunk(GenerationResponse):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
