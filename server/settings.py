"""Every setting of Outrider, described; `settings_loader` reads them from their sources."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from outrider.server.key_file import read_key_file

# However the server is set.
MAX_STOP_STRINGS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 2**17
MAX_BAD_WORDS = 1024

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFT = "smollm2-135m-instruct-draft"

ToolCallFormat = Literal["auto", "hermes", "qwen_xml", "mistral", "llama3_json", "none"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServerSettings(Section):
    """The HTTP front end."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    api_workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Processes that answer HTTP. 1: the one that starts the engine; more: so many "
        "beside it, each with a tokenizer of its own (about 0.5 GB).",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name in /v1/models and `model`; unset: target.model.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names that the Host header of a request may have, without a port; *.NAME: "
        "whatever ends in it; *: any. None given: localhost and loopback addresses if the server "
        "listens on loopback, else any.",
    )
    api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(),
        description="Bearer keys, asked for but by /health, /live and /ready. None: open.",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="A file with further keys, one a line; no process list shows them.",
    )
    priority_api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(),
        description="Further keys, whose requests may also set `priority`. Where keys are asked "
        "for, no others may.",
    )
    priority_api_key_file: Path | None = Field(
        default=None, description="A file with further keys that may set `priority`, one a line."
    )
    share_cache_between_keys: bool = Field(
        default=False,
        description="Let requests with different keys share cached prefixes. cached_tokens and "
        "times then tell whether another key's requests began alike.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="A second port, for /metrics alone, without a key.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose web pages may call the server from a browser; * is any.",
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file; with tls_key, the server speaks HTTPS."
    )
    tls_key: Path | None = Field(default=None, description="PEM file of the certificate's key.")
    otlp_endpoint: str | None = Field(
        default=None,
        min_length=1,
        description="Where OpenTelemetry spans go, one a request, as OTLP over HTTP: "
        "http://127.0.0.1:4318/v1/traces. Unset: where OTEL_EXPORTER_OTLP_ENDPOINT says, if "
        "anywhere.",
    )
    max_connections: int = Field(
        default=1024,
        ge=0,
        description="Most open connections of one HTTP process; 0: any number. A new one beyond "
        "them takes the place of one without a request, else it is turned away with 503.",
    )
    send_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds in which a client must take 16 KiB of what waits to be sent to it, "
        "before its connection is ended and its request with it; 0: any time.",
    )
    max_body_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="Largest request body, in bytes."
    )
    body_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds in which the body of a request must have arrived; 0: any time.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Fields of requests that nobody knows, such as misspelt ones. ignore: name "
        "them in the header x-unknown-fields and in the log; refuse: answer with 400.",
    )
    max_prompts_times_n: int = Field(
        default=128, ge=1, description="Most sequences of one request: prompts times n."
    )
    max_answer_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024 * 1024,
        description="Most memory that one request may need, in bytes, as estimated from its "
        "sequences, their max_tokens, and the logprobs and prompt tokens that it wants told.",
    )
    max_grammar_bytes: int = Field(
        default=64 * 1024, ge=1, description="Largest grammar or JSON schema, in bytes."
    )
    grammar_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that compiling a grammar may take."
    )
    tool_call_format: ToolCallFormat = Field(
        default="auto",
        description="How the target writes tool calls; auto: as its own response template says, or "
        "as its chat template shows; none: calls come back as text.",
    )
    reasoning_content: bool = Field(
        default=False,
        description="Give what chat answers say between <think> and </think> apart, as "
        "reasoning_content.",
    )
    speculation_metrics: bool = Field(
        default=False,
        description="Tell in answers how many drafts were accepted (metrics.speculative_decoding), "
        "unless a request says otherwise (speculation.metrics).",
    )
    max_stop_strings: int = Field(
        default=16, ge=0, le=MAX_STOP_STRINGS, description="Most stop strings of one request."
    )
    max_stop_token_ids: int = Field(
        default=128, ge=0, le=MAX_STOP_TOKEN_IDS, description="Most stop_token_ids of one request."
    )
    max_logit_bias: int = Field(
        default=1024, ge=0, le=MAX_LOGIT_BIAS, description="Most tokens that logit_bias may name."
    )
    max_bad_words: int = Field(
        default=128, ge=0, le=MAX_BAD_WORDS, description="Most bad_words of one request."
    )
    request_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that a request may take, its time in the queue included, before it is "
        "ended with an error; 0: as long as it likes.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish at shutdown."
    )
    status_interval_s: float = Field(
        default=5.0, ge=0, description="Seconds between status lines under load; 0 prints none."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines to be read, or a JSON object a line."
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        default="info", description="Least severe log lines to print."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: set both, or neither")
        return self

    def read_api_keys(self) -> list[str]:
        """All keys; raises OSError, also if a file of them has none."""
        keys = [key.get_secret_value() for key in self.api_keys]
        return keys + read_key_file("api_key_file", self.api_key_file) + self.read_priority_keys()

    def read_priority_keys(self) -> list[str]:
        """Those of them that may set `priority`; raises OSError, also if their file has none."""
        keys = [key.get_secret_value() for key in self.priority_api_keys]
        return keys + read_key_file("priority_api_key_file", self.priority_api_key_file)


class _ModelSettings(Section):
    model: str | None = Field(default=None, min_length=1)  # described below, for each role
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a hub id; unset: its main branch.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. Only for models you trust.",
    )


