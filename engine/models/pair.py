"""The models of a pair on their device, over one paged KV cache."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from outrider.kernels._dispatch import converts_fp8, uses_triton

from ..api import ReportProgress, ignore_progress
from ..config import ConfigError, EngineConfig, ModelConfig
from ..state.slots import Slots
from .formats import rounds_cache
from .groups import grouped
from .heads.config import HeadError, is_head
from .heads.head import Head
from .heads.loading import load_head
from .loading import load_network
from .network import Network, PagedLayers
from .shares import Share

log = logging.getLogger(__name__)


def _cache_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    name = config.cache.dtype
    if name not in ("auto", "fp8", "model"):
        raise ConfigError(f"cache.dtype is {name!r}; it may be auto, fp8 or model")
    if name == "model" or (name == "auto" and not rounds_cache(Path(config.target.path))):
        return None
    reason = None
    if not uses_triton(torch.empty(0, device=device)):
        reason = "is read on a GPU only"
    elif device.type == "cuda" and not converts_fp8(device):
        reason = f"{torch.cuda.get_device_name(device)} does not support"
    if name == "fp8" and reason:
        raise ConfigError(f"cache.dtype is fp8, which {reason}; leave it at auto")
    if name == "auto":
        kept = f"the model's dtype, as FP8 {reason}" if reason else "FP8"
        log.info("the checkpoint keeps keys and values in FP8; here they are in %s", kept)
    else:
        log.warning(
            "cache.dtype is fp8: keys and values are rounded to 8 bits, so that this is another "
            "model than with a cache of its own dtype"
        )
    return None if reason else torch.float8_e4m3fn


def load_shares(
    config: EngineConfig, report: ReportProgress = ignore_progress, rank: int = 0
) -> list[Network]:
    """What all ranks have a share of: the target, of one rank all of it, and perhaps its draft.

    On each rank, that rank's share.
    """
    device = torch.device(config.device)
    target = load_network(
        config.target,
        device,
        report,
        batch_invariant=config.batch_invariant,
        cache_dtype=_cache_dtype(config, device),
        share=Share(rank, config.target.tensor_parallel),
        max_model_len=config.max_model_len,
    )
    draft = config.loaded_draft
    if draft is None or draft.tensor_parallel == 1:
        return [target]
    return [target, _load_draft_model(draft, target, report, rank)]


def _load_draft_model(
    draft: ModelConfig, target: Network, report: ReportProgress, rank: int = 0
) -> Network:
    if (window := draft.attention_window) is not None:
        raise ConfigError(
            f"draft.attention_window is {window}, but {draft.path} is a model, not a head: leave "
            "it out"
        )
    network = load_network(
        draft,
        target.device,
        report,
        is_draft=True,
        cache_dtype=target.cache_dtype,
        share=Share(rank, draft.tensor_parallel),
    )
    network.may_fall_behind = True
    return network


class ModelPair:
    """The loaded target and draft; a page holds the KV of the same tokens for both.

    The draft is a model of its own, or a head that reads hidden states of the target.
    """

    def __init__(
        self,
        config: EngineConfig,
        report: ReportProgress,
        shared: Callable[[list[Network]], Sequence[Network]] = lambda networks: networks,
    ) -> None:
        """`shared` makes of the first rank's shares what runs on all, if there are several.

        An optional draft that cannot be loaded is left out, also of the `config` kept here.
        """
        self.on_all_ranks = shared(load_shares(config, report))
        self.target, *drafts = self.on_all_ranks
        self.draft: Network | None = drafts[0] if drafts else None
        self.head: Head | None = None
        draft = config.loaded_draft
        if draft is not None and self.draft is None:
            try:
                self._load_draft(draft, config, report)
            except Exception as error:
                config = _without_draft(draft, config, error)
                self.target.tap(())  # by a head that failed once it was loaded
        if self.head is not None:
            _check_num_drafts(self.head, config)
        self.config = config
        roles = {"target": self.target, "draft": self.draft, "head": self.head}
        layers_of: dict[str, PagedLayers] = {
            role: layers for role, layers in roles.items() if layers is not None
        }
        self.vocab_size = config.vocab_size or self.target.vocab_size
        for role, layers in layers_of.items():
            if layers.vocab_size < self.vocab_size:
                raise ValueError(
                    f"the {role} has {layers.vocab_size} logits; "
                    f"the vocabulary has {self.vocab_size} tokens"
                )

        vocabulary = config.draft and config.draft.vocabulary
        if vocabulary and len(vocabulary.read_as) != self.vocab_size:
            raise ValueError(
                f"the draft can read {len(vocabulary.read_as)} tokens; the vocabulary has "
                f"{self.vocab_size}"
            )

        self.page_size = config.cache.page_size_tokens
        self.max_model_len = config.max_model_len or self.target.max_positions
        self.groups = grouped(layers_of.values(), self.max_model_len)
        self.caches_prefixes = config.cache.prefix_caching

    def _load_draft(self, draft: ModelConfig, config: EngineConfig, report: ReportProgress) -> None:
        if not is_head(draft):
            self.draft = _load_draft_model(draft, self.target, report)
            return
        report_head = partial(report, "loading the draft")
        self.head = load_head(draft, self.target, config.target.path, report_head)

    def longest_sequence(self, num_pages: int, slots: Slots, config: EngineConfig) -> int:
        """Tokens of the longest sequence that fits into slots and pages when it runs alone."""
        fits = min((num_pages - 1) * self.page_size, slots.max_model_len)  # one page is a dummy
        if fits >= self.max_model_len:
            return self.max_model_len
        if fits < 2:
            raise ConfigError(
                f"the KV cache holds {max(fits, 0)} tokens, and a sequence has two at least: give "
                "it more pages (cache.num_pages) or memory"
            )
        if config.max_model_len is not None:
            raise ConfigError(
                f"engine.max_model_len is {self.max_model_len} tokens, but the KV cache holds "
                f"{fits}: set it to that at most, or give the cache more pages or memory"
            )
        log.warning(
            "engine.max_model_len is cut from %d to %d tokens: the KV cache holds no more",
            self.max_model_len,
            fits,
        )
        return fits

    def bind(self, num_pages: Sequence[int], slots: Slots) -> None:
        """Give both models these slots and a new KV cache of so many pages in each group.

        Frees the old cache and the graphs of their passes first. Raises torch.OutOfMemoryError if
        there is no room.
        """
        for model in (self.target, self.draft):
            if model is not None:
                model.bind_slots(slots)
        for group in self.groups:
            group.free()
        torch.cuda.empty_cache()
        for i, (group, num) in enumerate(zip(self.groups, num_pages, strict=True)):
            group.bind(i, num, self.page_size)


def _without_draft(draft: ModelConfig, config: EngineConfig, error: Exception) -> EngineConfig:
    """Raises the error if the draft is not optional, with what would draft in its place."""
    if draft.is_optional:
        is_foreseen = isinstance(error, ValueError | OSError | torch.OutOfMemoryError)
        log.warning(
            "%s, so there is no draft model: %s",
            error,
            draft.instead,
            exc_info=None if is_foreseen else error,
        )
        return config.without_draft()
    if isinstance(error, ConfigError) and draft.instead:
        raise ConfigError(f"{error}. {draft.instead}") from error
    raise error


def _check_num_drafts(head: Head, config: EngineConfig) -> None:
    k, most = config.speculation.num_speculative_tokens, head.max_drafts
    if config.draft is not None and most is not None and k > most:
        raise HeadError(
            f"speculation.num_speculative_tokens is {k}, but the {head.kind} head "
            f"{config.draft.path} drafts {most} tokens at most; lower it"
        )
