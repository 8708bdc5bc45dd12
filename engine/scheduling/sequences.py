"""The sequences that have not ended: those that wait and those that run."""

import concurrent.futures
import time
from bisect import insort
from collections.abc import Callable
from itertools import count
from operator import attrgetter

from ..acceptance import Acceptance
from ..api import EngineStats, InvalidRequestError, QueueFullError, RequestOutput
from ..config import SchedulerConfig
from ..memory.device_memory import DeviceMemory
from ..request import Request
from .adaptive_speculation import AdaptiveSpeculation
from .chunks import Chunks

_TURN = attrgetter("turn")


class Sequences:
    """The waiting sequences, in the order of their turns, and the running ones.

    A running sequence has a slot and pages; a waiting one has neither. Ended ones are removed. Only
    here do sequences get and leave slots; the worker finds the newcomers in its next plan.

    This also holds what scheduler and committer share: memory, limits, statistics, and the choice
    of k.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: DeviceMemory,
        max_model_len: int,
        max_drafts: int,
        max_drawn: int,
        max_verified: int,
        adaptive: AdaptiveSpeculation | None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.max_model_len = max_model_len
        # As in Slots.
        self.max_drafts, self.max_drawn, self.max_verified = max_drafts, max_drawn, max_verified
        self.adaptive = adaptive  # None: k is what the configuration says
        max_itl_ms = config.max_itl_ms
        self.chunks = Chunks(None if max_itl_ms is None else max_itl_ms / 1e3)
        # Of a model's drafts.
        self.acceptance = adaptive.acceptance if adaptive else Acceptance(max_drawn)
        self.stats = EngineStats(
            drafted_per_position=[0] * max_drafts, accepted_per_position=[0] * max_drafts
        )
        self.on_finish: Callable[[Request], None] = lambda _: None  # called with each that ends
        self.by_id: dict[str, Request] = {}
        self.waiting: list[Request] = []  # in order: the first is next
        self.running: list[Request] = []
        self.free_slots = list(range(config.max_num_seqs))[::-1]  # the last is next
        self._arrivals = count()

    def check_room(self, num_new: int) -> None:
        """Raises QueueFullError or InvalidRequestError if so many more cannot be queued."""
        places = self.config.max_num_seqs + self.config.max_queue_len
        if num_new > places:
            raise InvalidRequestError(
                f"n: the {num_new} sequences of one request can never be queued together; "
                f"{places} may run or wait (max_num_seqs and max_queue_len): ask for fewer"
            )
        if len(self.by_id) + num_new > places:
            raise QueueFullError(
                f"the queue is full: {len(self.running)} sequences run, {len(self.waiting)} wait; "
                f"{num_new} more do not fit into {places} places"
            )

    def add(self, requests: list[Request]) -> None:
        """Queue sequences; there must be room."""
        for request in requests:
            request.turn = (request.turn[0], next(self._arrivals))
            request.max_len = min(request.max_len, self.max_model_len)
            insort(self.waiting, request, key=_TURN)
            self.by_id[request.request_id] = request

    def admit(self, request: Request, num_cached_tokens: int) -> None:
        """Let a waiting sequence run; it already holds the pages of its cached tokens."""
        if request.num_cached_tokens is None:  # not counted again after a preemption
            request.num_cached_tokens = num_cached_tokens
            request.queue_s = time.perf_counter() - request.arrival_s
            self.stats.cached_tokens += num_cached_tokens
            self.stats.prompt_tokens += request.num_prompt_tokens
            request.acceptance.ratio = self.acceptance.of_length(request.num_tokens).ratio
        self.waiting.remove(request)
        self.running.append(request)
        request.slot = self.free_slots.pop()

    def preempt_last(self) -> Request:
        """Preempt the running sequence that is last in turn."""
        request = max(self.running, key=_TURN)
        self.preempt(request)
        self.stats.preemptions += 1
        return request

    def preempt(self, request: Request) -> None:
        """Take slot and pages from a running sequence, which waits again.

        It keeps its tokens and page hashes, and may find some of its pages again.
        """
        self._stop_running(request)
        insort(self.waiting, request, key=_TURN)

    def finish(self, request: Request) -> None:
        """Remove a sequence, waiting or running, and free what it holds. Ignores unknown ones."""
        if request in self.running:
            self._stop_running(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.grammar is not None:
            request.grammar.leave()
        if self.by_id.pop(request.request_id, None) is not None:
            self.on_finish(request)

    def take_uncompiled(self) -> list[RequestOutput]:
        """End the sequences whose grammars failed to compile through no fault of their own."""
        outputs = []
        for request in list(self.waiting):
            if request.grammar is not None and request.grammar.compile_error is not None:
                request.finish_reason = "error"
                error = f"grammar: {request.grammar.compile_error}"
                outputs.append(request.output([], error=error))
                self.finish(request)
        return outputs

    def wait_for_grammars(self, timeout_s: float) -> None:
        """Wait until some sequence's grammar is compiled, so that it can start."""
        grammars = [r.grammar for r in self.waiting if r.grammar is not None]
        compiling = [g.process.begun for g in grammars if not g.is_compiled]
        concurrent.futures.wait(compiling, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def check_integrity(self) -> None:
        """Account for every page and slot; raises RuntimeError on a leak."""
        self.memory.check_integrity([request.memory for request in self.running])
        held = [request.slot for request in self.running if request.slot is not None]
        if sorted([*self.free_slots, *held]) != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"slots do not add up: free {self.free_slots}, held {held}")

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        assert request.slot is not None
        self.free_slots.append(request.slot)
        request.slot = None
        self.memory.release(request.memory)
        request.start_over()
