"""The engine: schedule, propose, score, verify, commit."""

import gc
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .api import (
    EngineInfo,
    EngineStats,
    InvalidRequestError,
    NewRequest,
    ReportProgress,
    RequestOutput,
)
from .config import EngineConfig
from .logit_edits.processors import ProcessorRegistry
from .memory import measure_pages
from .models.paged_model import PagedModel
from .models.pair import ModelPair
from .proposers import build_proposer
from .request import Request
from .scheduling.adaptive_speculation import AdaptiveSpeculation
from .scheduling.kv_cache import KVCacheManager, PageEvent
from .scheduling.scheduler import Scheduler
from .scoring.scorer import Target
from .scoring.verifier import Verifier
from .state.compiling import compile_together
from .state.slots import Slots
from .validation import check_request

if TYPE_CHECKING:
    from .grammars.grammar_compiler import GrammarCompiler

_IDLE_S = 0.005  # to wait for a grammar where nothing else can run


class Engine:
    """A draft/target pair on one device, decoding many sequences at once. Not thread-safe."""

    def __init__(self, config: EngineConfig, progress: ReportProgress | None = None) -> None:
        start_s = time.perf_counter()
        processors = ProcessorRegistry(config.logits_processors)  # before minutes of loading
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = torch.device(config.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches on the current device
        k = config.speculation.num_speculative_tokens
        proposer = config.speculation.proposer if k > 0 else "none"
        k = 0 if proposer == "none" else k
        report = progress or (lambda stage, done, total: None)
        pair = ModelPair(config, proposer, report)
        self._config, self._pair = config, pair
        self._slots = Slots(
            config.scheduler.max_num_seqs,
            pair.max_model_len,
            k,
            pair.page_size,
            pair.vocab_size,
            device,
            config.speculation.verification,
        )
        self.proposer = build_proposer(proposer, config, self._slots, pair)
        self.target = Target(pair.target, pair.vocab_size)
        self.verifier = Verifier(self._slots, pair.vocab_size)
        self._processors = processors
        self._eos_token_ids = config.eos_token_ids
        self._grammars = _grammar_compiler(config, pair.vocab_size)
        self._requests: dict[str, Request] = {}

        self.info = EngineInfo(
            device=config.device,
            target_dtype=dtype_name(pair.target),
            draft_dtype=dtype_name(pair.draft) if pair.draft else None,
            vocab_size=pair.vocab_size,
            max_model_len=pair.max_model_len,
            num_pages=0,
            page_size_tokens=pair.page_size,
            cache_bytes=0,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_speculative_tokens=k,
            proposer=None if proposer == "none" else proposer,
            load_s=0.0,
            warm_up_s=0.0,
            pid=os.getpid(),
        )
        loaded_s = time.perf_counter()
        if device.type == "cuda":
            report("compiling kernels", 0, 1)
            self._compile()
        num_pages = config.cache.num_pages
        if num_pages is None:
            num_pages = measure_pages(self, pair, config, report)
        report("allocating the KV cache", 0, 1)
        self.allocate(num_pages, pair.longest_sequence(num_pages, config))
        if device.type == "cuda" and not config.enforce_eager:
            self.capture(report)
        report("ready", 1, 1)
        ready_s = time.perf_counter()
        self.info = replace(self.info, load_s=ready_s - start_s, warm_up_s=ready_s - loaded_s)

    def _compile(self) -> None:
        """Compile the kernels of drawing and verification, which take longest."""
        target, device = self._pair.target, self._slots.device
        num_rows = 2 * (self._slots.max_drafts + 1)
        logits = torch.zeros(num_rows, target.vocab_size, dtype=target.dtype, device=device)
        verifications = self.verifier.warm_ups(logits, self.proposer.distributions)
        compile_together([*self.proposer.warm_ups(), *verifications], device)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Allocate the pages, in place of those there are, and begin to schedule over them."""
        config, pair, k = self._config, self._pair, self.info.num_speculative_tokens
        pair.bind(num_pages, self._slots)
        self._kv_cache = KVCacheManager(
            num_pages,
            pair.page_size,
            config.cache.prefix_caching,
            keeps_events=config.cache.kv_events_endpoint is not None,
        )
        adaptive = AdaptiveSpeculation(k) if k > 0 and config.speculation.adaptive else None
        self.scheduler = Scheduler(
            config.scheduler, self._kv_cache, self._slots, k, max_model_len, adaptive
        )
        # On a CPU nothing would overlap.
        self.scheduler.plans_ahead = self._slots.device.type == "cuda"
        self.info = replace(
            self.info,
            max_model_len=max_model_len,
            num_pages=self._kv_cache.num_usable_pages,
            cache_bytes=num_pages * pair.page_bytes,
        )

    def capture(self, report: ReportProgress) -> None:
        """Capture the phases of a step as CUDA graphs."""
        gc.collect()  # an engine of before gives its memory back
        self.proposer.capture(report)
        most_rows = self._config.scheduler.max_num_batched_tokens
        logits = self.target.capture(self._slots.max_drafts, most_rows, report)
        self.verifier.capture(logits, self.proposer.distributions)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step of the batch."""
        if failed := self.scheduler.take_uncompiled():
            return self._finished(failed)
        plan = self.scheduler.schedule()
        if not plan:
            self.scheduler.wait_for_grammars(_IDLE_S)
            return []
        proposals = self.proposer.propose(plan)
        logits = self.target.score(plan, proposals)
        drawn = self.verifier.verify(plan, proposals, logits)
        self.proposer.propose_ahead(plan)  # a GPU goes on while the host reads and commits
        self.target.score_ahead(plan)
        verified = self.verifier.read(plan, proposals, drawn)
        return self._finished(self.scheduler.commit(plan, verified))

    def _finished(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
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
            check_request(new, self.info.max_model_len, self.info.vocab_size, self._eos_token_ids)
            if new.params.grammar is not None and self._grammars is None:
                raise InvalidRequestError(
                    "grammar: the engine was given no token table or no eos token ids"
                )
        queued = [Request(new, self.info.page_size_tokens, self._eos_token_ids) for new in requests]
        for request in queued:
            request.logits_processors = self._processors.build(request.params)
        try:
            for request in queued:
                if self._grammars is not None and request.params.grammar is not None:
                    request.compiling = self._grammars.start(
                        request.params.grammar, request.params.stop_token_ids
                    )
            self.scheduler.add(queued)  # the last that may fail: nothing is left behind
        except BaseException:
            for request in queued:
                self.scheduler.finish(request)
            raise
        self._requests.update((request.request_id, request) for request in queued)

    def abort(self, request_ids: list[str]) -> None:
        """Drop sequences and free their pages now. Unknown ids are ignored; no output follows."""
        for request_id in request_ids:
            if request := self._requests.pop(request_id, None):
                self.scheduler.finish(request)

    def warm_up_grammars(self) -> None:
        """Spare the first grammar the start of the process that grammars are forked from."""
        if self._grammars is not None:
            self._grammars.warm_up()

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

    def take_page_events(self) -> list[PageEvent]:
        """What the prefix cache gained and lost since the last call, if the configuration asks."""
        events, self._kv_cache.events = self._kv_cache.events, []
        return events

    def check_integrity(self) -> None:
        """Account for every page and seat; raises RuntimeError on a leak. Cheap; run when idle."""
        self._kv_cache.check_integrity(self.scheduler.running)
        self._slots.check_integrity(self.scheduler.running)


def _grammar_compiler(config: EngineConfig, vocab_size: int) -> "GrammarCompiler | None":
    if config.token_table is None or not config.eos_token_ids:
        return None
    from .grammars.grammar_compiler import GrammarCompiler  # needs llguidance

    return GrammarCompiler(config.token_table, config.eos_token_ids, vocab_size)


def dtype_name(model: PagedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
