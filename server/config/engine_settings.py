"""Settings of the engine process: its cache, its scheduler, and what it may use."""

from typing import Literal

from pydantic import Field

from .section import SettingsSection


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
        le=2**20,
        allow_inf_nan=False,
        description="Host memory for cached pages whose room on the GPU is needed, in GiB. They "
        "come back when a prompt begins with their tokens again. 0: they are computed again.",
    )
    state_interval_tokens: int = Field(
        default=2048,
        ge=1,
        description="Of models that keep a state of a whole sequence (Qwen3.5, Qwen3-Next, "
        "Nemotron 3, hybrids of Granite 4): a long prompt leaves a copy of it every so many "
        "tokens, for prompts that begin with them. One is also kept where a prompt ends and where "
        "it turned out to differ from another. A copy takes as much memory as the state of a "
        "running sequence. Other models ignore this.",
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
        default=None, ge=1, le=1024, description="CPU threads of torch; unset: torch's own choice."
    )
