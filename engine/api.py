"""What the engine takes and returns: plain data, made of token ids and numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Verification = Literal["token", "block", "match"]  # kernels.verify.sampling.Rule, by name
# A head counts as a draft model; a grammar drafts where it leaves no choice.
SourceName = Literal["prediction", "grammar", "suffix", "draft_model"]
EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]

# A lower temperature is greedy, as in vLLM: only a tie could still change the token, and dividing
# the logits by it could overflow float32.
MIN_TEMPERATURE = 1e-5
MAX_TOP_K = 2**31 - 1  # slots hold 32 bits; no vocabulary is as large
MAX_K = 32  # kernels.verify.sampling.MAX_DRAFTS
MAX_LOGPROBS = 128  # alternatives reported for one token
# A larger penalty, or one below the inverse, could push a logit out of float32's range.
MAX_REPETITION_PENALTY = 1e6

# Steps are counted by their tokens, up to each of these.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# (stage, done, total): `total` is 0 while unknown; done == total > 0 ends the stage.
ReportProgress = Callable[[str, int, int], None]


def ignore_progress(*progress: object) -> None:
    """A ReportProgress for callers that show nothing."""


class QueueFullError(RuntimeError):
    """The queue has no room for these sequences at the moment."""


class InvalidRequestError(ValueError):
    """These sequences can never run as requested."""


@dataclass(frozen=True, slots=True)
class ProcessorChoice:
    """The name of a registered logits processor, and the arguments to build it with."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many tokens the thoughts of an answer may have, all together and without their markers.

    One token opens a thought, and `num_opening` more may belong to its marker; one token closes it.
    `begun`: the prompt ends within a thought, whose tokens count, too.
    """

    num_tokens: int
    open_token_id: int
    close_token_id: int
    num_opening: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence. A request with `n > 1` submits n sequences, n seeds.

    A `temperature` of 0, or below MIN_TEMPERATURE, is greedy. `top_k` 0, `top_p` 1 and `min_p` 0
    turn these filters off. `engine.logit_edits` documents what the fields from `presence_penalty`
    to `thinking` do to the logits, and in which order. An empty `allowed_token_ids` allows
    every token; each of `bad_words` is a sequence of token ids.

    `seed` is a 64-bit key (0 <= seed < 2**64): every random draw of the sequence is a function of
    the seed and of token positions. `logprobs` is how many alternatives to report with each new
    token (None: report no logprobs), from the target's raw logits; `prompt_logprobs` is the same
    for the tokens of the prompt. `logprob_token_ids` are reported in place of the best
    alternatives. `max_tokens` 0 computes the prompt and emits nothing.

    `num_speculative_tokens` is this request's own k, at most the engine's: how many drafts of a
    model it has in a step. Looked-up ones are as many as pay, unless k is 0; None lets the engine
    choose k. `verification` is the rule that accepts drafts; None takes the engine's. Only under
    "match" do the tokens depend on the seed alone: under the other rules they also depend on what
    was drafted, which depends on the other requests in the batch.
    `grammar` constrains the output; it is written in llguidance's dialect of Lark.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[ProcessorChoice, ...] = ()
    thinking: ThinkingBudget | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    verification: Verification | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)  # the class is frozen

    @property
    def num_alternatives(self) -> int | None:
        """How many tokens are reported with each new one; None: it has no logprobs either."""
        named = len(self.logprob_token_ids) or self.logprobs
        return None if self.logprobs is None else named

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens from the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """One sequence to decode.

    Waiting sequences start in order of `priority`, the lowest number first, then of arrival;
    preemption goes the other way round. Only sequences with the same `cache_salt` share cached
    pages. With `returns_drafts`, the outputs list every draft, also the rejected ones.
    With `reports_prompt`, each step that computes a part of the prompt has an output.

    `predicted_token_ids` is what the client expects of the answer. Where the answer goes on so, the
    drafts are taken from there.

    `sources` names those that may draft for it; None: all that the engine has.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    returns_drafts: bool = False
    reports_prompt: bool = False
    predicted_token_ids: list[int] = field(default_factory=list)
    sources: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw logprobs at one position: that of the token itself, and the best ones in order, or those
    of `logprob_token_ids`.

    If the token itself is in `top`, its entry there is exactly `logprob`.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None  # 1 is the most likely token; for prompt tokens only


@dataclass(slots=True, kw_only=True)  # not frozen: every step makes one for each sequence
class RequestOutput:
    """New tokens of one sequence; `finish_reason` is set on the last output.

    `prompt_logprobs` covers the prompt tokens scored in this step, in order and starting with the
    prompt's second token. All of them arrive before the first new token, or together with it.

    If a token stopped the sequence (eos or a stop id), it is the last of `token_ids` and
    `stop_token_id` repeats it. `error` explains a `finish_reason` of "error"; `is_dead_end` says
    that the request's own edits of the logits had banned every token.

    `draft_token_ids` are the drafts of the step that produced `token_ids`, if the request set
    `returns_drafts`. `token_ids` begins with the accepted ones; the token after them is recovered,
    or a bonus token if all were accepted. `source` says where the step's drafts are from
    (None: it had none).
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    is_dead_end: bool = False
    queue_s: float = 0.0  # from submission to the first step
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_draft_tokens: int = 0  # drafted for this sequence so far
    num_accepted_tokens: int = 0  # how many of those were accepted
    draft_token_ids: list[int] | None = None
    source: SourceName | None = None
    num_computed_prompt_tokens: int | None = None  # until the first token, with `reports_prompt`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was loaded, for the start-up summary and `/v1/models`."""

    device: str
    tensor_parallel: int = 1  # processes that share the target, each with a device
    draft_tensor_parallel: int = 1  # that share the draft, too
    target_dtype: str
    batch_invariant: bool  # whether the bits of the target's logits do not depend on the batch
    draft_dtype: str | None
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size_tokens: int
    cache_bytes: int
    saved_by_windows_bytes: int = 0  # what layers with a window would take more if they kept all
    state_bytes: int = 0  # of what layers keep of whole sequences and prefixes, in all slots
    num_states: int = 0  # how many there is room for
    host_pages: int = 0  # of the second tier, in host memory
    host_bytes: int = 0
    max_num_seqs: int
    num_speculative_tokens: int  # drawn from a model in one step, at most
    max_drafts: int  # of a sequence in one step, looked-up ones among them
    sources: tuple[SourceName, ...]  # of drafts
    # Tokens that the draft model's tokenizer has, of the target's; None: it is the same.
    share_of_text: float | None = None
    # draft_model, or the kind of the head; without either the last source; None: nothing drafts
    proposer: str | None
    load_s: float
    warm_up_s: float  # part of load_s: all that follows the reading of the weights
    pid: int


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Current gauges, and counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    pages_used: int = 0  # held by live sequences, not those that only cache a prefix
    pages_total: int = 0
    host_pages_used: int = 0  # in host memory, as far as layers attend to everything
    host_pages_total: int = 0  # 0: there are none, or a copy has failed
    host_saved_tokens: int = 0  # copied there
    host_loaded_tokens: int = 0  # copied back
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    dead_drafts: int = 0  # times that of 2,000 drafts of a model hardly any were accepted
    step_tokens: int = 0  # of prompts, as steps compute them, and generated
    # [len(STEP_TOKENS) + 1] steps by such tokens; the last is of those with more
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    drafted_per_position: list[int] = field(default_factory=list)  # [k] times draft i was verified
    accepted_per_position: list[int] = field(default_factory=list)  # [k] times it was accepted
