"""The models of a pair on their device, over one paged KV cache."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from outrider.kernels._dispatch import converts_fp8, uses_triton

from ..api import ReportProgress, ignore_progress
from ..config import ConfigError, EngineConfig
from ..state.slots import Slots
from .checkpoint import ReportCounts
from .formats import rounds_cache
from .groups import grouped
from .heads.config import HeadError, head_kind
from .heads.head import Head
from .heads.loading import load_head
from .loading import load_network
from .network import Network, PagedLayers
from .shares import Share

log = logging.getLogger(__name__)


def _cache_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    name = config.cache.dtype
    if name not in ("auto", "fp8", "model"):
        raise ValueError(f"cache.dtype is {name!r}; it may be auto, fp8 or model")
    if name == "model" or (name == "auto" and not rounds_cache(Path(config.target.path))):
        return None
    reason = None
    if not uses_triton(torch.empty(0, device=device)):
        reason = "is read on a GPU only"
    elif device.type == "cuda" and not converts_fp8(device):
        reason = f"{torch.cuda.get_device_name(device)} does not support"
    if name == "fp8" and reason:
        raise ValueError(f"cache.dtype is fp8, which {reason}; leave it at auto")
    if name == "auto":
        kept = f"the model's dtype, as FP8 {reason}" if reason else "FP8"
        log.info("the checkpoint keeps keys and values in FP8; here they are in %s", kept)
    else:
        log.warning(
            "cache.dtype is fp8: keys and values are rounded to 8 bits, so that this is another "
            "model than with a cache of its own dtype"
        )
    return None if reason else torch.float8_e4m3fn


def load_target(
    config: EngineConfig, report: ReportCounts = ignore_progress, share: Share | None = None
) -> Network:
    """The target or, if ranks share it, the share of one; of the first, unless it is given."""
    device = torch.device(config.device)
    return load_network(
        config.target,
        device,
        report,
        batch_invariant=config.batch_invariant,
        cache_dtype=_cache_dtype(config, device),
        share=share or Share(0, config.target.tensor_parallel),
    )


class ModelPair:
    """The loaded target and draft; a page holds the KV of the same tokens for both.

    The draft is a model of its own, or a head that reads hidden states of the target.
    """

    def __init__(
        self,
        config: EngineConfig,
        report: ReportProgress,
        shared: Callable[[Network], Network] = lambda target: target,
    ) -> None:
        """`shared` makes of the first rank's share what runs on all, if ranks share the target."""
        device = torch.device(config.device)
        cache_dtype = _cache_dtype(config, device)
        self.target = shared(load_target(config, partial(report, "loading the target")))
        self.draft: Network | None = None
        self.head: Head | None = None
        self._layers: dict[str, PagedLayers] = {"target": self.target}
        speculation = config.speculation
        drafts = "draft_model" in speculation.sources and speculation.max_drafts > 0
        if drafts and config.draft is not None:
            report_draft = partial(report, "loading the draft")
            if config.draft.is_mtp or head_kind(config.draft.path):
                self.head = load_head(config.draft, self.target, config.target.path, report_draft)
                _check_num_drafts(self.head, config)
                self._layers["head"] = self.head
            else:
                if (window := config.draft.attention_window) is not None:
                    raise ConfigError(
                        f"draft.attention_window is {window}, but {config.draft.path} is a model, "
                        "not a head: leave it out"
                    )
                self.draft = load_network(
                    config.draft, device, report_draft, is_draft=True, cache_dtype=cache_dtype
                )
                self._layers["draft"] = self.draft
        self.vocab_size = config.vocab_size or self.target.vocab_size
        for role, layers in self._layers.items():
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
        if self.max_model_len > self.target.max_positions:
            raise ValueError(
                f"max_model_len is {self.max_model_len} tokens, but the target has positions for "
                f"{self.target.max_positions}; lower max_model_len, or leave it out"
            )
        # A draft model may fall behind, a head never does.
        owners = [(layers, layers is not self.draft) for layers in self._layers.values()]
        self.groups = grouped(owners, self.max_model_len)
        self.caches_prefixes = config.cache.prefix_caching

    def longest_sequence(self, num_pages: int, config: EngineConfig) -> int:
        """Tokens of the longest sequence that fits into the pages when it runs alone."""
        fits = (num_pages - 1) * self.page_size  # one page is a dummy
        if fits >= self.max_model_len:
            return self.max_model_len
        if config.max_model_len is not None or fits < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len} tokens, but the KV cache holds "
                f"{max(fits, 0)}; lower max_model_len, or give the cache more pages or memory"
            )
        log.warning(
            "max_model_len is cut from %d to %d tokens: the KV cache holds no more",
            self.max_model_len,
            fits,
        )
        return fits

    def bind(self, num_pages: Sequence[int], slots: Slots) -> None:
        """Give both models these slots and a new KV cache of so many pages in each group.

        Frees the old cache and graphs first. Raises torch.OutOfMemoryError if there is no room.
        """
        for model in (self.target, self.draft):
            if model is not None:
                model.bind_slots(slots)
        for group in self.groups:
            group.free()
        torch.cuda.empty_cache()
        for i, (group, num) in enumerate(zip(self.groups, num_pages, strict=True)):
            group.bind(i, num, self.page_size)


def _check_num_drafts(head: Head, config: EngineConfig) -> None:
    k, most = config.speculation.num_speculative_tokens, head.max_drafts
    if config.draft is not None and most is not None and k > most:
        raise HeadError(
            f"num_speculative_tokens is {k}, but the {head.kind} head {config.draft.path} drafts "
            f"{most} tokens at most; lower it"
        )
