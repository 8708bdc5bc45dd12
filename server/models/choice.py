"""Chooses a draft for a target, if the settings leave it open."""

import math
from pathlib import Path
from typing import Any, get_args

from outrider.engine.api import SourceName
from outrider.engine.models.weight_files import GGUF, WeightFileError, holds_gguf, stored_tensors

from ..config.pair_settings import DEFAULT_K
from ..config.settings import Settings
from .known_drafts import Target, known_draft, known_drafts_of
from .store import ModelError, read_json

# Of GPTQ and AWQ, compressed-tensors, MXFP4, ModelOpt.
_PACKED = ("qweight", "weight_packed", "_blocks", ".weight")
_PAIR = "U8"  # two numbers of 4 bits; I32 holds as many as the config says
EVERY_SOURCE = get_args(SourceName)
LOOKUP_TOKENS = 5  # drafts a step of prompt lookup: they cost next to nothing


def choose(
    settings: Settings, directory: Path, config: Any, *, without_hub: bool = False
) -> tuple[Settings, str]:
    """What the settings say by which to draft; if that is auto, the draft that they name, or the
    best known one, or prompt lookup, in this order.

    `directory` and `config` are those of the target. Returns settings with the chosen proposer and
    draft, and the reason of a choice in words. `without_hub` leaves out drafts that would come from
    a hub.
    """
    if settings.speculation.proposer != ("auto",):
        return with_proposer(settings, *settings.speculation.proposer), ""
    if settings.speculation.num_speculative_tokens == 0:
        return with_proposer(settings, "none"), "draft: none, as k is 0"
    if (named := settings.draft.model) is not None:
        return with_proposer(settings, *EVERY_SOURCE), f"draft: {named}, as the settings say"
    target = target_of(settings, directory, config)
    known = known_draft(target, without_hub=without_hub)
    if known is None:
        why = f"no draft is known for {target.name}"
        return with_lookup_alone(settings), f"{why}: {instead_of(None, target)}"
    chosen = with_proposer(settings, *EVERY_SOURCE, k=known.num_speculative_tokens)
    draft = settings.draft.model_copy(update={"model": known.model})
    return (
        chosen.model_copy(update={"draft": draft}),
        f"draft: {known.model} ({known.kind} for {known.family}), the best that is known for "
        f"{target.name}; --draft takes another, --no-draft none",
    )


def with_lookup_alone(settings: Settings) -> Settings:
    """Prompt lookup, which needs no second model."""
    return with_proposer(settings, *EVERY_SOURCE[:-1], k=LOOKUP_TOKENS)


def instead_of(draft: str | None, target: Target) -> str:
    """What drafts for the target if this draft does not, in words."""
    text = "drafts are looked up in the text so far; `outrider distill` makes a draft for any "
    text += "model, --draft takes one"
    known = dict.fromkeys(each.model for each in known_drafts_of(target))  # some are listed twice
    if others := [model for model in known if model != draft]:
        are = "is" if len(others) == 1 else "are"
        text += f", such as {' or '.join(others)}, which {are} known for {target.name}"
    return text


def target_of(settings: Settings, directory: Path, config: Any) -> Target:
    return Target(
        name=settings.target.model,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        num_parameters=count_parameters(directory),
    )


def count_parameters(directory: Path) -> int:
    """How many numbers the weight files of a model hold, according to their headers."""
    count = 0
    if holds_gguf(directory):
        from outrider.engine.models.gguf_file import GgufFile  # imports torch: seconds

        gguf = GgufFile(directory / GGUF)
        count += sum(math.prod(gguf.shape_of(name)) for name in gguf.entries)
    packed = {"I32": 32 // _packed_bits(directory), _PAIR: 2}
    if not any(directory.glob("*.safetensors")):
        return count
    try:
        tensors = stored_tensors(directory)
    except WeightFileError as error:
        raise ModelError(f"{directory}: {error}") from error
    for name, stored in tensors.items():
        is_packed = name.endswith(_PACKED)
        count += math.prod(stored.shape) * (packed.get(stored.dtype, 1) if is_packed else 1)
    return count


def _packed_bits(directory: Path) -> int:
    """Bits of a weight, by the model's config, if the file packs several into a word."""
    quantization = read_json(directory / "config.json").get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).values()
    found = [
        quantization.get("bits"),
        *((group.get("weights") or {}).get("num_bits") for group in groups),
    ]
    return next((int(bits) for bits in found if bits), 4)


def with_proposer(settings: Settings, *proposer: str, k: int = DEFAULT_K) -> Settings:
    """`k` applies unless the settings have a k of their own."""
    speculation = settings.speculation
    own_k = speculation.num_speculative_tokens
    update = {"proposer": proposer, "num_speculative_tokens": k if own_k is None else own_k}
    return settings.model_copy(update={"speculation": speculation.model_copy(update=update)})
