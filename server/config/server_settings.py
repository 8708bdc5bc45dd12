"""Settings of the HTTP front end."""

import ssl
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from outrider.engine.api import MAX_LOGPROBS

from .section import SettingPath, SettingsSection

# However the server is set. Of biases and bad words the engine has no room for more, with what
# else goes into the same tables.
MAX_PROMPTS = 65_536
MAX_STOP_STRINGS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 128
ANY_NAME = "*"  # as a served_model_name

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
# Those of text/call_formats.py, and two more.
ToolCallFormat = Literal[
    "auto",
    "hermes",
    "qwen_xml",
    "mistral",
    "llama3_json",
    "llama4",
    "harmony",
    "gemma4",
    "glm",
    "deepseek",
    "dsml",
    "kimi",
    "granite",
    "none",
]


def _one_or_several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class ServerSettings(SettingsSection):
    """The HTTP front end."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    uds: SettingPath | None = Field(
        default=None,
        description="Unix socket to listen on, instead of host and port. Not with metrics_port, "
        "or with more than one of api_workers.",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[^/\s]+)*$",
        description="Path prefix under which a reverse proxy publishes this server, such as "
        "/models/a; requests may come with it or without.",
    )
    api_workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Number of HTTP processes. 1: the process that starts the engine answers "
        "HTTP itself; more: this many processes beside it, each with a tokenizer of its own "
        "(about 0.5 GB).",
    )
    served_model_name: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_several)
    ] = Field(
        default=(),
        description="Names that requests may give as `model`. /v1/models lists them, and answers "
        "carry the first. *: requests may give any name. Empty: target.model, or the last part "
        "of its path; requests may also give the whole path.",
    )
    generation_config: str = Field(
        default="auto",
        min_length=1,
        description="Defaults of sampling parameters. auto: the target's "
        "generation_config.json; outrider: temperature 1 and no filters; else a directory with "
        "such a file.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names that a request's Host header may have, without a port; *.NAME: any "
        "name that ends in .NAME; *: any. Empty: localhost and loopback addresses if the server "
        "listens on loopback, else any.",
    )
    api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(),
        description="Bearer keys. Every route asks for one, except /health, /live, /ready and the "
        "files of /ui. Empty: no key is needed.",
    )
    api_key_file: SettingPath | None = Field(
        default=None,
        description="File with further keys, one per line; they do not show in the process list.",
    )
    priority_api_keys: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field(
        default=(),
        description="Further keys, whose requests may also set `priority`. If the server has any "
        "keys, no other requests may.",
    )
    priority_api_key_file: SettingPath | None = Field(
        default=None, description="File with further keys that may set `priority`, one per line."
    )
    share_cache_between_keys: bool = Field(
        default=False,
        description="Let requests with different keys share cached prefixes and compiled grammars. "
        "cached_tokens and response times then reveal whether another key's requests began the "
        "same way.",
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
        description="Origins whose web pages may call the server from a browser. localhost: "
        "this machine by any of its names, on any port; *: any origin.",
    )
    cors_credentials: bool = Field(
        default=False, description="Let these pages send cookies and other credentials."
    )
    tls_certificate: SettingPath | None = Field(
        default=None, description="PEM file; with tls_key, the server speaks HTTPS."
    )
    tls_key: SettingPath | None = Field(
        default=None, description="PEM file of the certificate's key."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern="^https?://.",
        description="URL to which OpenTelemetry spans are sent, one per request, as OTLP over "
        "HTTP, such as http://127.0.0.1:4318/v1/traces. Unset: the URL in "
        "OTEL_EXPORTER_OTLP_ENDPOINT, if there is one.",
    )
    max_connections: int = Field(
        default=1024,
        ge=0,
        description="Maximum open connections of one HTTP process; 0: no limit. A new one "
        "beyond it replaces a connection that has no request; if there is none, all but /live is "
        "refused with 503.",
    )
    send_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds in which a client must read 16 KiB of its answer; else the server "
        "ends its connection and its request. 0: no limit.",
    )
    max_unsent_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        description="How much of their answers the clients of one HTTP process may have yet to "
        "read together, in bytes. Beyond it the connections of the slowest are ended.",
    )
    max_body_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="Largest request body, in bytes."
    )
    max_bodies_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=1024 * 1024,
        description="Memory that the requests which one HTTP process is answering may take "
        "together, in bytes: their bodies while they arrive and are read, then what their answers "
        "need of them. It is estimated before it is taken; further requests are refused with 429.",
    )
    body_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds in which the body of a request must arrive; 0: no limit.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Fields of requests that the server does not know, such as misspelt ones. "
        "ignore: name them in the header x-unknown-fields and in the log; refuse: answer with "
        "400.",
    )
    max_prompts_times_n: int = Field(
        default=128,
        ge=1,
        le=MAX_PROMPTS,
        description="Maximum sequences per request: prompts times n.",
    )
    max_answer_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum memory that one request may need, in bytes, estimated from its "
        "sequences, their max_tokens, and the logprobs and prompt tokens that it asks for.",
    )
    max_grammar_bytes: int = Field(
        default=64 * 1024, ge=1, description="Largest grammar or JSON schema, in bytes."
    )
    grammar_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that compiling a grammar may take."
    )
    tool_call_format: ToolCallFormat = Field(
        default="auto",
        description="How the target writes tool calls. auto: as its response template says, or "
        "as its chat template or its type shows; none: calls stay in the text.",
    )
    reasoning_content: bool | None = Field(
        default=None,
        description="Return the reasoning in chat answers, such as the text between <think> and "
        "</think>, as reasoning and reasoning_content, not as content. Unset: if the target's "
        "templates show that it reasons.",
    )
    include_usage: bool = Field(
        default=False,
        description="End every stream of chats and completions with its usage, as if the request "
        "had set stream_options.include_usage.",
    )
    request_metrics: bool = Field(
        default=False,
        description="Report times in answers (metrics), unless a request says otherwise (metrics).",
    )
    speculation_metrics: bool = Field(
        default=False,
        description="Report in answers how many drafts were accepted "
        "(metrics.speculative_decoding), unless a request says otherwise (speculation.metrics).",
    )
    max_logprobs: int = Field(
        default=20,
        ge=0,
        le=MAX_LOGPROBS,
        description="Maximum logprobs per token that a request may ask for.",
    )
    response_store_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        description="Memory for responses that /v1/responses keeps so that later requests can "
        "continue them, in bytes; 0: none. With more than one of api_workers none are kept, "
        "because the next request may reach another process.",
    )
    max_stop_strings: int = Field(
        default=16, ge=0, le=MAX_STOP_STRINGS, description="Maximum stop strings per request."
    )
    max_stop_token_ids: int = Field(
        default=128, ge=0, le=MAX_STOP_TOKEN_IDS, description="Maximum stop_token_ids per request."
    )
    max_logit_bias: int = Field(
        default=1024, ge=0, le=MAX_LOGIT_BIASES, description="Maximum tokens in logit_bias."
    )
    max_bad_words: int = Field(
        default=128, ge=0, le=MAX_BAD_WORDS, description="Maximum bad_words per request."
    )
    request_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that a request may take, its time in the queue included, before it "
        "is ended with an error; 0: no limit.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish at shutdown."
    )
    status_interval_s: float = Field(
        default=5.0, ge=0, description="Seconds between status lines under load; 0 prints none."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="text: lines for people; json: one JSON object per line."
    )
    log_level: LogLevel = Field(default="info", description="Lowest severity to log.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: set both, or neither")
        if self.metrics_port == self.port:
            raise ValueError(f"metrics_port is {self.port}, as port is; choose another")
        if f"{self.root_path}/".startswith("/ui/"):
            raise ValueError(f"root_path is {self.root_path!r}, where the page is; choose another")
        if self.uds is not None and (self.api_workers > 1 or self.metrics_port is not None):
            raise ValueError(
                "uds is one socket: it goes with api_workers = 1, and without a metrics_port"
            )
        return self

    def read_api_keys(self) -> list[str]:
        """All API keys; raises OSError, also if a key file has none."""
        keys = [key.get_secret_value() for key in self.api_keys]
        return keys + _keys_in("api_key_file", self.api_key_file) + self.read_priority_keys()

    def read_priority_keys(self) -> list[str]:
        """The keys that may set `priority`; raises OSError, also if their file has none."""
        keys = [key.get_secret_value() for key in self.priority_api_keys]
        return keys + _keys_in("priority_api_key_file", self.priority_api_key_file)

    def check_certificate(self) -> None:
        """Raises OSError if there is one, and it cannot be used with its key."""
        certificate, key = self.tls_certificate, self.tls_key
        if certificate is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:  # it does not say which of the two files
            raise OSError(
                f"cannot use {certificate} (server.tls_certificate) with {key} (server.tls_key): "
                f"{error.strerror or error}; both must be PEM files, of one pair"
            ) from None


def _keys_in(setting: str, path: Path | None) -> list[str]:
    """The keys in the file that a setting names, one a line, without comments; raises OSError."""
    if path is None:
        return []
    try:
        text = path.read_text("utf-8-sig")  # a byte order mark is no part of the first key
    except OSError as error:
        raise OSError(f"server.{setting}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OSError(f"server.{setting}: {path} is no UTF-8 text") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise OSError(f"server.{setting}: {path} has no keys in it")
    return found
