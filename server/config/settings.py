"""Every setting of Outrider, described; `settings_loader` reads them from their sources."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, SecretStr, field_validator, model_validator

from outrider.engine.api import MAX_K, SourceName

from .model_names import name_of
from .server_settings import ANY_NAME, ServerSettings, SettingsSection

DEFAULT_TARGET = "smollm2-135m-instruct"
DEFAULT_DRAFT = "smollm2-135m-instruct-draft"
DEFAULT_K = 4  # drafts in a step, at most, unless the draft says otherwise
MTP = "mtp"  # as a draft: the MTP head in the target's own checkpoint

ProposerName = Literal["auto", "none", SourceName, "ngram", "head"]
ALSO_CALLED: dict[str, SourceName] = {"ngram": "suffix", "head": "draft_model"}
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["fp8"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


class _ModelSettings(SettingsSection):
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
    quantization: Quantization | None = Field(
        default=None,
        description="fp8: round the linear layers of a plain checkpoint to FP8 while loading, "
        "except the one that gives logits, and round their inputs in each pass. Halves their "
        "memory on a GPU, and changes the model's outputs slightly. Unset: as they are; the "
        "formats of quantised checkpoints are detected.",
    )
    device: Device = Field(
        default="auto", description="auto | cpu | cuda | cuda:N; auto: cuda where there is one."
    )
    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        description="Processes that share the target's layers, each with a GPU of its own; the "
        "draft is whole on the first unless draft.tensor_parallel is set. Unset: 1 if the pair "
        "fits on one GPU, else the fewest of the visible GPUs that it fits on; on a CPU 1.",
    )
    chat_template: Path | None = Field(
        default=None,
        description="File with a Jinja template, which makes prompts of chats. Unset: the model's "
        "own.",
    )


class DraftSettings(_ModelSettings):
    """The model or head that drafts; read if speculation.proposer is auto or has draft_model."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description="A model, as in target.model, best with the target's tokenizer; or a head made "
        "for the target; or mtp, the MTP head in the target's own checkpoint. Unset: the best "
        "known draft for the target, if speculation.proposer is auto.",
    )
    head_layers: tuple[int, ...] | None = Field(
        default=None,
        description="Layers of the target after which a head reads the hidden states; 0: the "
        "embeddings. Unset: as the head's config says; trainers number layers differently.",
    )
    attention_window: int | None = Field(
        default=None,
        ge=16,
        description="Of an EAGLE-3, P-EAGLE or MTP head: how many tokens its layers attend to. A "
        "head that was trained on short texts may draft better so in long ones, and takes less "
        "memory. Unset: as the head's config says.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Unset: target.dtype. With auto, a draft on cpu also gets 8-bit weights where "
        "that is faster, and a head FP8 on a GPU that has it, with a copy of the target's output "
        "layer if it shares that; whatever it proposes, the target decides.",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="fp8: as target.quantization, but also the layer that gives logits; and of a "
        "draft model, only the weights. Whatever the draft proposes, the target decides.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="1, or as many as target.tensor_parallel: then all of these processes share "
        "the layers of a draft model, too. For large ones: a small one is faster whole. A head is "
        "always whole.",
    )
    device: Device | None = Field(
        default=None,
        description="Unset: target.device. No other is possible: both share one page table.",
    )