class TargetSettings(_ModelSettings):
    """The model whose output is served."""

    model: str = Field(
        default=DEFAULT_TARGET,
        min_length=1,
        description="A built-in name, a local directory, a GGUF file, or a hub id.",
    )
    dtype: Dtype = Field(
        default="auto",
        description="Weights and arithmetic; auto: on cuda the checkpoint's own, on cpu bfloat16 "
        "where the processor has bfloat16 instructions, else float32.",
    )
    device: Device = Field(
        default="auto", description="auto | cpu | cuda | cuda:N; auto: cuda where there is one."
    )


class DraftSettings(_ModelSettings):
    """The small model that runs ahead; read when speculation.proposer is draft_model."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="As target.model, with the same tokenizer. Unset: the default target's "
        "own; any other target needs a draft of its own.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Unset: target.dtype. With auto, a draft on cpu also gets 8-bit weights where "
        "that is faster; whatever it proposes, the target decides.",
    )
    device: Device | None = Field(
        default=None, description="The target's, which it must equal: both share one page table."
    )


class SpeculationSettings(Section):
    """How far, and by what, the target is run ahead of."""

    proposer: Literal["draft_model", "ngram", "none"] = Field(
        default="draft_model",
        description="draft_model: the draft; ngram: prompt lookup, no second model; none: plain.",
    )
    num_speculative_tokens: int = Field(
        default=4,
        ge=0,
        le=32,
        description="Most drafts of a request in a step (k); 0 decodes plainly.",
    )
    adaptive: bool = Field(
        default=True,
        description="Draft fewer, down to none, where the measured cost of a step says that it "
        "pays, and on a CPU none behind drafts that the draft model holds for unlikely.",
    )
    verification: Literal["token", "block", "match"] = Field(
        default="token",
        description="Which drafts stand. token: one by one; block: jointly, never fewer in "
        "expectation; match: those that plain sampling with the same seed would have drawn, so "
        "that a seeded answer is the same for every k. All keep the target's distribution. Of "
        "requests that name neither a rule nor a seed; those with a seed get match.",
    )
    ngram_min_tokens: int = Field(
        default=1, ge=1, description="ngram: shortest suffix that is looked up, in tokens."
    )
    ngram_max_tokens: int = Field(
        default=4, ge=1, description="ngram: longest suffix that is looked up, in tokens."
    )

    @model_validator(mode="after")
    def _ngram_range(self) -> Self:
        if self.ngram_min_tokens > self.ngram_max_tokens:
            raise ValueError(
                f"ngram_min_tokens is {self.ngram_min_tokens}, above ngram_max_tokens "
                f"({self.ngram_max_tokens}); it must not be larger"
            )
        return self


class CacheSettings(Section):
    """The paged KV cache."""

    page_size_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens of one page.")
    num_pages: int | None = Field(
        default=None,
        ge=2,
        description="Pages of the pool; unset: as many as memory_fraction (on a CPU) or "
        "engine.gpu_memory_utilization (on a GPU) leave room for.",
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="On a CPU: share of the memory left after loading that pages may take.",
    )
    prefix_caching: bool = Field(
        default=True, description="Keep pages of finished requests and share equal prefixes."
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        pattern=r"^(tcp|ipc)://.",
        description="Where routers hear over ZeroMQ, as from vLLM, which prefixes are cached: "
        "tcp://*:5557 listens, tcp://router:5557 connects. It tells token ids of prompts.",
    )
    kv_events_topic: str = Field(
        default="", description="Topic of these events; llm-d reads kv@POD_IP:PORT@MODEL."
    )


class SchedulerSettings(Section):
    """Who runs, and how much of it in one step."""

    max_num_seqs: int = Field(default=32, ge=1, description="Sequences that run at once.")
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="Rows of one target forward, prefill and drafts together."
    )
    max_queue_len: int = Field(
        default=256, ge=0, description="Sequences that may wait; more are turned away with 429."
    )


class EngineSettings(Section):
    """The engine process."""

    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and output together; unset: what the target has.",
    )
    logits_processors: tuple[str, ...] = Field(
        default=(),
        description="Custom logits processors that requests may name: entry points of the group "
        "outrider.logits_processors by `name`, or `name = module:attribute`.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="On cuda: share of the GPU's memory that this engine may take: weights, "
        "graphs and the largest step as measured at start, and pages for the rest.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="On cuda: capture no CUDA graphs. Starts sooner, decodes several times slower.",
    )
    step_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that a step may take before the engine counts as hung and is started "
        "again; 0: as long as it likes.",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of torch; unset: torch's own choice."
    )


class Settings(Section):
    """All settings; `SECTION.KEY` in the file, `--set` and `OUTRIDER_SECTION__KEY` alike."""

    server: ServerSettings = ServerSettings()
    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _draft_fits_target(self) -> Self:
        if self.draft.device not in (None, self.target.device):
            raise ValueError(
                f"draft.device is {self.draft.device!r}, target.device {self.target.device!r}; "
                "both models share one page table: leave draft.device out"
            )
        if self.speculates_with_draft and self.draft_model is None:
            raise ValueError(
                f"target.model is {self.target.model!r} and draft.model is not set; name a draft "
                'with the same tokenizer, or set speculation.proposer to "ngram" or "none"'
            )
        return self

    @model_validator(mode="after")
    def _steps_have_room(self) -> Self:
        num_rows, num_seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if num_seqs > num_rows:
            raise ValueError(
                f"scheduler.max_num_seqs is {num_seqs}, but a step has scheduler."
                f"max_num_batched_tokens ({num_rows}) rows, of which each sequence takes one at "
                "least; lower the first or raise the second"
            )
        k = self.speculation.num_speculative_tokens
        if self.speculation.proposer != "none" and k >= num_rows:
            raise ValueError(
                f"speculation.num_speculative_tokens is {k}, so that a sequence takes {k + 1} rows "
                f"of a step, but scheduler.max_num_batched_tokens is {num_rows}; lower the first "
                "or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _cache_holds_a_sequence(self) -> Self:
        num_pages, page_size = self.cache.num_pages, self.cache.page_size_tokens
        longest = self.engine.max_model_len or 2
        if num_pages is not None and (num_pages - 1) * page_size < longest:
            raise ValueError(
                f"cache.num_pages is {num_pages}, of cache.page_size_tokens ({page_size}) and one "
                f"for padding: they hold {(num_pages - 1) * page_size} tokens, but a sequence may "
                f"have {longest} (engine.max_model_len); raise the first or lower the last"
            )
        return self

    @property
    def speculates_with_draft(self) -> bool:
        """Whether a draft model is to be loaded."""
        return (
            self.speculation.proposer == "draft_model"
            and self.speculation.num_speculative_tokens > 0
        )

    @property
    def draft_model(self) -> str | None:
        """The draft's name, directory, file or hub id; the default pair's where both are left."""
        if self.draft.model is None and self.target.model == DEFAULT_TARGET:
            return DEFAULT_DRAFT
        return self.draft.model

    @property
    def served_model_name(self) -> str:
        return self.server.served_model_name or self.target.model
