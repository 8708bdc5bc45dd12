"""Finds and checks the pair that the settings name, and describes it for the engine."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.engine.api import ReportProgress, ignore_progress
from outrider.engine.config import (
    CacheConfig,
    DraftVocabulary,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TokenTable,
)
from outrider.engine.models.heads.config import (
    MTP_HEAD,
    HeadConfig,
    HeadError,
    head_kind,
    mtp_names,
)

from ..config.pair_settings import MTP, DraftSettings, TargetSettings
from ..config.settings import Settings
from ..text.chat_template import read_template
from ..text.tokenizer import Tokenizer, TokenizerData
from .choice import choose, instead_of, target_of, with_lookup_alone
from .resolve import resolve
from .store import ModelError
from .vocabulary import SAMPLE, Vocabulary, draft_vocabulary, shared_vocab_size

log = logging.getLogger(__name__)


class DraftError(ModelError):
    """The draft cannot be obtained, or does not fit the target."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Local directories of a target and its draft."""

    settings: Settings  # with a k, and a proposer and its draft in place of `auto`
    target: Path
    draft: Path | None  # None: nothing to load besides the target
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerData
    token_table: TokenTable | None = None  # None: grammars cannot be followed
    draft_vocabulary: DraftVocabulary | None = None  # None: the target's
    instead: str = ""  # what to say if the draft cannot be loaded
    draft_is_optional: bool = False


def prepare_pair(settings: Settings, report: ReportProgress = ignore_progress) -> Pair:
    """Fetch, convert and check the models that the settings name, and choose what they leave open.

    Logs what was chosen, and why. Raises ModelError.
    """
    template = None
    if (file := settings.target.chat_template) is not None:
        try:
            template = read_template(file.expanduser())
        except ValueError as error:
            raise ModelError(f"target.chat_template = {str(file)!r}: {error}") from None
    with _naming("target.model", settings.target.model):
        target = resolve(
            settings.target.model,
            settings.target.revision,
            trust_remote_code=settings.target.trust_remote_code,
            report=report,
        )
    config = text_config(target, settings.target)
    is_named = settings.draft.model is not None

    def pair(chosen: Settings) -> Pair:
        found = _pair(chosen, target, config, template, report)
        instead = instead_of_draft(chosen) if found.draft else ""
        return replace(found, instead=instead, draft_is_optional=not is_named)

    def instead_of_draft(chosen: Settings) -> str:
        instead = instead_of(chosen.draft.model, target_of(settings, target, config))
        if not is_named:
            return instead
        return f"Without --draft the best known one that can be loaded is taken, or else {instead}"

    chosen, reason = choose(settings, target, config)
    if reason:
        log.info("%s", reason)
    try:
        return pair(chosen)
    except DraftError as error:
        if is_named:
            raise DraftError(f"{error}. {instead_of_draft(chosen)}") from error
        # The user did not ask for this draft: take one that needs no hub, or continue without.
        why = str(error)
    second, reason = choose(settings, target, config, without_hub=True)
    if second.draft != chosen.draft and second.draft.model is not None:
        log.warning("%s; %s", why, reason)
        try:
            return pair(second)
        except DraftError as error:
            why = str(error)
    log.warning("%s, so there is no draft model: %s", why, instead_of_draft(chosen))
    return pair(with_lookup_alone(settings))


def _pair(
    settings: Settings, target: Path, config: Any, template: str | None, report: ReportProgress
) -> Pair:
    """`template` is that of the settings, which goes before the model's own."""
    from outrider.engine.models.architectures import eos_token_ids

    tokenizer = _tokenizer(target, settings.target)
    tokenizer.chat_template = template or tokenizer.chat_template
    own_vocabulary = Vocabulary.of(tokenizer, config.vocab_size)
    vocab_size, draft, vocabulary = own_vocabulary.size, None, None
    if settings.speculation.has_draft_model:
        assert settings.draft.model is not None  # ensured by the settings
        with _naming("draft.model", settings.draft.model, DraftError):
            trusts = settings.draft.trust_remote_code
            get = partial(resolve, trust_remote_code=trusts, report=report)
            draft = draft_directory(settings.draft, target, config, get)
            if settings.draft.model != MTP and not head_kind(draft):
                width = text_config(draft, settings.draft).vocab_size
                theirs = Vocabulary.of(_tokenizer(draft, settings.draft), width)
                vocab_size, vocabulary = _common_vocabulary(own_vocabulary, tokenizer, theirs)
    try:
        ids = eos_token_ids(target, config, tokenizer)
        data = TokenizerData.of(tokenizer, config.model_type)
    except ValueError as error:
        raise ModelError(f"{target} cannot be served: {error}") from None
    token_table = _token_table(data, vocab_size)
    return Pair(settings, target, draft, vocab_size, ids, data, token_table, vocabulary)