class SpeculationSettings(SettingsSection):
    """What drafts, and how many tokens."""

    proposer: tuple[ProposerName, ...] = Field(
        default=("auto",),
        description="The sources of drafts; of each request in each step, the one that is expected "
        "to do best drafts. prediction: what clients predict; grammar: tokens of which a request's "
        "grammar leaves no choice; suffix (or ngram): what followed the "
        "last tokens earlier in the text, without a second model; draft_model (or head): what "
        "draft.model says. Beside draft_model or suffix alone, prediction and grammar are there. "
        "auto: all that are there, with draft.model, or else the best known draft for the target; "
        "the server says at its start which, and why. none: plain decoding.",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_K,
        description="Maximum draft tokens of a model per request and step (k); 0: plain decoding. "
        f"Drafts that are looked up have their own number, up to {MAX_K}. Unset: what suits the "
        f"draft if the server chooses it, else {DEFAULT_K}.",
    )
    adaptive: bool = Field(
        default=True,
        description="Draft fewer, down to none, when that is faster by the measured cost of a "
        "step. On a CPU each request drafts for as long as its drafts are likely enough to pay; on "
        "a GPU only the likeliest drafts of all requests are verified, where that pays.",
    )
    verification: Literal["token", "block", "match"] = Field(
        default="block",
        description="Which drafts are accepted. token: one by one; block: jointly, never fewer "
        "in expectation; match: those that plain sampling with the same seed would have drawn, "
        "so that a seeded answer is the same for every k. All keep the target's distribution. "
        "Applies to requests that give neither a rule nor a seed; with a seed alone the rule is "
        "match.",
    )
    suffix_min_tokens: int = Field(
        default=2,
        ge=1,
        le=32,
        description="suffix: how many of the last tokens must have occurred before, in this order, "
        "for what followed to be drafted.",
    )
    suffix_answers_mib: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="suffix: memory for recent answers, in MiB, taken at the start and looked "
        "into as well: only those of the same API key and cache_salt, 20 bytes a token. 0: the "
        "request's own text alone.",
    )

    @field_validator("proposer", mode="before")
    @classmethod
    def _sources(cls, given: object) -> object:
        return [name.strip() for name in given.split(",")] if isinstance(given, str) else given

    @field_validator("proposer")
    @classmethod
    def _each_source_once(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(ALSO_CALLED.get(name, name) for name in given))
        if not names or (len(names) > 1 and not {"auto", "none"}.isdisjoint(names)):
            raise ValueError(f"it must be auto, none, or some of {', '.join(get_args(SourceName))}")
        alone = names in (("suffix",), ("draft_model",))
        return ("prediction", "grammar", *names) if alone else names

    @property
    def sources(self) -> tuple[SourceName, ...]:
        """The sources of drafts, once `auto` is resolved."""
        return tuple(name for name in get_args(SourceName) if name in self.proposer)


class CacheSettings(SettingsSection):
    """The paged KV cache."""

    page_size_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens per page.")
    dtype: Literal["auto", "fp8", "model"] = Field(
        default="auto",
        description="Format of keys and values. auto: fp8 if the checkpoint says so and the GPU "
        "has it, else the model's dtype. fp8, on cuda: half of its memory, so that twice as many "
        "tokens fit; rounding them to 8 bits changes the outputs slightly. Scales are the "
        "checkpoint's, or 1. model: the model's dtype, whatever the checkpoint says.",
    )
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
        description="On a CPU: fraction of the memory left after loading that pages may take.",
    )
    prefix_caching: bool = Field(
        default=True, description="Keep pages of finished requests and share equal prefixes."
    )
    host_gib: float = Field(
        default=0,
        ge=0,
        allow_inf_nan=False,
        description="Host memory for cached pages whose room on the GPU is needed, in GiB. They "
        "come back when a prompt begins with their tokens again. 0: they are computed again.",
    )
    state_interval_tokens: int = Field(
        default=2048,
        ge=1,
        description="Of models that keep a state of a whole sequence (Qwen3.5, Qwen3-Next, "
        "Nemotron 3): a long prompt leaves a copy of it every so many tokens, for prompts that "
        "begin with them. One is also kept where a prompt ends and where it turned out to differ "
        "from another. A copy takes as much memory as the state of a running sequence. Other "
        "models ignore this.",
    )
    kv_events_endpoint: str | None = Field(
        default=None,
        pattern=r"^(tcp|ipc)://.",
        description="ZeroMQ address at which routers hear which prefixes are cached, in vLLM's "
        "messages: tcp://*:5557 listens, tcp://router:5557 connects. The messages hold token ids "
        "of prompts.",
    )
    kv_events_topic: str = Field(
        default="", description="Topic of these events; llm-d reads kv@POD_IP:PORT@MODEL."
    )


