"""The models of a pair on their device, with one paged KV cache between them."""

import logging
from functools import partial

import psutil
import torch

from outrider.engine.api import ReportProgress
from outrider.engine.config import EngineConfig
from outrider.engine.paged_model import PagedModel
from outrider.engine.slots import Slots

log = logging.getLogger(__name__)


class ModelPair:
    """Target and draft, loaded, their caches bound to the same pages."""

    def __init__(
        self,
        config: EngineConfig,
        proposer: str,
        report: ReportProgress,
    ) -> None:
        device = torch.device(config.device)
        self.target = PagedModel(config.target, device, partial(report, "loading the target"))
        self.draft: PagedModel | None = None
        if proposer == "draft_model" and config.draft is not None:
            self.draft = PagedModel(config.draft, device, partial(report, "loading the draft"))
        self._models = {"target": self.target}
        if self.draft is not None:
            self._models["draft"] = self.draft
        self.vocab_size = config.vocab_size or self.target.vocab_size
        for role, model in self._models.items():
            if model.vocab_size < self.vocab_size:
                raise ValueError(
                    f"the {role} has {model.vocab_size} logits; "
                    f"the vocabulary has {self.vocab_size} tokens"
                )

        report("allocating the KV cache", 0, 1)
        self.page_size = config.cache.page_size_tokens
        self.bytes_per_token = sum(model.bytes_per_token for model in self._models.values())
        max_model_len = min(
            config.max_model_len or self.target.max_positions, self.target.max_positions
        )
        self.num_pages = self._choose_num_pages(config, max_model_len, device)
        self.max_model_len = self._fit(config, max_model_len)
        for model in self._models.values():
            model.bind_cache(self.num_pages, self.page_size)

    def _choose_num_pages(
        self, config: EngineConfig, max_model_len: int, device: torch.device
    ) -> int:
        """As configured, else what fits the configured share of the memory now free."""
        if config.cache.num_pages is not None:
            return config.cache.num_pages
        # More than every seat at full length would only cache prefixes; one page is a dummy.
        most_useful = config.scheduler.max_num_seqs * -(-max_model_len // self.page_size) + 1
        free_bytes = (
            torch.cuda.mem_get_info(device)[0]
            if device.type == "cuda"
            else psutil.virtual_memory().available
        )
        page_bytes = self.bytes_per_token * self.page_size
        return min(most_useful, int(free_bytes * config.cache.memory_fraction) // page_bytes)

    def _fit(self, config: EngineConfig, max_model_len: int) -> int:
        """The longest sequence that the pages hold; one alone must always be able to run."""
        fits = (self.num_pages - 1) * self.page_size
        if fits >= max_model_len:
            return max_model_len
        if config.max_model_len is not None or fits < 2:
            raise ValueError(
                f"max_model_len is {max_model_len} tokens, but the KV cache holds {max(fits, 0)}; "
                "lower max_model_len, or give the cache more pages or memory"
            )
        log.warning(
            "max_model_len is cut from %d to %d tokens: the KV cache holds no more",
            max_model_len,
            fits,
        )
        return fits

    def bind_slots(self, slots: Slots) -> None:
        """Let both models take their batches' rows from these slots."""
        for model in self._models.values():
            model.bind_slots(slots)