def draft_directory(
    settings: DraftSettings, target: Path, config: Any, get: Callable[[str, str | None], Path]
) -> Path:
    """The draft's directory. `config` is the target's; `get` gets that of a model and revision.

    Raises ModelError or HeadError if there is none, or the draft does not fit the target.
    """
    assert settings.model is not None  # ensured by the settings
    if settings.model == MTP:
        _check_mtp(target, settings)
        return target
    draft = get(settings.model, settings.revision)
    if head_kind(draft):  # a head uses its target's tokenizer; the engine checks the rest
        _check_head(draft, config, settings)
        return draft
    for name in ("attention_window", "head_layers"):
        _refuse_set(name, settings, "the draft is a model, not a head")
    return draft


def _common_vocabulary(
    ours: Vocabulary, tokenizer: Any, theirs: Vocabulary
) -> tuple[int, DraftVocabulary | None]:
    """The pair's vocabulary size and, if ids mean other tokens to the draft, which.

    `tokenizer` is the target's.
    """
    if (size := shared_vocab_size(ours, theirs)) is not None:
        return size, None
    sample_ids = tokenizer(SAMPLE, add_special_tokens=False).input_ids
    found = draft_vocabulary(ours, theirs, sample_ids)
    num_common = sum(i >= 0 for i in found.target_ids)
    log.info(
        "the draft has another tokenizer, with %.0f%% of the target's tokens in ordinary text, and "
        "%d of all its %d; it drafts these alone",
        100 * found.share_of_text,
        num_common,
        ours.size,
    )
    return ours.size, found


def engine_config(pair: Pair) -> EngineConfig:
    """The engine's configuration: the settings, with nothing left to look up or to choose.

    Raises ConfigError if the pair fits on no number of GPUs, and nobody has set one.
    """
    settings = pair.settings
    dtype = settings.target.dtype
    device = resolve_device(settings.target.device)
    given = settings.scheduler
    num_seqs, num_rows = _step_size(device, given.max_num_seqs, given.max_num_batched_tokens)
    config = EngineConfig(
        target=model_config(pair.target, dtype, settings.target),
        draft=(
            replace(
                model_config(pair.draft, settings.draft.dtype or dtype, settings.draft),
                vocabulary=pair.draft_vocabulary,
                is_optional=pair.draft_is_optional,
                instead=pair.instead,
            )
            if pair.draft
            else None
        ),
        device=device,
        vocab_size=pair.vocab_size,
        eos_token_ids=pair.eos_token_ids,
        token_table=pair.token_table,
        max_model_len=settings.engine.max_model_len,
        logits_processors=settings.engine.logits_processors,
        gpu_memory_utilization=settings.engine.gpu_memory_utilization,
        batch_invariant=settings.engine.batch_invariant,
        enforce_eager=settings.engine.enforce_eager,
        num_threads=settings.engine.num_threads,
        speculation=SpeculationConfig(
            sources=settings.speculation.sources,
            **settings.speculation.model_dump(exclude={"proposer"}),
        ),
        cache=CacheConfig(**settings.cache.model_dump()),
        scheduler=SchedulerConfig(
            max_num_seqs=num_seqs,
            may_lower_seqs=settings.scheduler.max_num_seqs is None,
            max_num_batched_tokens=num_rows,
            max_queue_len=settings.scheduler.max_queue_len,
            max_itl_ms=settings.scheduler.max_itl_ms,
        ),
    )
    if device == "cpu" or settings.target.tensor_parallel is not None:
        return config
    from outrider.engine.ranks.choice import choose_ranks  # imports the families of models

    return choose_ranks(config)


