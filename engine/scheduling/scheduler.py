"""Who runs in a step, for how many tokens, and with how many drafts."""

import concurrent.futures
import time
from bisect import insort
from itertools import count
from operator import attrgetter
from typing import Protocol

from ..api import InvalidRequestError, QueueFullError, RequestOutput, SamplingParams
from ..config import SchedulerConfig
from ..request import Request
from .adaptive_speculation import AdaptiveSpeculation
from .counters import Counters
from .kv_cache import KVCacheManager
from .plan import MAX_PROMPT_LOGITS, Plan, ScheduledRequest, Verified

_TURN = attrgetter("turn")


class Seats(Protocol):
    """Where the sequences that run are seated; what the scheduler asks of a worker."""

    @property
    def num_free(self) -> int: ...

    def seat(self, request: Request) -> None: ...

    def unseat(self, request: Request) -> None: ...

    def rewind(self, request: Request) -> None: ...

    def write_pages(self, grown: list[tuple[Request, int]]) -> None: ...

    def draws_are_fixed(self, params: SamplingParams) -> bool: ...

    def must_know(self, request: Request) -> bool: ...


class Scheduler:
    """By priority, then first come, first served, under a token budget a step and a page budget.

    Sequences that decode go before those still in prefill, so that a long prompt, taken in chunks,
    delays nobody's next token. A sequence waits while a prefix that it can share is being computed,
    so that samples of one prompt compute it once, also when they come together; meanwhile those
    behind it in the queue take the free seats, and a prompt in chunks leaves rows to short ones.
    When pages run out, the last in turn of the running sequences gives its pages up and is computed
    again later.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        seats: Seats,
        num_speculative_tokens: int,
        max_model_len: int,
        adaptive: AdaptiveSpeculation | None = None,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._seats = seats
        self._max_speculative_tokens = num_speculative_tokens
        self._num_speculative_tokens = num_speculative_tokens  # of requests that leave it open
        self._adaptive = adaptive
        self._max_model_len = max_model_len
        self.lag = 0  # steps that are launched before the host has read the one before
        # Since the last step, and from which page on; the device does not know them yet.
        self._grown: list[tuple[Request, int]] = []
        self.waiting: list[Request] = []  # the next first
        self.running: list[Request] = []
        self._arrivals = count()
        self._last_commit_s = 0.0
        self.counters = Counters(num_speculative_tokens)

    def add(self, requests: list[Request]) -> None:
        """Queue sequences, all or none. Raises QueueFullError or InvalidRequestError."""
        seats = self._config.max_num_seqs + self._config.max_queue_len
        if len(requests) > seats:
            raise InvalidRequestError(
                f"n: the {len(requests)} sequences of one request can never be queued together; "
                f"{seats} may run or wait (max_num_seqs and max_queue_len): ask for fewer"
            )
        taken = len(self.running) + len(self.waiting)
        if taken + len(requests) > seats:
            raise QueueFullError(
                f"the queue is full: {len(self.running)} sequences run, {len(self.waiting)} wait; "
                f"{len(requests)} more do not fit into {seats} places"
            )
        for request in requests:
            request.turn = (request.turn[0], next(self._arrivals))
            insort(self.waiting, request, key=_TURN)

    def schedule(self) -> Plan:
        """Choose this step's sequences and make sure that each has the pages it needs."""
        plan = Plan(is_timed=bool(self.running))
        budget = self._config.max_num_batched_tokens
        decoding = [r for r in self.running if r.decodes]
        prefilling = [r for r in self.running if not r.decodes]
        num_seatable = min(len(self.waiting), self._seats.num_free)
        if self._adaptive is not None:
            if not self.running:
                self._adaptive.expect_change()
            prompts = prefilling + self.waiting[:num_seatable]
            self._num_speculative_tokens = self._adaptive.choose(
                max(1, len(decoding)),
                is_timed=_decodes(sum(r.num_uncomputed_tokens for r in prompts), len(decoding)),
            )
        startable = [r for r in self.waiting if r.can_start]
        reserved = 0
        for i, request in enumerate(decoding + prefilling):
            if budget == 0:
                break
            if i == len(decoding):
                reserved = self._num_rows_of_short(startable, prefilling, budget // 2)
            if request.slot is None:  # preempted for an older one just now
                continue
            # Drafts take what is left once each that decodes or may be seated has a row.
            num_behind = max(0, len(decoding) - 1 - i) + num_seatable
            available = max(1, budget - num_behind) if i < len(decoding) else budget - reserved
            if scheduled := self._schedule_running(request, available, plan):
                plan.scheduled.append(scheduled)
                budget -= scheduled.num_new_tokens + scheduled.num_drafts
        prefilling = [r for r in prefilling if r.slot is not None]
        for request in startable:
            if budget == 0 or self._seats.num_free == 0:
                break
            if self._should_wait(request, prefilling, plan):
                continue
            scheduled = self._admit(request, budget, plan)
            if scheduled is None:
                break
            plan.scheduled.append(scheduled)
            prefilling.append(request)
            budget -= scheduled.num_new_tokens + scheduled.num_drafts
        self._seats.write_pages(self._grown)
        self._grown.clear()
        return plan

    def must_know(self) -> bool:
        """Whether the next step can only be planned once the host has read the one in flight."""
        return any(
            request.is_in_flight
            and self._num_drafts_wanted(request) > 0
            and self._seats.must_know(request)
            for request in self.running
        )

    def take_uncompiled(self) -> list[RequestOutput]:
        """End the sequences whose grammars could not be compiled, through no fault of theirs."""
        outputs = []
        for request in [r for r in self.waiting if r.compile_error is not None]:
            request.finish_reason = "error"
            outputs.append(request.output([], error=f"grammar: {request.compile_error}"))
            self.finish(request)
        return outputs

    def wait_for_grammars(self, timeout_s: float) -> None:
        """Wait until a sequence can start that could not while its grammar was being compiled."""
        compiling = [r.compiling for r in self.waiting if r.compiling is not None]
        concurrent.futures.wait(compiling, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def launched(self, plan: Plan) -> None:
        """Take note of what a step computes, once the one before is committed; what it draws comes
        with its own commit.
        """
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.is_void:
                continue
            if scheduled.samples:
                request.num_drafts_in_flight = scheduled.num_drafts
                request.num_computed_tokens = request.num_tokens
            else:
                request.num_computed_tokens = scheduled.end
                if scheduled.num_prompt_logits:
                    request.num_scored_tokens = scheduled.end
            self._kv_cache.record_computed(request)  # who finds the pages comes later on the device

    def commit(self, plan: Plan, verified: Verified) -> list[RequestOutput]:
        """Advance every sequence by what a step drew; free what is done, pass over what is void."""
        self.counters.num_steps += 1
        self._observe(plan, verified)
        outputs = []
        sampled_idx = 0
        for scheduled in plan.scheduled:
            if not scheduled.samples:
                if output := self._commit_chunk(scheduled):
                    outputs.append(output)
                continue
            if not scheduled.is_void:
                outputs.append(self._commit_drawn(scheduled, verified, sampled_idx))
            sampled_idx += 1
        return outputs

    def finish(self, request: Request) -> None:
        """Remove a sequence wherever it is, and free what it holds. Unknown ones are ignored."""
        if request in self.running:
            self.running.remove(request)
            self._seats.unseat(request)
            self._kv_cache.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.compiling is not None:
            request.compiling.cancel()

    def _observe(self, plan: Plan, verified: Verified) -> None:
        """Tell the choice of k how many drafts stood, and how long the step took."""
        last_commit_s, self._last_commit_s = self._last_commit_s, time.perf_counter()
        sampled = plan.sampled
        if self._adaptive is None or not sampled:
            return
        num_prefill_rows = sum(s.num_new_tokens for s in plan.scheduled) - len(plan.scheduled)
        is_timed = plan.is_timed and _decodes(num_prefill_rows, len(sampled))
        self._adaptive.observe(
            [s.num_drafts for s in sampled],
            [len(drawn) - 1 for drawn in verified.token_ids],
            self._last_commit_s - last_commit_s if is_timed else None,
            [s.request.params.num_speculative_tokens is None for s in sampled],
        )

    def _commit_chunk(self, scheduled: ScheduledRequest) -> RequestOutput | None:
        request = scheduled.request
        # One that was preempted since then does not score these prompt tokens again.
        if scheduled.is_void and request not in self.waiting:
            return None
        if scheduled.has_nan:
            return self._commit_bad(request, is_dead_end=False)
        if scheduled.prompt_logprobs is None:
            return None
        return request.output([], prompt_logprobs=scheduled.prompt_logprobs)

    def _commit_drawn(
        self, scheduled: ScheduledRequest, verified: Verified, i: int
    ) -> RequestOutput:
        request, num_drafts = scheduled.request, scheduled.num_drafts
        request.num_drafts_in_flight = None
        drawn = verified.token_ids[i]
        num_accepted = len(drawn) - 1
        if is_bad := verified.is_bad[i] or scheduled.has_nan:
            if num_drafts == 0:
                is_dead_end = request.can_reach_a_dead_end and not scheduled.has_nan
                return self._commit_bad(request, is_dead_end=is_dead_end)
            request.speculates = False
            fixed = self._seats.draws_are_fixed(request.params)
            if num_accepted == 0 or fixed or scheduled.has_nan:
                # A draft that the target turns into NaN spoils the rows before it too (0 * NaN in
                # the attention). Without drafts the same step may well be sound: compute it again.
                self._start_over(request)
                return request.output([])
            # The accepted drafts lead to where nothing is left. They stand, as they would without
            # speculation: to draw again would favour whatever leads elsewhere.
            drawn = drawn[:num_accepted]
        if num_drafts:
            self.counters.count_drafts(num_drafts, num_accepted)
            num_seen = request.num_tokens + min(num_accepted, num_drafts - 1)
            request.num_draft_computed_tokens = num_seen
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        # KV is right for all known tokens and the accepted drafts; behind them it is overwritten.
        num_valid = request.num_tokens + num_accepted

        request.num_scored_tokens = request.num_prompt_tokens
        kept = self._until_stop(request, drawn)
        request.token_ids.extend(kept)
        self.counters.num_generation_tokens += len(kept)
        num_valid = min(num_valid, request.num_tokens - 1)
        request.num_computed_tokens = num_valid
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, num_valid)
        self._kv_cache.record_computed(request)
        if is_bad:
            self._start_over(request)

        logprobs = verified.logprobs[i]
        output = request.output(
            kept,
            logprobs[: len(kept)] if logprobs is not None else None,
            scheduled.prompt_logprobs,
            draft_token_ids=verified.draft_token_ids[i],
        )
        if request.finish_reason is not None:
            self.finish(request)
        return output

    def _start_over(self, request: Request) -> None:
        """Have the device go on from what the host knows; what it was about to draw is void."""
        request.num_computed_tokens = request.num_tokens - 1
        request.num_draft_computed_tokens = min(
            request.num_draft_computed_tokens, request.num_tokens
        )
        request.void_flight()
        self._seats.rewind(request)

    def _commit_bad(self, request: Request, *, is_dead_end: bool) -> RequestOutput:
        request.finish_reason = "error"
        if request.edit_error is not None:
            reason = request.edit_error
        elif is_dead_end:
            reason = "the request's own edits of the logits left it no token to go on with"
        else:
            reason = "the target produced no finite logits for this sequence"
        output = request.output([], error=reason, is_dead_end=is_dead_end)
        self.finish(request)
        return output

    def _until_stop(self, request: Request, drawn: list[int]) -> list[int]:
        """What is kept of the drawn tokens; sets the request's finish reason if they end it."""
        room = min(
            request.params.max_tokens - request.num_output_tokens,
            self._max_model_len - request.num_tokens,
        )
        for j, token_id in enumerate(drawn[:room]):
            if token_id in request.stop_token_ids:
                request.finish_reason = "stop"
                request.stop_token_id = token_id
                return drawn[: j + 1]
        if len(drawn) >= room:
            request.finish_reason = "length"
        return drawn[:room]

    def _schedule_running(
        self, request: Request, budget: int, plan: Plan
    ) -> ScheduledRequest | None:
        if not self._may_go_on(request):
            return None
        scheduled = self._share(request, budget, plan)
        if scheduled.num_new_tokens == 0:
            return None
        while not self._grow(request, scheduled.end + scheduled.num_drafts):
            if scheduled.num_drafts:
                scheduled.num_drafts = 0  # drafts are never worth a neighbour's pages
                continue
            if request.is_in_flight:
                return None  # once that step is read it may want fewer
            victim = max(self.running, key=_TURN)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return scheduled

    def _may_go_on(self, request: Request) -> bool:
        """Whether a step may follow the one in flight, if any: not if that one ends the sequence
        for certain, or may fill it to its end.
        """
        num_output_tokens = request.least_tokens - request.num_prompt_tokens
        return not request.is_in_flight or (
            num_output_tokens < request.params.max_tokens
            and request.most_tokens <= self._max_model_len
        )

    def _num_rows_of_short(
        self, startable: list[Request], prefilling: list[Request], most: int
    ) -> int:
        """Rows, up to `most`, that a prompt in chunks leaves to short ones that need no second
        step: those may take seats that nobody else can use yet.
        """
        num_rows, num_seats = 0, self._seats.num_free
        for request in startable:
            wanted = num_rows + request.num_uncomputed_tokens
            if num_seats == 0:
                break
            if (
                wanted <= most
                and self._kv_cache.pages_for(wanted + 1) <= self._kv_cache.num_free_pages
                and not self._kv_cache.prefix_is_coming(request, prefilling)
            ):
                num_rows, num_seats = wanted, num_seats - 1
        return num_rows

    def _should_wait(self, request: Request, prefilling: list[Request], plan: Plan) -> bool:
        """Whether a later step serves the request better, however much room this one has."""
        scores_prompt = request.params.prompt_logprobs is not None
        if scores_prompt and plan.num_prompt_logits >= MAX_PROMPT_LOGITS:
            return True
        return self._kv_cache.prefix_is_coming(request, prefilling)

    def _admit(self, request: Request, budget: int, plan: Plan) -> ScheduledRequest | None:
        """Seat a waiting sequence if pages for all its known tokens are there."""
        kv_cache = self._kv_cache
        num_cached_tokens = kv_cache.attach_prefix(request)
        missing = kv_cache.pages_for(request.num_tokens + 1) - len(request.pages)
        if missing > kv_cache.num_free_pages:
            kv_cache.release(request)
            return None
        if request.num_cached_tokens is None:  # a preempted sequence finds its own pages again
            request.num_cached_tokens = num_cached_tokens
            request.queue_s = time.perf_counter() - request.arrival_s
            self.counters.num_cached_tokens += num_cached_tokens
            self.counters.num_prompt_tokens += request.num_prompt_tokens
        self.waiting.remove(request)
        self.running.append(request)
        self._seats.seat(request)
        self._grown.append((request, 0))
        scheduled = self._share(request, budget, plan)
        if not self._grow(request, scheduled.end + scheduled.num_drafts):
            scheduled.num_drafts = 0
            self._grow(request, scheduled.end)
        return scheduled

    def _share(self, request: Request, budget: int, plan: Plan) -> ScheduledRequest:
        num_new = 1 if request.is_in_flight else min(request.num_uncomputed_tokens, budget)
        scheduled = ScheduledRequest(request, num_new)
        if scheduled.num_prompt_logits:
            num_left = MAX_PROMPT_LOGITS - plan.num_prompt_logits
            if scheduled.num_prompt_logits > num_left:
                num_told = max(0, request.num_scored_tokens - request.num_computed_tokens)
                num_new = num_told + num_left
                scheduled = ScheduledRequest(request, num_new)
        num_wanted = self._num_drafts_wanted(request)
        scheduled.is_drafted_for = num_wanted > 0
        if scheduled.samples and num_wanted:
            # The last token needs no draft: verification emits one more than it accepts.
            num_output_tokens = request.least_tokens - request.num_prompt_tokens
            room = min(
                request.params.max_tokens - num_output_tokens - 1,
                self._max_model_len - request.most_tokens - 1,
                budget - num_new,
            )
            # A first token does not wait for the draft to read the prompt: the next step does
            # that, in one pass with the others' drafts.
            if num_output_tokens > 0 or self.lag == 0:
                scheduled.num_drafts = max(0, min(num_wanted, room))
        return scheduled

    def _num_drafts_wanted(self, request: Request) -> int:
        if not request.speculates:
            return 0
        k = request.params.num_speculative_tokens
        return self._num_speculative_tokens if k is None else min(k, self._max_speculative_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        first = len(request.pages)
        if num_tokens <= first * self._kv_cache.page_size:
            return True
        if not self._kv_cache.allocate(request, num_tokens):
            return False
        self._grown.append((request, first))
        return True

    def _preempt(self, request: Request, plan: Plan) -> None:
        plan.scheduled = [s for s in plan.scheduled if s.request is not request]
        self.running.remove(request)
        self._seats.unseat(request)
        self._kv_cache.release(request)
        insort(self.waiting, request, key=_TURN)
        self.counters.num_preemptions += 1


def _decodes(num_prompt_tokens: int, num_decoding: int) -> bool:
    """Whether a step's time tells what decoding takes.

    A few prompt tokens more hardly show in it; a chunk of a long prompt does.
    """
    return num_prompt_tokens <= 2 * num_decoding