class SchedulerSettings(SettingsSection):
    """Which sequences run, and how much of them in one step."""

    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Sequences that run at once; unset: 32 on a CPU, 64 on a GPU, 256 on a GPU "
        "of more than 32 GiB, and no more than max_num_batched_tokens; of a hybrid no more than "
        "have room for their states in half of the memory beside weights and steps.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Rows of one pass of the target, prefill and drafts together; unset: 512 on "
        "a CPU, 2048 on a GPU, 4096 on a GPU of more than 32 GiB, and no fewer than "
        "max_num_seqs.",
    )
    max_queue_len: int = Field(
        default=256, ge=0, description="Sequences that may wait; more are turned away with 429."
    )
    max_itl_ms: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Prompts are computed in pieces so small that a step with other requests' "
        "tokens takes at most about so long, as measured. Unset: in pieces of "
        "max_num_batched_tokens.",
    )


class EngineSettings(SettingsSection):
    """The engine process."""

    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and output together; unset: as many as the target supports "
        "and the KV cache holds.",
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
        description="On cuda: fraction of the GPU's memory that this engine may use for "
        "weights, graphs, the largest step as measured at start, and pages, which get the rest.",
    )
    batch_invariant: bool | None = Field(
        default=None,
        description="Round each sequence the same in any batch, so that greedy and seeded match "
        "answers are equal to the bit with any k, draft and batch. Unset: on where the target can "
        "do so at little cost. true refuses a target that cannot.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="On cuda: capture no CUDA graphs. Starts sooner, decodes several times slower.",
    )
    step_timeout_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds after which a step counts as hung and the engine is restarted; 0: "
        "no limit.",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of torch; unset: torch's own choice."
    )


class Settings(SettingsSection):
    """All settings; `SECTION.KEY` in the file, `--set` and `OUTRIDER_SECTION__KEY` alike."""

    server: ServerSettings = ServerSettings()
    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    engine: EngineSettings = EngineSettings()

    def to_json(self) -> bytes:
        """The settings with their secrets: only for our own processes, through a pipe."""

        def plain(value: object) -> str:
            return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

        return json.dumps(self.model_dump(exclude_unset=True), default=plain).encode()

    @model_validator(mode="after")
    def _draft_fits_target(self) -> Self:
        if self.draft.device not in (None, self.target.device):
            raise ValueError(
                f"draft.device is {self.draft.device!r}, target.device {self.target.device!r}; "
                "both models share one page table: leave draft.device out"
            )
        if self.draft.tensor_parallel not in (1, self.target.tensor_parallel):
            raise ValueError(
                f"draft.tensor_parallel is {self.draft.tensor_parallel}, target.tensor_parallel "
                f"{self.target.tensor_parallel or 'unset'}; a draft is whole, or shared by all "
                "that share the target: leave it out, or set both to one number"
            )
        if "draft_model" in self.speculation.proposer and self.draft.model is None:
            raise ValueError(
                "speculation.proposer has draft_model and draft.model is not set; name a draft "
                "of the target's family, or leave the proposer at 'auto', which knows some"
            )
        return self

    @model_validator(mode="after")
    def _steps_have_room(self) -> Self:
        num_rows, num_seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if num_rows is None:
            return self
        if num_seqs is not None and num_seqs > num_rows:
            raise ValueError(
                f"scheduler.max_num_seqs is {num_seqs}, but a step has scheduler."
                f"max_num_batched_tokens ({num_rows}) rows, of which each sequence takes one at "
                "least; lower the first or raise the second"
            )
        k = self.speculation.num_speculative_tokens
        k = DEFAULT_K if k is None else k
        if self.speculation.proposer != ("none",) and k >= num_rows:
            raise ValueError(
                f"speculation.num_speculative_tokens is {k}, so that a sequence takes {k + 1} rows "
                f"of a step, but scheduler.max_num_batched_tokens is {num_rows}; lower the first "
                "or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _cache_is_of_use(self) -> Self:
        if self.cache.host_gib and not self.cache.prefix_caching:
            raise ValueError(
                f"cache.host_gib is {self.cache.host_gib:g}, but cache.prefix_caching is false, so "
                "that no page is kept: set it to 0"
            )
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
    def served_model_names(self) -> tuple[str, ...]:
        """The model's own names; answers carry the first."""
        named = tuple(name for name in self.server.served_model_name if name != ANY_NAME)
        return named or (name_of(self.target.model),)
