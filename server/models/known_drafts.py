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


def _head(of: str | tuple[str, str], model: str, kind: str, billions: float) -> KnownDraft:
    """A head of one model, which `of` has in words and, if it is not the same, as its name ends."""
    family, name = (of, re.escape(of.replace(" ", "-"))) if isinstance(of, str) else of
    return KnownDraft(
        model=model,
        num_parameters=int(billions * 1e9),
        family=family,
        # A directory or a quantised checkpoint of it, too, but no fine-tuned model.
        name=rf"(^|/){name}([-._]({_NARROW}))*/?$",
        kind=f"{kind} head",
        num_speculative_tokens=6 if kind == "EAGLE-3" else 7,
    )


def _mtp(family: str, *model_types: str) -> KnownDraft:
    """The heads in the checkpoints of a family, which nobody has to download."""
    return KnownDraft(
        model=MTP,
        num_parameters=0,  # none besides the target's
        family=family,
        model_types=model_types,
        kind="MTP head",
        num_speculative_tokens=3,
    )


def _small(
    family: str,
    model: str,
    millions: int,
    targets: tuple[str, frozenset[int]],
    name: str = "",
    k: int = DEFAULT_K,
) -> KnownDraft:
    """A small model of a family. `targets`: their type, and sizes of their vocabularies."""
    model_type, vocab_sizes = targets
    return KnownDraft(
        model=model,
        num_parameters=millions * 1_000_000,
        family=family,
        name=name,
        model_types=(model_type,),
        vocab_sizes=vocab_sizes,
        num_speculative_tokens=k,
    )


# See `_small`.
_SMOLLM_2 = "llama", frozenset({49_152})
_LLAMA_3 = "llama", frozenset({128_256})
_GEMMA_3 = "gemma3_text", frozenset({262_144, 262_208})
_QWEN_2 = "qwen2", frozenset({151_936, 152_064})
_QWEN_3 = "qwen3", frozenset({151_936})
# See `_head`.
_LLAMA_31_8B = "Llama 3.1 8B Instruct", r"(meta-)?llama-3\.1-8b-instruct"
_QWEN_3_30B_INSTRUCT = "Qwen3 30B-A3B Instruct", "qwen3-30b-a3b-instruct-2507"
_QWEN_3_30B_THINKING = "Qwen3 30B-A3B Thinking", "qwen3-30b-a3b-thinking-2507"
_OF_30B = "RedHatAI/Qwen3-30B-A3B"
_EAGLE_OF_CODER = "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge"

