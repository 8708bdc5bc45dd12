"""The engine: schedule, propose, score, verify, commit.

The host lags one step behind a GPU: it launches step n + 1 before it has read step n. Three things
make this safe. Positions are never sent to the device: every kernel counts from the device's own
`num_tokens`, which verification advances. Pages are there before the launch, for the most tokens
that the unread step may add. And a sequence that turns out to have ended, or to have lost its
slot, is void in the steps launched meanwhile: `commit` passes over it.
"""

import os
import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .api import (
    EngineInfo,
    EngineStats,
    InvalidRequestError,
    NewRequest,
    ReportProgress,
    RequestOutput,
    SourceName,
    ignore_progress,
)
from .config import EngineConfig
from .logits_processors import ProcessorRegistry
from .memory.announcements import PageEvent
from .memory.device_memory import DeviceMemory
from .memory.states import KeptStates
from .models.heads.head import Head
from .models.network import PagedLayers
from .pace import Pace
from .ranks.followers import lost_ranks_end_the_start
from .request import Request
from .scheduling.adaptive_speculation import AdaptiveSpeculation
from .scheduling.commit import Committer
from .scheduling.price import Price
from .scheduling.scheduler import Scheduler
from .scheduling.sequences import Sequences
from .start_up import make_ready
from .validation import check_request, check_sources
from .worker import LaunchedStep, Worker

if TYPE_CHECKING:
    from .grammars.grammar_compiler import GrammarCompiler

# How long to wait when nothing else can run:
_IDLE_S = 0.005  # for a grammar, at most
_TRANSFER_S = 0.001  # for pages from host memory


