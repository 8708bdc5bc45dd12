"""What goes into the engine and what comes out: plain data, in token ids and numbers only."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Verification = Literal["token", "block", "match"]  # kernels.verify.sampling.Rule, by name
EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]

# At a smaller one the second best token is out of reach, unless it ties with the best, and float32
# would soon make infinities of logits: it is greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5
# Beyond it, and below its inverse, a penalised logit could leave the range of float32.
MAX_LOGPROBS = 128  # alternatives beside a token
MAX_REPETITION_PENALTY = 1e6

# (stage, done, total): `total` 0 while it is not known; done == total > 0 ends the stage.
ReportProgress = Callable[[str, int, int], None]


class QueueFullError(RuntimeError):
    """The engine's queue has no room for these sequences."""


class InvalidRequestError(ValueError):
    """The engine refuses these sequences: they can never run as asked."""


@dataclass(frozen=True, slots=True)
class ProcessorChoice:
    """A registered logits processor, and the arguments that it is made with."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence; an `n > 1` request submits n of them with n seeds.

    `temperature` 0 is greedy, and so is any below MIN_TEMPERATURE; `top_k` 0, `top_p` 1 and `min_p`
    0 are off. What the fields from `presence_penalty` to `logits_processors` do to the logits, and
    in which order, is told in `engine.logit_edits`; an empty `allowed_token_ids` allows all, and
    `bad_words` are sequences of token ids. `seed` is a 64-bit key (0 <= seed < 2**64): every draw
    of the sequence is a function of it and of token positions. `logprobs` is the number of
    alternatives reported beside each emitted token (None: no logprobs), taken from the target's raw
    logits; `prompt_logprobs` is the same for the prompt's tokens. `max_tokens` 0 computes the
    prompt and emits nothing.
    `num_speculative_tokens` is this request's own k, up to the engine's (None: what pays, if the
    engine's k is adaptive); `verification` is the rule that accepts drafts (None: the engine's).
    Only under "match" do the tokens follow from the seed whatever was drafted: how much is drafted
    depends on who else runs.
    `grammar` is what the output must be, in llguidance's dialect of Lark.
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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    verification: Verification | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)  # a frozen field's one way

    @property
    def is_filtered(self) -> bool:
        """Whether any token is cut from the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """One sequence to decode.

    Of two that wait, the one of the lower `priority` is seated first, then the older; pages are
    taken back the other way round. Only sequences of the same `cache_salt` share cached pages.
    With `tells_drafts`, its outputs say what was drafted for it, the rejected drafts too.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    tells_drafts: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw logprobs of one token: its own, and the best alternatives, best first.

    Where the token itself is among `top`, its entry is the same float as `logprob`.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None  # of prompt tokens: 1 is the most likely


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """New tokens of one sequence; `finish_reason` is set on its last output.

    `prompt_logprobs` are those of the prompt's tokens that this step scored, from the second token
    on and in order; all of them come before or with the first new token.

    A token that stopped the sequence (eos or a stop id) is the last of `token_ids`, and
    `stop_token_id` names it. `error` says why a sequence finished with reason "error", and
    `is_dead_end` that its own edits of the logits left it no token to go on with.

    `draft_token_ids` are the drafts of the step that drew `token_ids`, if the sequence
    `tells_drafts`. The first of `token_ids` are those that were accepted; the one behind them is
    recovered, or a bonus if all were accepted.
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
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_draft_tokens: int = 0  # drafted for this sequence so far
    num_accepted_tokens: int = 0  # of those, accepted
    draft_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What came up, for the start-up summary and `/v1/models`."""

    device: str
    target_dtype: str
    draft_dtype: str | None
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size_tokens: int
    cache_bytes: int
    max_num_seqs: int
    num_speculative_tokens: int
    proposer: str | None
    load_s: float
    warm_up_s: float  # of these, for running the largest step and capturing CUDA graphs
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges now, and counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    pages_used: int = 0  # held by live sequences; pages that only cache a prefix are not counted
    pages_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    drafted_per_position: list[int] = field(default_factory=list)  # [k] draft i was proposed
    accepted_per_position: list[int] = field(default_factory=list)  # [k] draft i was accepted
