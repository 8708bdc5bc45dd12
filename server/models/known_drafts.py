"""Drafts that are known to suit a target: `outrider serve MODEL` chooses here without --draft.

The first entry that matches is chosen. So an entry for a single model (a head trained for it, say)
comes before those for its whole family. Further heads of a target must be named.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.ranks.fit import Weights

from ..config.pair_settings import DEFAULT_DRAFT, DEFAULT_K, DEFAULT_TARGET, MTP

# A draft larger than this share of its target costs more than its drafts gain.
MAX_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known about a target once it is on this machine."""

    name: str  # as the user wrote it: a built-in name, a hub id, a directory or a GGUF file
    model_type: str
    vocab_size: int
    num_parameters: int


class Suggestion(NamedTuple):
    """A target, and the memory that it takes with its draft in bfloat16."""

    model: str
    size_gb: float
    whole_gb: float  # draft, embedding and output layer

    @property
    def weights(self) -> Weights:
        return Weights(self.size_gb * 1e9, self.whole_gb * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDraft:
    """A draft, the targets that it suits, and how far it may run ahead of them."""

    model: str
    num_parameters: int
    family: str  # in words, for the log line with the reason
    name: str = ""  # a pattern in the target's name; "": any name
    model_types: tuple[str, ...] = ()  # none: any
    vocab_sizes: frozenset[int] = frozenset()  # of targets, including padding; empty: any
    kind: str = "draft model"
    num_speculative_tokens: int = DEFAULT_K

    def suits(self, target: Target) -> bool:
        return (
            re.search(self.name, target.name, re.IGNORECASE) is not None
            and (not self.model_types or target.model_type in self.model_types)
            and (not self.vocab_sizes or target.vocab_size in self.vocab_sizes)
            and self.num_parameters <= MAX_SHARE * target.num_parameters
        )


# What the names of quantised checkpoints end with.
_NARROW = r"fp8|fp4|nvfp4|mxfp4|awq|gptq|int[48]|[48]bit|w[48]a(4|8|16)|quantized|dynamic|block"


def _head(one: tuple[str, str], model: str, kind: str, billions: float, k: int) -> KnownDraft:
    """A head of one model, which `one` has in words and as its name ends."""
    family, name = one
    return KnownDraft(
        model=model,
        num_parameters=int(billions * 1e9),
        family=family,
        # A directory or a quantised checkpoint of it, too, but no fine-tuned model.
        name=rf"(^|/){name}([-._]({_NARROW}))*/?$",
        kind=f"{kind} head",
        num_speculative_tokens=k,
    )


_LLAMA_3 = frozenset({128_256})
_GEMMA_3 = frozenset({262_144, 262_208})
_QWEN_2 = frozenset({151_936, 152_064})
# See `_head`.
_QWEN_3_8B = "Qwen3 8B", "qwen3-8b"
_QWEN_3_14B = "Qwen3 14B", "qwen3-14b"
_QWEN_3_32B = "Qwen3 32B", "qwen3-32b"
_LLAMA_31_8B = "Llama 3.1 8B Instruct", r"(meta-)?llama-3\.1-8b-instruct"
_GPT_OSS_20B = "gpt-oss 20B", "gpt-oss-20b"
_GPT_OSS_120B = "gpt-oss 120B", "gpt-oss-120b"
_QWEN_3_30B = "Qwen3 30B-A3B", "qwen3-30b-a3b"
_QWEN_3_30B_INSTRUCT = "Qwen3 30B-A3B Instruct", "qwen3-30b-a3b-instruct-2507"
_QWEN_3_30B_THINKING = "Qwen3 30B-A3B Thinking", "qwen3-30b-a3b-thinking-2507"
_OF_30B = "RedHatAI/Qwen3-30B-A3B"
_QWEN_3_CODER = "Qwen3 Coder 30B-A3B Instruct", "qwen3-coder-30b-a3b-instruct"
_EAGLE_OF_CODER = "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge"
_QWEN_35_9B = "Qwen3.5 9B", r"qwen3\.5-9b"
_QWEN_35_27B = "Qwen3.5 27B", r"qwen3\.5-27b"
_QWEN_35_35B = "Qwen3.5 35B-A3B", r"qwen3\.5-35b-a3b"
_QWEN_36_27B = "Qwen3.6 27B", r"qwen3\.6-27b"
_QWEN_36_35B = "Qwen3.6 35B-A3B", r"qwen3\.6-35b-a3b"
_QWEN_38_27B = "Qwen3.8 27B", r"qwen3\.8-27b"
_QWEN_CODER_NEXT = "Qwen3 Coder Next", "qwen3-coder-next"
_SMOLLM_2 = frozenset({49_152})

KNOWN_DRAFTS: Sequence[KnownDraft] = (
    KnownDraft(
        model=DEFAULT_DRAFT,
        num_parameters=17_000_000,
        family=DEFAULT_TARGET,
        name=f"^{re.escape(DEFAULT_TARGET)}$",
        num_speculative_tokens=6,
    ),
    KnownDraft(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        num_parameters=135_000_000,
        family="SmolLM2",
        name="smollm2",
        model_types=("llama",),
        vocab_sizes=_SMOLLM_2,
    ),
    KnownDraft(
        model=DEFAULT_DRAFT,
        num_parameters=17_000_000,
        family="SmolLM2",
        name="smollm2",
        model_types=("llama",),
        vocab_sizes=_SMOLLM_2,
    ),
    *(
        _head(one, model, kind, billions, k)
        for one, model, kind, billions, k in (
            (_QWEN_3_8B, "RedHatAI/Qwen3-8B-speculator.eagle3", "EAGLE-3", 0.4, 6),
            (_QWEN_3_14B, "RedHatAI/Qwen3-14B-speculator.eagle3", "EAGLE-3", 0.6, 6),
            (_QWEN_3_32B, "RedHatAI/Qwen3-32B-speculator.eagle3", "EAGLE-3", 0.8, 6),
            (_LLAMA_31_8B, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE-3", 0.45, 6),
            (_GPT_OSS_20B, "RedHatAI/gpt-oss-20b-speculator.eagle3", "EAGLE-3", 0.5, 6),
            # Sizes that were not looked up, but are about these.
            (_GPT_OSS_120B, "RedHatAI/gpt-oss-120b-speculator.eagle3", "EAGLE-3", 0.5, 6),
            (_QWEN_3_30B, f"{_OF_30B}-speculator.eagle3", "EAGLE-3", 0.5, 6),
            (_QWEN_3_30B_INSTRUCT, f"{_OF_30B}-Instruct-2507-speculator.eagle3", "EAGLE-3", 0.5, 6),
            (_QWEN_3_30B_THINKING, f"{_OF_30B}-Thinking-2507-speculator.eagle3", "EAGLE-3", 0.5, 6),
            (_QWEN_3_CODER, "z-lab/Qwen3-Coder-30B-A3B-DFlash", "DFlash", 0.5, 7),
            (_QWEN_3_CODER, _EAGLE_OF_CODER, "EAGLE-3", 0.2, 6),
            (_QWEN_3_30B, f"{_OF_30B}-speculator.dflash", "DFlash", 0.68, 7),
            (_QWEN_3_30B_INSTRUCT, f"{_OF_30B}-Instruct-2507-speculator.dflash", "DFlash", 0.68, 7),
            (_GPT_OSS_20B, "z-lab/gpt-oss-20b-DFlash", "DFlash", 0.8, 7),
            (_GPT_OSS_120B, "z-lab/gpt-oss-120b-DFlash", "DFlash", 0.8, 7),
            # The Qwen ones were trained on answers without thinking.
            (_QWEN_3_8B, "deepseek-ai/dspark_qwen3_8b_block7", "DSpark", 1.75, 7),
            (_QWEN_3_8B, "z-lab/Qwen3-8B-DFlash-b16", "DFlash", 1.05, 7),
            (_QWEN_3_14B, "deepseek-ai/dspark_qwen3_14b_block7", "DSpark", 2.65, 7),
            (_LLAMA_31_8B, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "DFlash", 1.05, 7),
        )
    ),
    KnownDraft(
        model="Qwen/Qwen3-0.6B",
        num_parameters=600_000_000,
        family="Qwen3",
        model_types=("qwen3",),
        vocab_sizes=frozenset({151_936}),
    ),
    *(
        KnownDraft(
            model=MTP,
            num_parameters=0,  # none besides the target's
            family=family,
            model_types=tuple(model_types),
            kind="MTP head",
            num_speculative_tokens=3,
        )
        for family, *model_types in (
            ("MiMo 7B", "mimo"),
            ("GLM-4.5 to 4.7", "glm4_moe"),
            ("Qwen3.5 to 3.8", "qwen3_5", "qwen3_5_text"),
            ("Qwen3.5 to 3.8, mixtures", "qwen3_5_moe", "qwen3_5_moe_text"),
            ("Qwen3-Next", "qwen3_next"),
        )
    ),
    *(  # behind the heads in the checkpoints of these, which nobody has to download
        _head(one, model, kind, billions, 7)
        for one, model, kind, billions in (
            (_QWEN_35_9B, "z-lab/Qwen3.5-9B-DFlash", "DFlash", 1.0),
            (_QWEN_35_27B, "z-lab/Qwen3.5-27B-DFlash", "DFlash", 1.74),
            (_QWEN_35_35B, "z-lab/Qwen3.5-35B-A3B-DFlash", "DFlash", 0.39),
            (_QWEN_36_27B, "z-lab/Qwen3.6-27B-DFlash", "DFlash", 1.74),
            (_QWEN_36_35B, "z-lab/Qwen3.6-35B-A3B-DFlash", "DFlash", 0.39),
            (_QWEN_CODER_NEXT, "z-lab/Qwen3-Coder-Next-DFlash", "DFlash", 0.5),
            (_QWEN_38_27B, "z-lab/Qwen3.8-27B-DFlash2", "DFlash2", 1.92),
            (_QWEN_38_27B, "RadixArk/Qwen3.8-27B-DSpark", "DSpark", 1.86),
        )
    ),
    # Distilled from R1 over Qwen's and Llama's vocabularies, with special tokens of their own.
    KnownDraft(
        model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        num_parameters=1_780_000_000,
        family="DeepSeek-R1-Distill-Qwen",
        name="r1-distill-qwen",
        model_types=("qwen2",),
        vocab_sizes=_QWEN_2,
    ),
    KnownDraft(
        model="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        num_parameters=494_000_000,
        family="Qwen2.5-Coder",
        name="coder",
        model_types=("qwen2",),
        vocab_sizes=_QWEN_2,
        num_speculative_tokens=6,  # code is easy to predict
    ),
    KnownDraft(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        num_parameters=494_000_000,
        family="Qwen2.5",
        name="^(?!.*r1-distill)",
        model_types=("qwen2",),
        vocab_sizes=_QWEN_2,
    ),
    KnownDraft(
        model="meta-llama/Llama-3.2-1B-Instruct",
        num_parameters=1_240_000_000,
        family="Llama 3",
        name="^(?!.*r1-distill)",
        model_types=("llama",),
        vocab_sizes=_LLAMA_3,
    ),
    *(
        KnownDraft(
            model=model,
            num_parameters=num_parameters,
            family="Gemma 3",
            model_types=("gemma3_text",),
            vocab_sizes=_GEMMA_3,
            num_speculative_tokens=5,
        )
        for model, num_parameters in (
            ("google/gemma-3-1b-it", 1_000_000_000),
            ("google/gemma-3-270m-it", 268_000_000),
        )
    ),
)

# The largest first.
SUGGESTED: Sequence[Suggestion] = (
    Suggestion("Qwen/Qwen3-32B", 66.7, 4.3),
    Suggestion("Qwen/Qwen3-14B", 30.7, 4.3),
    Suggestion("Qwen/Qwen3-8B", 17.6, 3.7),
    Suggestion("Qwen/Qwen3-4B", 9.2, 2.0),
    Suggestion("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3.7, 0.5),
    Suggestion(DEFAULT_TARGET, 0.3, 0.3),
)


def known_drafts_of(target: Target) -> list[KnownDraft]:
    """All drafts that are known for a target, the best first."""
    return [draft for draft in KNOWN_DRAFTS if draft.suits(target)]


def known_draft(target: Target, *, without_hub: bool = False) -> KnownDraft | None:
    """The best draft that is known for a target; None: there is none."""
    suiting = known_drafts_of(target)
    return next((draft for draft in suiting if not (without_hub and "/" in draft.model)), None)
