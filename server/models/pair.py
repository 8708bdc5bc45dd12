"""The pair that the settings name, found, checked and described for the engine."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.api import ReportProgress
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TokenTable,
)

from ..cli.progress import ignore_progress
from ..config.settings import DraftSettings, Settings, TargetSettings
from ..text.tokenizer import Tokenizer
from .compatibility import Vocabulary, shared_vocab_size
from .resolve import resolve
from .store import ModelError

log = logging.getLogger("outrider.server.models.pair")


@dataclass(frozen=True, slots=True)
class Pair:
    """Local directories of a target and its draft, which share a tokenizer."""

    target: Path
    draft: Path | None  # None: nothing to load besides the target
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    token_table: TokenTable | None = None  # None: grammars cannot be followed


def prepare_pair(settings: Settings, progress: ReportProgress = ignore_progress) -> Pair:
    """Fetch, convert and check what the settings name. Raises ModelError."""
    target = _directory("target.model", settings.target.model, settings.target, progress)
    config = _config(target, settings.target)
    tokenizer = _tokenizer(target, settings.target)
    vocabulary = _vocabulary(config, tokenizer)
    vocab_size = vocabulary.size
    draft = None
    if settings.speculates_with_draft and settings.draft_model is not None:
        draft = _directory("draft.model", settings.draft_model, settings.draft, progress)
        draft_vocabulary = _vocabulary(
            _config(draft, settings.draft), _tokenizer(draft, settings.draft)
        )
        with _told("draft.model", settings.draft_model):
            vocab_size = shared_vocab_size(vocabulary, draft_vocabulary)
    eos_token_ids = _eos_token_ids(target, config, tokenizer)
    return Pair(target, draft, vocab_size, eos_token_ids, _token_table(tokenizer, vocab_size))


def engine_config(settings: Settings, pair: Pair) -> EngineConfig:
    """What the engine is told: the settings, with nothing left to look up."""
    dtype = settings.target.dtype
    speculates = settings.speculation.proposer != "none"
    return EngineConfig(
        target=_model_config(pair.target, dtype, settings.target),
        draft=(
            _model_config(pair.draft, settings.draft.dtype or dtype, settings.draft)
            if pair.draft
            else None
        ),
        device=resolve_device(settings.target.device),
        vocab_size=pair.vocab_size,
        eos_token_ids=pair.eos_token_ids,
        token_table=pair.token_table,
        max_model_len=settings.engine.max_model_len,
        logits_processors=settings.engine.logits_processors,
        gpu_memory_utilization=settings.engine.gpu_memory_utilization,
        enforce_eager=settings.engine.enforce_eager,
        num_threads=settings.engine.num_threads,
        speculation=SpeculationConfig(
            proposer=settings.speculation.proposer if speculates else "draft_model",
            num_speculative_tokens=settings.speculation.num_speculative_tokens * speculates,
            adaptive=settings.speculation.adaptive,
            verification=settings.speculation.verification,
            ngram_min_tokens=settings.speculation.ngram_min_tokens,
            ngram_max_tokens=settings.speculation.ngram_max_tokens,
        ),
        cache=CacheConfig(**settings.cache.model_dump()),
        scheduler=SchedulerConfig(**settings.scheduler.model_dump()),
    )


def resolve_device(device: str) -> str:
    """`auto` made definite: cuda where there is one, else cpu."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _model_config(
    directory: Path, dtype: str, settings: TargetSettings | DraftSettings
) -> ModelConfig:
    return ModelConfig(
        path=str(directory), dtype=dtype, trust_remote_code=settings.trust_remote_code
    )


def _directory(
    key: str, model: str, settings: TargetSettings | DraftSettings, progress: ReportProgress
) -> Path:
    with _told(key, model):
        return resolve(
            model,
            settings.revision,
            trust_remote_code=settings.trust_remote_code,
            progress=progress,
        )


@contextlib.contextmanager
def _told(key: str, model: str) -> Iterator[None]:
    """Say which setting a model's error comes from."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{key} = {model!r}: {error}") from error


def _tokenizer(directory: Path, settings: TargetSettings | DraftSettings) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=settings.trust_remote_code
        )
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"cannot load the tokenizer of {directory}: {error}") from error


def _token_table(tokenizer: Any, vocab_size: int) -> TokenTable | None:
    try:
        return Tokenizer(tokenizer).token_table(vocab_size)
    except ValueError as error:
        log.warning("no structured output with this tokenizer: %s", error)
        return None


def _config(directory: Path, settings: TargetSettings | DraftSettings) -> Any:
    """The text part of a model's config; a multimodal one has other parts beside it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=settings.trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"cannot read the config of {directory}: {error}") from error
    return config.get_text_config()


def _vocabulary(config: Any, tokenizer: Any) -> Vocabulary:
    return Vocabulary(
        token_ids=tokenizer.get_vocab(),
        special_ids=frozenset(tokenizer.all_special_ids)
        | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special},
        width=config.vocab_size,
    )


def _eos_token_ids(directory: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: what generation stops at, and the tokenizer's own end."""
    generation = directory / "generation_config.json"
    stated = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    if stated is None:
        stated = getattr(config, "eos_token_id", None)
    found = [*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id]
    return tuple(sorted({int(token_id) for token_id in found if token_id is not None}))
