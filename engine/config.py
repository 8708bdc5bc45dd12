"""What the engine is told at start: plain frozen data that a bare GPU box can build by hand."""

from dataclasses import dataclass, field

from .api import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the pair, as a local directory that transformers can load."""

    path: str
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: str | None = None  # "fp8": round the plain linear layers; None: as they are
    trust_remote_code: bool = False
    head_layers: tuple[int, ...] | None = None  # that a head reads behind; None: as its config says


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What token ids stand for, which grammars need to know and nothing else does."""

    token_bytes: tuple[bytes, ...]  # [vocab_size]; b"" where no text has the token
    special_token_ids: tuple[int, ...] = ()  # control tokens, whose names no text spells


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    proposer: str = "draft_model"  # a name of engine.proposers.PROPOSERS
    num_speculative_tokens: int = 4  # k; 0 decodes plainly
    adaptive: bool = True  # draft fewer, down to none, where measured cost says that it pays
    verification: Verification = "token"  # the rule of requests that name none
    ngram_min_tokens: int = 1  # shortest suffix the ngram proposer looks up
    ngram_max_tokens: int = 4  # longest suffix it tries first


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size_tokens: int = 16
    num_pages: int | None = None  # None: what the memory allows
    memory_fraction: float = 0.5  # on a CPU: of the memory that is free once the models are loaded
    prefix_caching: bool = True
    kv_events_endpoint: str | None = None  # where engine.kv_events publishes; None: nowhere
    kv_events_topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 32  # requests that run at once
    max_num_batched_tokens: int = 512  # rows of one target forward
    max_queue_len: int = 256  # requests that wait for a seat; more are turned away


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    target: ModelConfig
    draft: ModelConfig | None = None
    device: str = "cpu"  # cpu | cuda | cuda:N
    vocab_size: int | None = None  # real vocabulary; None: the target's logits width
    max_model_len: int | None = None  # tokens of prompt and output; None: what the target supports
    eos_token_ids: tuple[int, ...] = ()
    token_table: TokenTable | None = None  # None: requests with a grammar are refused
    logits_processors: tuple[
        str, ...
    ] = ()  # specs of ProcessorRegistry in engine.logit_edits.processors
    gpu_memory_utilization: float = 0.9  # share of the GPU that weights, graphs and pages may take
    batch_invariant: bool = False  # CUDA: a sequence's logits are the same bits in any company
    enforce_eager: bool = False  # CUDA: launch every kernel, capture no graphs
    num_threads: int | None = None  # CPU threads of torch; None: torch's own choice
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
