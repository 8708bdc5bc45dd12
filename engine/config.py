"""The engine's configuration: plain frozen data, easy to build by hand on a bare GPU box."""

from dataclasses import dataclass, field, replace

from .api import SourceName, Verification


class ConfigError(ValueError):
    """A setting that the engine cannot use; the message says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """Of a draft model with another tokenizer than its target."""

    target_ids: tuple[int, ...]  # [V'] the target's id of each of its tokens; -1: it has none
    read_as: tuple[int, ...]  # [vocab_size] as which of its tokens it reads each of the target's
    share_of_text: float  # tokens that it can draft, of the target's in ordinary text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the pair, as a local directory that transformers can load."""

    path: str
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: str | None = None  # "fp8" rounds the plain linear layers; None keeps them
    trust_remote_code: bool = False
    # Target layers whose output a head reads; None: those that the head's config names.
    head_layers: tuple[int, ...] | None = None
    attention_window: int | None = None  # of a head: tokens that its layers attend to, at most
    is_mtp: bool = False  # of a draft: the MTP head in the target's own checkpoint
    vocabulary: DraftVocabulary | None = None  # of a draft; None: the target's
    # Of a draft that cannot be loaded: whether the engine starts without it, and what is then said.
    is_optional: bool = False
    instead: str = ""
    # Processes that share its layers, each with a GPU. A draft model is whole on the first, or
    # shared by all that share the target.
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What token ids stand for. Only grammars need to know."""

    token_bytes: tuple[bytes, ...]  # [vocab_size]; b"" for tokens that stand for no text
    special_token_ids: tuple[int, ...] = ()  # control tokens, which text can never produce


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    # What drafts: of each sequence in each step, the one that is expected to do best.
    sources: tuple[SourceName, ...] = ("prediction", "draft_model")
    num_speculative_tokens: int = 4  # k; 0 decodes plainly
    adaptive: bool = True  # draft fewer tokens, or none, when measurements say that this is faster
    verification: Verification = "block"  # the rule for requests that name none
    suffix_min_tokens: int = 2  # that must have occurred before for what followed to be drafted
    suffix_answers_mib: int = 0  # memory for recent answers, which are looked into as well

    @property
    def k(self) -> int:
        """Tokens that a model drafts of a sequence in one step, at most; 0: nothing drafts."""
        return self.num_speculative_tokens if self.sources else 0

    @property
    def answers_bytes(self) -> int:
        """Memory for recent answers, if any source looks into them."""
        return self.suffix_answers_mib << 20 if "suffix" in self.sources else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size_tokens: int = 16
    # Of keys and values: auto (on CUDA the checkpoint's, else the model's) | fp8 (CUDA) | model.
    dtype: str = "auto"
    num_pages: int | None = None  # None: as many as fit in memory
    memory_fraction: float = 0.5  # CPU only: share of the memory left free by the models
    prefix_caching: bool = True
    host_gib: float = 0.0  # of host memory for pages that are evicted; 0: they are lost
    state_interval_tokens: int = 2048  # how often states of a long prompt are kept, if it has any
    kv_events_endpoint: str | None = None  # where processes.kv_events publishes; None: nowhere
    kv_events_topic: str = ""

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 32  # requests that run at once
    # Whether fewer run if their states would take most of the memory beside the weights.
    may_lower_seqs: bool = False
    max_num_batched_tokens: int = 512  # rows of one target forward
    max_queue_len: int = 256  # requests that wait for a slot; more are turned away
    # Prompts are cut so that a step with tokens of others takes at most so long; None: they are
    # cut at `max_num_batched_tokens` alone.
    max_itl_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    target: ModelConfig
    draft: ModelConfig | None = None
    device: str = "cpu"  # cpu | cuda | cuda:N
    vocab_size: int | None = None  # without padding; None: the width of the target's logits
    max_model_len: int | None = None  # prompt and output tokens; None: what the target supports
    eos_token_ids: tuple[int, ...] = ()
    token_table: TokenTable | None = None  # None: requests with a grammar are refused
    # Specs for ProcessorRegistry in engine.logits_processors.
    logits_processors: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.9  # share of the GPU for weights, graphs and pages
    batch_invariant: bool | None = None  # logits do not depend on the batch; None: if it is cheap
    enforce_eager: bool = False  # CUDA: launch every kernel instead of replaying graphs
    num_threads: int | None = None  # CPU threads of torch; None: torch's own choice
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def loaded_draft(self) -> ModelConfig | None:
        """The draft, if something is drafted with it."""
        drafts = "draft_model" in self.speculation.sources and self.speculation.k > 0
        return self.draft if drafts else None

    def without_draft(self) -> "EngineConfig":
        sources = tuple(name for name in self.speculation.sources if name != "draft_model")
        return replace(self, draft=None, speculation=replace(self.speculation, sources=sources))