KNOWN_DRAFTS: Sequence[KnownDraft] = (
    KnownDraft(
        model=DEFAULT_DRAFT,
        num_parameters=17_000_000,
        family=DEFAULT_TARGET,
        name=f"^{re.escape(DEFAULT_TARGET)}$",
        num_speculative_tokens=6,
    ),
    _small("SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct", 135, _SMOLLM_2, "smollm2"),
    _small("SmolLM2", DEFAULT_DRAFT, 17, _SMOLLM_2, "smollm2"),
    _head("Qwen3 8B", "RedHatAI/Qwen3-8B-speculator.eagle3", "EAGLE-3", 0.4),
    _head("Qwen3 14B", "RedHatAI/Qwen3-14B-speculator.eagle3", "EAGLE-3", 0.6),
    _head("Qwen3 32B", "RedHatAI/Qwen3-32B-speculator.eagle3", "EAGLE-3", 0.8),
    _head(_LLAMA_31_8B, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE-3", 0.45),
    _head("gpt-oss 20B", "RedHatAI/gpt-oss-20b-speculator.eagle3", "EAGLE-3", 0.5),
    # Sizes that were not looked up, but are about these.
    _head("gpt-oss 120B", "RedHatAI/gpt-oss-120b-speculator.eagle3", "EAGLE-3", 0.5),
    _head("Qwen3 30B-A3B", f"{_OF_30B}-speculator.eagle3", "EAGLE-3", 0.5),
    _head(_QWEN_3_30B_INSTRUCT, f"{_OF_30B}-Instruct-2507-speculator.eagle3", "EAGLE-3", 0.5),
    _head(_QWEN_3_30B_THINKING, f"{_OF_30B}-Thinking-2507-speculator.eagle3", "EAGLE-3", 0.5),
    _head("Qwen3 Coder 30B-A3B Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", "DFlash", 0.5),
    _head("Qwen3 Coder 30B-A3B Instruct", _EAGLE_OF_CODER, "EAGLE-3", 0.2),
    _head("Qwen3 30B-A3B", f"{_OF_30B}-speculator.dflash", "DFlash", 0.68),
    _head(_QWEN_3_30B_INSTRUCT, f"{_OF_30B}-Instruct-2507-speculator.dflash", "DFlash", 0.68),
    _head("gpt-oss 20B", "z-lab/gpt-oss-20b-DFlash", "DFlash", 0.8),
    _head("gpt-oss 120B", "z-lab/gpt-oss-120b-DFlash", "DFlash", 0.8),
    # The Qwen ones were trained on answers without thinking.
    _head("Qwen3 8B", "deepseek-ai/dspark_qwen3_8b_block7", "DSpark", 1.75),
    _head("Qwen3 8B", "z-lab/Qwen3-8B-DFlash-b16", "DFlash", 1.05),
    _head("Qwen3 14B", "deepseek-ai/dspark_qwen3_14b_block7", "DSpark", 2.65),
    _head(_LLAMA_31_8B, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "DFlash", 1.05),
    _small("Qwen3", "Qwen/Qwen3-0.6B", 600, _QWEN_3),
    _mtp("MiMo 7B", "mimo"),
    _mtp("GLM-4.5 to 4.7", "glm4_moe"),
    _mtp("Qwen3.5 to 3.8", "qwen3_5", "qwen3_5_text"),
    _mtp("Qwen3.5 to 3.8, mixtures", "qwen3_5_moe", "qwen3_5_moe_text"),
    _mtp("Qwen3-Next", "qwen3_next"),
    # Behind the heads in the checkpoints of these.
    _head("Qwen3.5 9B", "z-lab/Qwen3.5-9B-DFlash", "DFlash", 1.0),
    _head("Qwen3.5 27B", "z-lab/Qwen3.5-27B-DFlash", "DFlash", 1.74),
    _head("Qwen3.5 35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash", "DFlash", 0.39),
    _head("Qwen3.6 27B", "z-lab/Qwen3.6-27B-DFlash", "DFlash", 1.74),
    _head("Qwen3.6 35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", "DFlash", 0.39),
    _head("Qwen3 Coder Next", "z-lab/Qwen3-Coder-Next-DFlash", "DFlash", 0.5),
    _head("Qwen3.8 27B", "z-lab/Qwen3.8-27B-DFlash2", "DFlash2", 1.92),
    _head("Qwen3.8 27B", "RadixArk/Qwen3.8-27B-DSpark", "DSpark", 1.86),
    # Distilled from R1 over Qwen's and Llama's vocabularies, with special tokens of their own.
    _small(
        "DeepSeek-R1-Distill-Qwen",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        1_780,
        _QWEN_2,
        "r1-distill-qwen",
    ),
    # Code is easy to predict.
    _small("Qwen2.5-Coder", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 494, _QWEN_2, "coder", 6),
    _small("Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", 494, _QWEN_2, "^(?!.*r1-distill)"),
    _small("Llama 3", "meta-llama/Llama-3.2-1B-Instruct", 1_240, _LLAMA_3, "^(?!.*r1-distill)"),
    _small("Gemma 3", "google/gemma-3-1b-it", 1_000, _GEMMA_3, k=5),
    _small("Gemma 3", "google/gemma-3-270m-it", 268, _GEMMA_3, k=5),
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
