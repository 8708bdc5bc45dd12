"""The engine: five calls a step."""

import logging
import os
import time
from collections.abc import Callable

import torch

from outrider.engine.api import (
    EngineInfo,
    EngineStats,
    InvalidRequestError,
    NewRequest,
    RequestOutput,
)
from outrider.engine.config import EngineConfig
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.memory import choose_num_pages
from outrider.engine.paged_model import PagedModel
from outrider.engine.proposers import build_proposer
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.engine.slots import Slots
from outrider.engine.target import Target
from outrider.engine.validation import check_request
from outrider.engine.verifier import Verifier

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Engine:
    """A draft/target pair on one device, decoding many sequences at once. Not thread-safe."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        start_s = time.perf_counter()
        report = progress or (lambda stage, done, total: None)
        device = torch.device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        k = config.speculation.num_speculative_tokens
        proposer = config.speculation.proposer if k > 0 else "none"
        k = 0 if proposer == "none" else k

        report("loading the target", 0, 3)
        target = PagedModel(config.target, device)
        report("loading the draft", 1, 3)
        draft = (
            PagedModel(config.draft, device) if config.draft and proposer == "draft_model" else None
        )
        report("allocating the KV cache", 2, 3)
        vocab_size = config.vocab_size or target.vocab_size
        for model in (target, draft):
            if model is not None and model.vocab_size < vocab_size:
                raise ValueError(
                    f"a model with {model.vocab_size} logits cannot serve {vocab_size} tokens"
                )

        page_size = config.cache.page_size_tokens
        max_model_len = min(config.max_model_len or target.max_positions, target.max_positions)
        bytes_per_token = target.bytes_per_token + (draft.bytes_per_token if draft else 0)
        pages_per_sequence = -(-max_model_len // page_size)
        num_pages = choose_num_pages(
            config.cache,
            bytes_per_token,
            config.scheduler.max_num_seqs * pages_per_sequence + 1,
            device,
        )
        max_model_len = self._fit(max_model_len, config, num_pages)
        for model in (target, draft):
            if model is not None:
                model.bind_cache(num_pages, page_size)

        if device.type == "cuda" and not config.enforce_eager:
            self._capture_graphs(config, target, draft, k, -(-max_model_len // page_size), report)
        self._slots = Slots(config.scheduler.max_num_seqs, max_model_len, k, page_size, device)
        self._kv_cache = KVCacheManager(num_pages, page_size, config.cache.prefix_caching)
        self.scheduler = Scheduler(config.scheduler, self._kv_cache, self._slots, k, max_model_len)
        self.proposer = build_proposer(proposer, config, self._slots, vocab_size, draft)
        self.target = Target(target, self._slots)
        self.verifier = Verifier(self._slots, vocab_size)

        self._eos_token_ids = config.eos_token_ids
        self._requests: dict[str, Request] = {}
        self.info = EngineInfo(
            device=str(device),
            target_dtype=str(target.dtype).removeprefix("torch."),
            draft_dtype=str(draft.dtype).removeprefix("torch.") if draft else None,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_pages=num_pages - 1,
            page_size_tokens=page_size,
            cache_bytes=num_pages * page_size * bytes_per_token,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_speculative_tokens=k,
            proposer=None if proposer == "none" else proposer,
            load_s=time.perf_counter() - start_s,
            pid=os.getpid(),
        )
        report("ready", 3, 3)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step of the batch."""
        plan = self.scheduler.schedule()
        if not plan:
            return []
        proposals = self.proposer.propose(plan)
        logits = self.target.score(plan, proposals)
        verified = self.verifier.verify(plan, proposals, logits)
        outputs = self.scheduler.commit(plan, verified)
        for output in outputs:
            if output.finish_reason is not None:
                del self._requests[output.request_id]
        return outputs

    def submit(self, requests: list[NewRequest]) -> None:
        """Queue sequences, all or none. Raises QueueFullError or InvalidRequestError."""
        ids = {new.request_id for new in requests}
        if len(ids) < len(requests) or not ids.isdisjoint(self._requests):
            raise InvalidRequestError("request_id: it is in use already")
        for new in requests:
            check_request(new, self.info.max_model_len, self.info.vocab_size)
        queued = [Request(new, self.info.page_size_tokens, self._eos_token_ids) for new in requests]
        self.scheduler.add(queued)
        self._requests.update((request.request_id, request) for request in queued)

    def abort(self, request_ids: list[str]) -> None:
        """Drop sequences and free their pages now. Unknown ids are ignored; no output follows."""
        for request_id in request_ids:
            if request := self._requests.pop(request_id, None):
                self.scheduler.finish(request)

    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        counters = self.scheduler.counters
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            pages_used=self._kv_cache.num_usable_pages - self._kv_cache.num_free_pages,
            pages_total=self._kv_cache.num_usable_pages,
            steps=counters.num_steps,
            prompt_tokens=counters.num_prompt_tokens,
            cached_tokens=counters.num_cached_tokens,
            generation_tokens=counters.num_generation_tokens,
            preemptions=counters.num_preemptions,
            drafted_per_position=list(counters.drafted_per_position),
            accepted_per_position=list(counters.accepted_per_position),
        )

    def check_integrity(self) -> None:
        """Account for every page and seat; raises RuntimeError on a leak. Cheap; run when idle."""
        self._kv_cache.check_integrity(self.scheduler.running)
        self._slots.check_integrity(self.scheduler.running)

    @staticmethod
    def _capture_graphs(
        config: EngineConfig,
        target: PagedModel,
        draft: PagedModel | None,
        k: int,
        pages_per_seq: int,
        report: Progress,
    ) -> None:
        """The target's plain decodes and verifications; the draft's steps and catch-ups of two."""
        for name, model, rows_per_seq in (
            ("target", target, (1, k + 1)),
            ("draft", draft, (1, 2)),
        ):
            if model is not None:
                stage = f"capturing the {name}'s graphs"
                model.capture_graphs(
                    config.scheduler.max_num_seqs,
                    rows_per_seq,
                    pages_per_seq,
                    lambda done, total, stage=stage: report(stage, done, total),  # type: ignore[misc]
                )

    @staticmethod
    def _fit(max_model_len: int, config: EngineConfig, num_pages: int) -> int:
        """The longest sequence that the pages hold; one alone must always be able to run."""
        fits = (num_pages - 1) * config.cache.page_size_tokens
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
