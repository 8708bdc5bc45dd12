"""Settings of the target, of the draft, and of what drafts and how much."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from outrider.engine.api import MAX_K, SourceName

from .section import SettingPath, SettingsSection

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
        default="auto",
        description="auto | cpu | cuda | cuda:N, for target and draft; auto: cuda where there is "
        "one.",
    )
    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        description="Processes that share the target's layers, each with a GPU of its own; the "
        "draft is whole on the first unless draft.tensor_parallel is set. Unset: 1 if the pair "
        "fits on one GPU, else the fewest of the visible GPUs that it fits on; on a CPU 1.",
    )
    chat_template: SettingPath | None = Field(
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

    @property
    def has_draft_model(self) -> bool:
        """Whether a model or head drafts, once `auto` is resolved."""
        return "draft_model" in self.proposer and self.num_speculative_tokens != 0
