"""The JSON of Ollama's API, and how it becomes a request of ours."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, FailFast, Field, Tag

from ..base.content import by_class
from ..base.errors import invalid_value, unsupported
from ..base.fields import MAX_TOOLS
from ..base.unknown_fields import IGNORED, Body
from .chat_protocol import ChatCompletionRequest
from .protocol import CompletionRequest, SamplingFields

# Options about how Ollama runs a model, not about its answer.
RUNTIME_OPTIONS = frozenset(
    {
        "draft_num_predict", "f16_kv", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu",
        "num_keep", "num_thread", "numa", "penalize_newline", "use_mlock", "use_mmap", "vocab_only",
    }
)  # fmt: skip
OPTION_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Fields of our requests that are no options: an answer of Ollama's is one text, and nothing else.
NO_OPTIONS = frozenset(
    (ChatCompletionRequest.model_fields | CompletionRequest.model_fields).keys()
    - SamplingFields.model_fields.keys()
    - {"include_stop_str_in_output", "max_tokens", "prediction", "skip_special_tokens", "stop"}
    - {"spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side"}
)
# Names of our fields in errors, as a client of Ollama's knows them.
FIELDS = {
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
    "response_format": "format",
    "repetition_penalty": "repeat_penalty",
    "chat_template_kwargs": "think",
}
LATEST = ":latest"  # which Ollama's clients add to a name without a tag


Format = Annotated[
    Annotated[Literal["", "json"], Tag("<name>")] | Annotated[dict[str, Any], Tag("<schema>")],
    Discriminator(
        by_class({str: "<name>", dict: "<schema>"}),
        custom_error_type="format_type",
        custom_error_message="expected 'json' or a JSON schema, which is an object",
    ),
]
Think = Annotated[
    Annotated[bool, Tag("<switch>")] | Annotated[Literal["low", "medium", "high"], Tag("<effort>")],
    Discriminator(
        by_class({bool: "<switch>", str: "<effort>"}),
        custom_error_type="think_type",
        custom_error_message="expected true, false, 'low', 'medium' or 'high'",
    ),
]


class _Request(Body):
    ignored_fields: ClassVar = IGNORED | {"keep_alive", "context", "template"}

    stream: bool = True
    format: Format | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    think: Think | None = None

    @property
    def asked_model(self) -> str | None:
        return None if self.model is None else self.model.removesuffix(LATEST)

    def _common(self) -> dict[str, Any]:
        """What chats and completions of ours share; raises APIError for what is no option."""
        if refused := sorted(self.options.keys() & NO_OPTIONS):
            name = refused[0]
            raise unsupported(name, f"{name} is no option of this API: leave it out of options.")
        fields = {
            OPTION_NAMES.get(name, name): value
            for name, value in self.options.items()
            if name not in RUNTIME_OPTIONS
        }
        if isinstance(limit := fields.get("max_tokens"), int) and limit < 0:
            fields["max_tokens"] = -1  # -2: fill the context, as no limit does
        if fields.get("repeat_last_n") in (0, -1, 64):  # the default of its clients
            del fields["repeat_last_n"]
        if isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        return fields | {"model": self.asked_model, "stream": self.stream}

    def _thinking(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return effort | {"chat_template_kwargs": {"enable_thinking": bool(self.think)}}


class OllamaChatRequest(_Request):
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(default_factory=list)
    tools: Annotated[list[Any], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def as_chat(self) -> ChatCompletionRequest:
        """Raises APIError, and ValidationError, which names fields as chats do."""
        own = {"messages": [_message(each) for each in self.messages], "tools": self.tools}
        return ChatCompletionRequest.model_validate(self._common() | self._thinking() | own)


class OllamaGenerateRequest(_Request):
    prompt: str = ""
    system: str = ""
    suffix: str = ""
    raw: bool = False

    @property
    def only_loads(self) -> bool:
        return not (self.prompt or self.suffix)

    def as_chat(self) -> ChatCompletionRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        own = {"messages": [*system, {"role": "user", "content": self.prompt}]}
        return ChatCompletionRequest.model_validate(self._common() | self._thinking() | own)

    def as_completion(self) -> CompletionRequest:
        own = {"prompt": self.prompt, "suffix": self.suffix or None}
        fields = self._common()
        fields.setdefault("max_tokens", -1)
        return CompletionRequest.model_validate(fields | own)


class OllamaModelRequest(Body):
    """Asks about a model; older clients call it `name`."""

    ignored_fields: ClassVar = IGNORED | {"verbose"}

    name: str | None = None

    @property
    def asked_model(self) -> str | None:
        given = self.model or self.name
        return None if given is None else given.removesuffix(LATEST)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chats have it: calls have arguments as text, and results name their call."""
    message = dict(given)
    if message.pop("images", None):
        raise invalid_value("messages", "images are not supported by this server: leave them out")
    if thinking := message.pop("thinking", None):
        message["reasoning_content"] = thinking
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(i, call) for i, call in enumerate(calls)]
        message.setdefault("content", "")
    if name := message.pop("tool_name", None):
        message["name"] = name
    return message


def _call(index: int, given: Any) -> Any:
    match given:
        case {"function": {"name": name, "arguments": dict() as arguments}}:
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            return {"id": f"call_{index}", "type": "function", "function": function}
    return given
