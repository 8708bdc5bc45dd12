"""What the weights of the configured pair take: by its files on this machine, or by the hub."""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi

from outrider.engine.config import EngineConfig
from outrider.engine.models.heads.config import HeadError
from outrider.engine.models.weight_files import holds_gguf
from outrider.engine.ranks.choice import pair_weights
from outrider.engine.ranks.fit import Weights

from ..config.settings import Settings
from ..models.choice import choose
from ..models.pair import DraftError, draft_directory, model_config, text_config
from ..models.resolve import find, is_hub_id
from ..models.store import ModelError

_SIZE_TIMEOUT_S = 2.0
_READ = re.compile(r"(model[^/]*|mtp)\.safetensors")  # of a hub's files, those with weights


class PairWeights(NamedTuple):
    text: str  # what was counted, in words
    weights: Weights
    is_least: bool = False  # whether more is whole on the first GPU: only a sum is known
    config: EngineConfig | None = None  # of a pair that is here
    without_draft: "PairWeights | None" = None  # what is loaded if an optional draft does not fit


def counted(settings: Settings, *, has_hub: bool) -> PairWeights | str:
    """What the pair takes; or why nobody knows: it is not here, and the hub does not say either."""
    try:
        return _by_files(settings)
    except DraftError as error:
        return str(error)
    except (ModelError, ValueError, OSError) as error:
        asks = has_hub and is_hub_id(settings.target.model)
        return (_by_hub(settings) if asks else None) or str(error)


def _by_files(settings: Settings) -> PairWeights:
    """By the headers of the files of a target that is here; fetches nothing.

    Raises ModelError if it is not here, ValueError or OSError if its files cannot be read, and
    DraftError for a draft that is named and cannot be used, unless the hub may have another.
    """
    name, named_draft = settings.target.model, settings.draft.model
    target = find(name, settings.target.revision)
    config = text_config(target, settings.target)
    settings, _ = choose(settings, target, config)
    dtype, draft = settings.target.dtype, settings.draft
    alone = EngineConfig(
        target=model_config(target, dtype, settings.target), device=_device(settings.target.device)
    )
    if not settings.speculation.has_draft_model:
        return _taken(f"{name} takes", alone)
    try:
        folder = draft_directory(draft, target, config, find)
        both = replace(alone, draft=model_config(folder, draft.dtype or dtype, draft))
        pair = _taken(f"{name} and its draft, {draft.model}, take", both)
    except (ModelError, HeadError, ValueError, OSError) as error:
        if named_draft is not None and not is_hub_id(named_draft):
            raise DraftError(f"draft.model = {named_draft!r}: {error}") from error
        return _taken(f"the draft {draft.model} is not counted: {error}; {name} takes", alone)
    if named_draft is not None:
        return pair
    text = f"the draft {draft.model} is left out, as it does not fit; {name} takes"
    return pair._replace(without_draft=_taken(text, alone))


def _taken(text: str, engine: EngineConfig) -> PairWeights:
    models = [engine.target, engine.draft] if engine.draft else [engine.target]
    folders = {Path(model.path) for model in models}
    if engine.device == "cpu" and any(map(holds_gguf, folders)):  # it keeps its width there
        files = (file for folder in folders for file in folder.glob("model*.*"))
        in_all = sum(file.stat().st_size for file in files)
        return PairWeights(text, Weights(in_all, in_all), config=engine)
    return PairWeights(text, pair_weights(engine), config=engine)


def _device(named: str) -> str:
    """As the server would have it, if it is here."""
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if named == "auto" else named


def _by_hub(settings: Settings) -> PairWeights | None:
    """By the sizes of the hub's files, if it answers at once; without a draft of its own files."""
    name = settings.target.model
    try:
        info = HfApi().model_info(
            name, revision=settings.target.revision, files_metadata=True, timeout=_SIZE_TIMEOUT_S
        )
    except Exception:  # whatever the hub's library has for a failure: then nothing is known
        return None
    files = [file for file in info.siblings or () if _READ.fullmatch(file.rfilename)]
    in_all = sum(file.size or 0 for file in files)
    text = f"{name} is not here yet; by the hub its files take"
    return PairWeights(text, Weights(in_all, 0), is_least=True) if in_all else None