def _step_size(device: str, num_seqs: int | None, num_rows: int | None) -> tuple[int, int]:
    """How many sequences run at once, and how many rows a step has; None: nobody says.

    A GPU gives ever more tokens a second up to 256 sequences at least. But each takes memory for
    logits and drafts, and each row for all that layers compute, which the pages of a small GPU need
    more. A small GPU is as busy with 2048 rows.
    """
    most_seqs, most_rows = 32, 512
    if device != "cpu":
        import torch

        is_large = torch.cuda.get_device_properties(device).total_memory > 32 * 2**30
        most_seqs, most_rows = (256, 4096) if is_large else (64, 2048)
    num_seqs = num_seqs or min(most_seqs, num_rows or most_seqs)
    return num_seqs, num_rows or max(num_seqs, most_rows)


def resolve_device(device: str) -> str:
    """The device to use; `auto` is cuda if there is a GPU, else cpu.

    Raises ModelError if there is no such device here.
    """
    if device == "cpu":
        return device
    if not re.fullmatch(r"auto|cuda(:\d+)?", device):
        raise ModelError(f"device is {device!r}; it is auto, cpu, cuda or cuda:N")
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if num_gpus else "cpu"
    if int(device.removeprefix("cuda").removeprefix(":") or 0) >= num_gpus:
        raise ModelError(
            f"device {device!r} is not there: torch finds {num_gpus} GPUs. `outrider doctor` says "
            "what is missing; device 'auto' takes the CPU if there is no GPU"
        )
    return device


def model_config(
    directory: Path, dtype: str, settings: TargetSettings | DraftSettings
) -> ModelConfig:
    return ModelConfig(
        path=str(directory),
        dtype=dtype,
        quantization=settings.quantization,
        trust_remote_code=settings.trust_remote_code,
        head_layers=settings.head_layers if isinstance(settings, DraftSettings) else None,
        attention_window=(
            settings.attention_window if isinstance(settings, DraftSettings) else None
        ),
        is_mtp=isinstance(settings, DraftSettings) and settings.model == MTP,
        tensor_parallel=settings.tensor_parallel or 1,
    )


@contextlib.contextmanager
def _naming(key: str, model: str, kind: type[ModelError] = ModelError) -> Iterator[None]:
    """Say which setting a model's error comes from."""
    try:
        yield
    except (ModelError, HeadError) as error:
        raise kind(f"{key} = {model!r}: {error}") from error


def _check_head(directory: Path, target: Any, settings: DraftSettings) -> None:
    """Refuse an unknown head, or one of another target, before minutes of loading."""
    if head_kind(directory) == MTP_HEAD:
        mtp_names(directory)
        return
    head = HeadConfig.load(directory)
    if settings.head_layers is None:
        head.boundaries_of(target.num_hidden_layers)
    head.check_vocabulary(target.vocab_size)
    if head.block is not None:
        reason = f"a {head.kind} head has windows of its own, or none"
        _refuse_set("attention_window", settings, reason)


def _refuse_set(name: str, settings: DraftSettings, reason: str) -> None:
    if (value := getattr(settings, name)) is not None:
        raise ModelError(f"draft.{name} is {value}, but {reason}: leave it out")


def _check_mtp(target: Path, settings: DraftSettings) -> None:
    """Refuse a target without an MTP head, before minutes of loading."""
    for name in ("revision", "head_layers"):
        _refuse_set(name, settings, "an MTP head has none")
    mtp_names(target)


def _tokenizer(directory: Path, settings: TargetSettings | DraftSettings) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the tokenizers library has a plain Exception for a damaged file
        reason = str(error)
        if isinstance(error, LookupError | AttributeError | TypeError):
            reason = f"one of its files is damaged ({type(error).__name__}: {error})"
        raise ModelError(f"cannot load the tokenizer of {directory}: {reason}") from error


def _token_table(tokenizer: TokenizerData, vocab_size: int) -> TokenTable | None:
    try:
        return Tokenizer(tokenizer).token_table(vocab_size)
    except ValueError as error:
        log.warning("no structured output with this tokenizer: %s", error)
        return None


def text_config(directory: Path, settings: TargetSettings | DraftSettings) -> Any:
    """The text part of a model's config; a multimodal config has other parts, too."""
    from outrider.engine.models.architectures import load_config

    try:
        config = load_config(directory, trust_remote_code=settings.trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"cannot read the config of {directory}: {error}") from error
    return config.get_text_config()
