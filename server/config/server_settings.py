"""Settings of the HTTP front end."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from outrider.engine.api import MAX_LOGPROBS

from ..http.key_file import read_key_file

# However the server is set.
MAX_STOP_STRINGS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 2**17
MAX_BAD_WORDS = 1024

ToolCallFormat = Literal["auto", "hermes", "qwen_xml", "mistral", "llama3_json", "none"]


def _one_or_several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServerSettings(Section):
    """The HTTP front end."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    uds: Path | None = Field(
        default=None,
        description="A Unix socket to listen at, instead of host and port. Not with a metrics_port "
        "or more than one of api_workers.",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[^/\s]+)*$",
        description="Path below which a proxy shows this server, as /models/a; requests may come "
        "with it or without.",
    )
    api_workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Processes that answer HTTP. 1: the one that starts the engine; more: so many "
        "beside it, each with a tokenizer of its own (about 0.5 GB).",
    )
    served_model_name: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_several)
    ] = Field(
        default=(),
        description="Names in /v1/models that `model` may have; answers give the first. None "
        "given: target.model.",
    )
    generation_config: str = Field(
        default="auto",
        min_length=1,
        description="Where sampling parameters that a request leaves out come from. auto: the "
        "target's generation_config.json; outrider: nowhere, so temperature 1 and no filters; "
        "else a directory that has such a file.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names that the Host header of a request may have, without a port; *.NAME: "
        "whatever ends in it; *: any. None given: localhost and loopback addresses if the server "
        "listens on loopback, else any.",
    )
    api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(),
        description="Bearer keys, asked for but by /health, /live, /ready and the files of /ui. "
        "None: open.",
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
    ui: bool = Field(
        default=True,
        description="Serve a page at /ui: a playground that shows what the drafts did.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="A second port, for /metrics alone, without a key.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose web pages may call the server from a browser; localhost is this "
        "machine by any of its names and any port, * is any.",
    )
    cors_credentials: bool = Field(
        default=False,
        description="Let these pages send cookies, and what a proxy in front asks them for.",
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
    reasoning_content: bool | None = Field(
        default=None,
        description="Give what chat answers say between <think> and </think> apart, as reasoning "
        "and reasoning_content; unset: if the target's templates show that it reasons.",
    )
    speculation_metrics: bool = Field(
        default=False,
        description="Tell in answers how many drafts were accepted (metrics.speculative_decoding), "
        "unless a request says otherwise (speculation.metrics).",
    )
    max_logprobs: int = Field(
        default=20,
        ge=0,
        le=MAX_LOGPROBS,
        description="Most alternatives that a request may be told beside each token.",
    )
    response_store_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        description="Memory for responses that /v1/responses keeps so that others can go on from "
        "them, in bytes; 0: none. With more than one of api_workers none are kept, as the "
        "next request may come to another process.",
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

    @model_validator(mode="after")
    def _socket_is_one(self) -> Self:
        if self.uds is not None and (self.api_workers > 1 or self.metrics_port is not None):
            raise ValueError(
                "uds is one socket: it goes with api_workers = 1, and without a metrics_port"
            )
        return self

    def read_api_keys(self) -> list[str]:
        """All API keys; raises OSError, also if a key file has none."""
        keys = [key.get_secret_value() for key in self.api_keys]
        return keys + read_key_file("api_key_file", self.api_key_file) + self.read_priority_keys()

    def read_priority_keys(self) -> list[str]:
        """The keys that may set `priority`; raises OSError, also if their file has none."""
        keys = [key.get_secret_value() for key in self.priority_api_keys]
        return keys + read_key_file("priority_api_key_file", self.priority_api_key_file)
