"""The JSON of the OpenAI API, as this server reads and writes it."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from typing_extensions import TypeAliasType

from outrider.engine.api import MAX_K, Verification

from ..base.content import TextOr, TextParts
from ..base.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_LOGITS_PROCESSORS,
    MAX_REGISTERED_NAME_CHARS,
    APIRequest,
    BadWordList,
    Int,
    LogitBias,
    LogprobTokenIds,
    MaxTokensOrZero,
    NumLogprobs,
    Prompt,
    Stop,
    TokenIds,
)
from ..base.unknown_fields import Body
from ..config.server_settings import MAX_STOP_TOKEN_IDS
from ..grammar.structured_outputs import ResponseFormat, StructuredOutputs


class StreamOptions(APIRequest):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Speculation(APIRequest):
    """Speculation for one request. It changes how fast the answer comes, not what it is."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    num_speculative_tokens: Int | None = Field(default=None, ge=0, le=MAX_K)
    verification: Verification | None = None
    # Of drafts; None: all.
    sources: list[Annotated[str, Field(max_length=MAX_REGISTERED_NAME_CHARS)]] | None = Field(
        default=None, max_length=16
    )
    metrics: bool | None = None  # report how many drafts were accepted; None: the server's setting
    trace: bool = False  # report the drafts of each step, and which were accepted


class PredictedContent(APIRequest):
    """What the client expects of the answer. Drafts are taken from it: it changes no answer."""

    type: Literal["content"]
    content: TextOr[TextParts]


class NamedProcessor(APIRequest):
    """A processor that the operator has registered, and its arguments."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=MAX_REGISTERED_NAME_CHARS)
    args: dict[str, Any] = Field(default_factory=dict)


def _by_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


LogitsProcessors = TypeAliasType(
    "LogitsProcessors",
    Annotated[
        list[Annotated[NamedProcessor, BeforeValidator(_by_name)]],
        FailFast(),
        Field(max_length=MAX_LOGITS_PROCESSORS),
    ],
)


class SamplingFields(Body):
    """How tokens are drawn. All APIs have these fields."""

    other_names: ClassVar[dict[str, str]] = {"repeat_penalty": "repetition_penalty"}

    stream: bool = False
    return_progress: bool = False  # report in a stream how far the prompt is computed
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: Int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0)
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWordList = Field(default_factory=list)
    min_tokens: Int = Field(default=0, ge=0)
    logits_processors: LogitsProcessors = Field(default_factory=list)
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Int | None = Field(default=None, ge=0)
    seed: Int | None = None
    stop_token_ids: Annotated[list[Int], FailFast()] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    priority: Int = 0
    speculation: Speculation = Speculation()
    metrics: bool | None = None  # report times; None: the server's setting
    user: str | None = None


class ChoiceFields(SamplingFields):
    """The fields that completions and chats share; both are answered with choices."""

    n: Int = Field(default=1, ge=1)
    prediction: PredictedContent | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    stop: Stop = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: Int | None = Field(
        default=None, ge=-1, json_schema_extra={"not": {"const": 0}}
    )
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: LogprobTokenIds | None = None  # to report in place of the likeliest
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def num_samples(self) -> int:
        """How many sequences to generate for each prompt."""
        return self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(ChoiceFields):
    other_names: ClassVar = ChoiceFields.other_names | {"n_predict": "max_tokens"}

    prompt: Prompt
    max_tokens: MaxTokensOrZero | None = 16
    logprobs: NumLogprobs | None = None
    echo: bool = False
    best_of: Int | None = Field(default=None, ge=1)
    suffix: str | None = None
    add_special_tokens: bool = True

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class APIResponse(BaseModel):
    """Fields that were never set are left out; a field that was set to None is null."""

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class ErrorBody(APIResponse):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorResponse(APIResponse):
    """The body of every answer that is not a success."""

    error: ErrorBody


# What the OpenAPI document says about answers other than whole ones.
Described = dict[int | str, dict[str, Any]]
STREAM: Described = {
    200: {
        "description": "The answer; with `stream`, its chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


def errors_like(model: type[APIResponse]) -> Described:
    """Errors whose bodies are such models."""
    return {status: {"model": model, "description": "An error."} for status in ("4XX", "5XX")}


ERRORS = errors_like(ErrorResponse)


class PromptTokensDetails(APIResponse):
    cached_tokens: int


class CompletionTokensDetails(APIResponse):
    reasoning_tokens: int
    # Of the drafts from a prediction, if the request has one.
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(APIResponse):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationMetrics(APIResponse):
    """How the drafts of a sequence fared; steps without drafts are not counted."""

    mean_acceptance_length: float  # tokens a step, including the recovered or bonus token
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [k + 1], index j: steps that accepted j drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # k


class RequestMetrics(APIResponse):
    """Of all sequences of a request together, in vLLM's terms."""

    time_to_first_token_ms: float | None = None  # from its first step
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None  # between two tokens; null if there are no two
    tokens_per_second: float | None = None  # from its first step to the last token
    speculative_decoding: SpeculationMetrics | None = None


class PromptProgress(APIResponse):
    """How far a prompt is computed, in llama.cpp's terms."""

    total: int
    cache: int  # of these, found in the cache
    processed: int  # so far, with those found in the cache
    time_ms: int  # since the first step


class GenerationResponse(APIResponse):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None  # changes if the same request may be answered otherwise
    choices: list[Any]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    prompt_progress: PromptProgress | None = None
    obfuscation: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprob:  # an answer may have hundreds of thousands of these
    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


# For each position of the prompt, its token and the alternatives asked for, by token id; None for
# the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


TokenKind = Literal["accepted", "recovered", "bonus", "plain"]


# An answer may have hundreds of thousands of these as well.
@dataclass(frozen=True, slots=True)
class DraftedToken:
    token: str  # by itself, as in `logprobs`
    token_id: int


@dataclass(frozen=True, slots=True)
class TracedToken(DraftedToken):
    text: str  # what it added to the text: nothing until a character is complete
    kind: TokenKind


class TracedStep(APIResponse):
    """One step of the engine, as one sequence saw it."""

    step: int  # 1 is the sequence's first
    source: str | None  # "prediction", "suffix", or the proposer; null: it had no drafts
    drafts: list[DraftedToken]
    num_accepted: int
    tokens: list[TracedToken]  # the tokens that it produced


class CompletionLogprobs(APIResponse):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(APIResponse):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    trace: list[TracedStep] | None = None


class Completion(GenerationResponse):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(APIResponse):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    # The same, as Anthropic's clients read it.
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


class ModelList(APIResponse):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool


class Health(APIResponse):
    status: str  # ok, draining, or the engine's state
    reason: str | None = None