class Engine:
    """A draft/target pair on one device, decoding many sequences at once. Not thread-safe."""

    @lost_ranks_end_the_start()
    def __init__(self, config: EngineConfig, report: ReportProgress = ignore_progress) -> None:
        start_s = time.perf_counter()
        # First, so that a bad spec fails before minutes of loading.
        self._processors = ProcessorRegistry(config.logits_processors)
        self.worker = worker = Worker(config, report)
        self._config = config = worker.config
        pair = worker.pair
        self._grammars = _grammar_compiler(config, pair.vocab_size)
        self._pace = Pace()
        self._read_s = 0.0  # when the last step was read; the device began the next one then
        loaded_s = time.perf_counter()
        self._num_pages, self._max_model_len = make_ready(worker, config, report)
        self.start_over()
        report("ready", 1, 1)
        self._load_s, self._warm_up_s = loaded_s - start_s, 0.0
        self.count_warm_up(time.perf_counter() - loaded_s)

    def count_warm_up(self, spent_s: float) -> None:
        self._load_s, self._warm_up_s = self._load_s + spent_s, self._warm_up_s + spent_s

    @property
    def info(self) -> EngineInfo:
        worker, pair, memory = self.worker, self.worker.pair, self.sequences.memory
        max_drafts = worker.slots.max_drafts
        sources = tuple(source.name for source in worker.proposer.sources)
        draft = pair.draft or pair.head
        loaded_draft = self._config.loaded_draft
        vocabulary = self._config.draft and self._config.draft.vocabulary
        return EngineInfo(
            device=self._config.device,
            tensor_parallel=self._config.target.tensor_parallel,
            draft_tensor_parallel=loaded_draft.tensor_parallel if loaded_draft else 1,
            target_dtype=_dtype_name(pair.target),
            batch_invariant=pair.target.batch_invariant,
            draft_dtype=_dtype_name(draft) if draft else None,
            vocab_size=pair.vocab_size,
            max_model_len=self._max_model_len,
            num_pages=memory.num_usable_pages,
            page_size_tokens=pair.page_size,
            cache_bytes=worker.budget.num_bytes(memory.num_pages),
            saved_by_windows_bytes=worker.budget.saved_bytes(memory.num_pages),
            state_bytes=worker.state_bytes,
            host_pages=memory.host.num_pages if memory.host else 0,
            host_bytes=worker.host_pages[1].num_bytes if worker.host_pages else 0,
            num_states=worker.slots.num_states,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_speculative_tokens=self._config.speculation.k,
            max_drafts=max_drafts,
            sources=sources,
            share_of_text=vocabulary.share_of_text if vocabulary else None,
            proposer=_proposer_name(sources, pair.head),
            load_s=self._load_s,
            warm_up_s=self._warm_up_s,
            pid=os.getpid(),
        )

    def start_over(self, *, price: Price | None = None, is_learning: bool = False) -> None:
        """Schedule from nothing, over empty pages, with what is known of the `price` of steps.

        `is_learning`: only dummies will come, whose drafts need not be good.
        """
        config, slots, pair = self._config, self.worker.slots, self.worker.pair
        budget = self.worker.budget
        kept = slots.kept_states, pair.page_size, config.cache.state_interval_tokens
        self._in_flight: LaunchedStep | None = None  # launched, not read yet
        memory = DeviceMemory(
            budget.specs,
            budget.of_groups(self._num_pages),
            pair.page_size,
            pair.caches_prefixes,
            has_head=pair.head is not None,
            keeps_events=config.cache.kv_events_endpoint is not None,
            host=None if is_learning else self.worker.host_pages,
            states=KeptStates(*kept) if slots.kept_states else None,
        )
        adaptive = None
        if slots.max_drafts > 0 and config.speculation.adaptive:
            draws = self.worker.proposer.draws
            adaptive = AdaptiveSpeculation(
                slots.max_drawn,
                stops_early=draws is not None and draws.stops_early,
                ranks=self.worker.ranking is not None,
                falls_behind=pair.head is None,
                price=Price(lru_cache(4096)(pair.target.padded)) if price is None else price,
            )
        self.sequences = Sequences(
            config.scheduler,
            memory,
            max_model_len=self._max_model_len,
            max_drafts=slots.max_drafts,
            max_drawn=slots.max_drawn,
            max_verified=slots.max_verified,
            adaptive=adaptive,
        )
        self.scheduler = Scheduler(self.sequences, self.worker.proposer)
        self.committer = Committer(self.sequences, is_learning=is_learning)
        if self.worker.device.type == "cuda":  # on a CPU nothing would overlap
            self.scheduler.lag = 1

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Launch one step, and read the step before it; if `scheduler.lag` is 0, this same one.

        Drafting and scoring are launched first; then the host reads the step before. Verification
        comes last, because grammars and custom processors must know the tokens of that step.
        """
        outputs = self.sequences.take_uncompiled()
        if self.scheduler.must_know():
            outputs += self._commit()
        start_s = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan:
            outputs += self._commit()
            if not outputs and self.sequences.memory.awaits_pages:
                time.sleep(_TRANSFER_S)
            elif not outputs:
                self.sequences.wait_for_grammars(_IDLE_S)
            return outputs
        step = self.worker.launch(plan)
        step.launch_s = time.perf_counter() - start_s
        if self.sequences.adaptive is not None:
            self.sequences.adaptive.use_threads(torch.get_num_threads())  # launch may change it
        outputs += self._commit()
        self.worker.verify(step)
        self.committer.put_in_flight(plan)
        self._in_flight = step
        if self.scheduler.lag == 0:
            outputs += self._commit()
        self._forget_void_step()
        return outputs

    def _commit(self) -> list[RequestOutput]:
        """Read the step in flight, if there is one, and advance its sequences."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        self.worker.read(step)
        last_read_s, self._read_s = self._read_s, time.perf_counter()
        if step.device_s is not None:
            self._pace.observe(step.plan, step.device_s, step.launch_s)
        return self.committer.commit(step.plan, self._read_s - last_read_s, step.drafting_s)

    def spare_s(self) -> float:
        """How long the next launch may wait for new requests before the device runs dry."""
        if self._in_flight is None:
            return 0.0
        return self._pace.spare_s(self._in_flight.plan, time.perf_counter() - self._read_s)

    def _forget_void_step(self) -> None:
        """If every sequence has ended, nobody waits for the step in flight."""
        if not self.has_work():
            self._in_flight = None

    def submit(self, requests: list[NewRequest]) -> None:
        """Queue sequences, all or none. Raises QueueFullError or InvalidRequestError."""
        ids = {new.request_id for new in requests}
        if len(ids) < len(requests) or not ids.isdisjoint(self.sequences.by_id):
            raise InvalidRequestError("request_id: it is in use already")
        max_model_len, vocab_size = self._max_model_len, self.worker.pair.vocab_size
        eos_token_ids = self._config.eos_token_ids
        for new in requests:
            check_request(new, max_model_len, vocab_size, eos_token_ids)
            check_sources(new.sources, [source.name for source in self.worker.proposer.sources])
            if new.params.grammar is not None and self._grammars is None:
                raise InvalidRequestError(
                    "grammar: the engine was given no token table or no eos token ids"
                )
        self.sequences.check_room(len(requests))  # before a process is started for a grammar
        rule = self._config.speculation.verification
        queued = []
        for new in requests:
            is_edited = self.worker.edits.are_asked_by(new.params)
            request = Request(new, eos_token_ids, rule, is_edited=is_edited)
            request.logits_processors = self._processors.build(request.params)
            request.needs_host = self.worker.edits.need_host(request.params)
            queued.append(request)
        try:
            for request in queued:
                if self._grammars is not None and request.params.grammar is not None:
                    request.grammar = self._grammars.start(
                        request.params.grammar,
                        request.params.stop_token_ids,
                        request.memory.cache_salt,
                    )
            self.sequences.add(queued)
        except BaseException:
            for request in queued:
                self.sequences.finish(request)
            raise

    def abort(self, request_ids: list[str]) -> None:
        """Drop sequences and free their pages now, with no further output. Ignores unknown ids."""
        for request_id in request_ids:
            if request := self.sequences.by_id.get(request_id):
                self.sequences.finish(request)
        self._forget_void_step()

    def warm_up_grammars(self) -> None:
        """Start the process that grammars are forked from: the first one need not wait for it."""
        if self._grammars is not None:
            self._grammars.warm_up()

    def has_work(self) -> bool:
        return bool(self.sequences.by_id)

    def stats(self) -> EngineStats:
        memory, stats = self.sequences.memory, self.sequences.stats
        if (host := memory.host) is not None:
            stats.host_pages_used, stats.host_pages_total = host.num_used, host.num_pages
            stats.host_saved_tokens = host.num_saved * memory.page_size
            stats.host_loaded_tokens = host.num_loaded * memory.page_size
        return replace(
            stats,
            num_running=len(self.sequences.running),
            num_waiting=len(self.sequences.waiting),
            pages_used=memory.num_usable_pages - memory.num_free_pages,
            pages_total=memory.num_usable_pages,
            steps_by_tokens=list(stats.steps_by_tokens),
            drafted_per_position=list(stats.drafted_per_position),
            accepted_per_position=list(stats.accepted_per_position),
        )

    def take_page_events(self) -> list[PageEvent]:
        """Pages that the prefix cache gained and lost since the last call, if configured."""
        memory = self.sequences.memory
        events = [*memory.events]
        memory.events.clear()
        return events

    def check_integrity(self) -> None:
        """Account for every page and slot; raises RuntimeError on a leak. Cheap; run when idle."""
        self.sequences.check_integrity()


def _grammar_compiler(config: EngineConfig, vocab_size: int) -> "GrammarCompiler | None":
    if config.token_table is None or not config.eos_token_ids:
        return None
    from .grammars.grammar_compiler import GrammarCompiler  # needs msgspec

    return GrammarCompiler(config.token_table, config.eos_token_ids, vocab_size)


def _proposer_name(sources: tuple[SourceName, ...], head: Head | None) -> str | None:
    if "draft_model" in sources:
        return head.kind if head else "draft_model"
    return sources[-1] if sources else None


def _dtype_name(layers: PagedLayers) -> str:
    name, formats = str(layers.dtype).removeprefix("torch."), layers.weight_formats
    return f"{formats}, computed in {name}" if formats else name
