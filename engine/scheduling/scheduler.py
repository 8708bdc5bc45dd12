"""Who runs in a step, for how many tokens, and with how many drafts."""

import concurrent.futures
import time
from bisect import insort
from itertools import count
from operator import attrgetter

from ..api import InvalidRequestError, QueueFullError, RequestOutput
from ..config import SchedulerConfig
from ..request import Request
from ..state.slots import Slots
from .adaptive_speculation import AdaptiveSpeculation
from .counters import Counters
from .kv_cache import KVCacheManager
from .plan import Plan, ScheduledRequest, Verified

# Rows of a step that may go through the LM head for prompt logprobs: a whole chunk's logits would
# take 150,000 numbers a token.
MAX_PROMPT_LOGITS = 512

_TURN = attrgetter("turn")


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
        slots: Slots,
        num_speculative_tokens: int,
        max_model_len: int,
        adaptive: AdaptiveSpeculation | None = None,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._slots = slots
        self._max_speculative_tokens = num_speculative_tokens
        self._num_speculative_tokens = num_speculative_tokens  # of requests that leave it open
        self._adaptive = adaptive
        self._max_model_len = max_model_len
        self.plans_ahead = False  # whether plans leave room for the step after
        # Since the last step, and from which page on; the device does not know them yet.
        self._grown: list[tuple[Request, int]] = []
        self.waiting: list[Request] = []  # the next first
        self.running: list[Request] = []
        self._arrivals = count()
        self._step_start_s = 0.0
        # What the last step tells the choice of k, but for the time until the next one begins.
        self._observed: tuple[list[int], list[int], list[bool]] | None = None
        self._is_timed = False
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
        self._tell_adaptive()
        plan = Plan()
        budget = self._config.max_num_batched_tokens
        decoding = [r for r in self.running if r.num_uncomputed_tokens == 1]
        prefilling = [r for r in self.running if r.num_uncomputed_tokens > 1]
        num_seatable = min(len(self.waiting), self._slots.num_free)
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
            if budget == 0 or self._slots.num_free == 0:
                break
            if self._should_wait(request, prefilling, plan):
                continue
            scheduled = self._admit(request, budget, plan)
            if scheduled is None:
                break
            plan.scheduled.append(scheduled)
            prefilling.append(request)
            budget -= scheduled.num_new_tokens + scheduled.num_drafts
        if self.plans_ahead:
            for scheduled in plan.sampled:
                scheduled.has_room_ahead = self._has_room_ahead(scheduled)
            # Who waits is served sooner by the step after, and in one pass with the others.
            plan.scores_ahead = not self.waiting and plan.is_plain
        self._slots.write_pages(self._grown)
        self._grown.clear()
        return plan

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

    def commit(self, plan: Plan, verified: Verified) -> list[RequestOutput]:
        """Advance every sequence by what the step computed and drew; free what is done."""
        self.counters.num_steps += 1
        self._observe(plan, verified)
        outputs = []
        sampled_idx = 0
        for scheduled in plan.scheduled:
            if scheduled.samples:
                outputs.append(self._commit_drawn(scheduled, verified, sampled_idx))
                sampled_idx += 1
            elif output := self._commit_chunk(scheduled):
                outputs.append(output)
        return outputs

    def finish(self, request: Request) -> None:
        """Remove a sequence wherever it is, and free what it holds. Unknown ones are ignored."""
        if request in self.running:
            # Until somebody is seated the engine may idle, which is no part of a step's time.
            self._is_timed = self._is_timed and len(self.running) > 1
            self.running.remove(request)
            self._slots.unseat(request)
            self._kv_cache.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.compiling is not None:
            request.compiling.cancel()

    def _observe(self, plan: Plan, verified: Verified) -> None:
        """Keep what this step tells the choice of k: how many drafts stood."""
        sampled = plan.sampled
        if self._adaptive is None or not sampled:
            return
        num_prefill_rows = sum(s.num_new_tokens for s in plan.scheduled) - len(plan.scheduled)
        self._is_timed = _decodes(num_prefill_rows, len(sampled))
        self._observed = (
            [s.num_drafts for s in sampled],
            [len(drawn) - 1 for drawn in verified.token_ids],
            [s.request.params.num_speculative_tokens is None for s in sampled],
        )

    def _tell_adaptive(self) -> None:
        """Tell the choice of k of the last step, which takes until this one begins."""
        last_start_s, self._step_start_s = self._step_start_s, time.perf_counter()
        if self._adaptive is not None and self._observed is not None:
            wanted, accepted, is_open = self._observed
            elapsed_s = self._step_start_s - last_start_s if self._is_timed else None
            self._adaptive.observe(wanted, accepted, elapsed_s, is_open)
            self._observed = None

    def _commit_chunk(self, scheduled: ScheduledRequest) -> RequestOutput | None:
        request = scheduled.request
        if scheduled.has_nan:
            return self._commit_bad(request, is_dead_end=False)
        request.num_computed_tokens = scheduled.end
        self._kv_cache.record_computed(request)
        if scheduled.prompt_logprobs is None:
            return None
        request.num_scored_tokens = request.num_computed_tokens
        return request.output([], prompt_logprobs=scheduled.prompt_logprobs)

    def _commit_drawn(
        self, scheduled: ScheduledRequest, verified: Verified, i: int
    ) -> RequestOutput:
        request = scheduled.request
        drawn = verified.token_ids[i]
        num_drafts, num_accepted = verified.num_drafts[i], len(drawn) - 1
        if verified.is_bad[i] or scheduled.has_nan:
            if num_drafts == 0:
                is_dead_end = request.can_reach_a_dead_end and not scheduled.has_nan
                return self._commit_bad(request, is_dead_end=is_dead_end)
            request.speculates = False
            fixed = self._slots.draws_are_fixed(request.params)
            if num_accepted == 0 or fixed or scheduled.has_nan:
                # A draft that the target turns into NaN spoils the rows before it too (0 * NaN in
                # the attention). Without drafts the same step may well be sound: compute it again.
                request.num_draft_computed_tokens = min(
                    request.num_draft_computed_tokens, request.num_tokens
                )
                return request.output([])
            # The accepted drafts lead to where nothing is left. They stand, as they would without
            # speculation: to draw again would favour whatever leads elsewhere.
            drawn = drawn[:num_accepted]
        if num_drafts:
            self.counters.count_drafts(num_drafts, num_accepted)
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

        logprobs = verified.logprobs[i]
        output = request.output(
            kept,
            logprobs[: len(kept)] if logprobs is not None else None,
            scheduled.prompt_logprobs,
        )
        if request.finish_reason is not None:
            self.finish(request)
        return output

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
        scheduled = self._share(request, budget, plan)
        if scheduled.num_new_tokens == 0:
            return None
        while not self._grow(request, scheduled.end + scheduled.num_drafts):
            if scheduled.num_drafts:
                scheduled.num_drafts = 0  # drafts are never worth a neighbour's pages
                continue
            victim = max(self.running, key=_TURN)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return scheduled

    def _num_rows_of_short(
        self, startable: list[Request], prefilling: list[Request], most: int
    ) -> int:
        """Rows, up to `most`, that a prompt in chunks leaves to short ones that need no second
        step: those may take seats that nobody else can use yet.
        """
        num_rows, num_seats = 0, self._slots.num_free
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
        self._slots.seat(request)
        self._grown.append((request, 0))
        scheduled = self._share(request, budget, plan)
        if not self._grow(request, scheduled.end + scheduled.num_drafts):
            scheduled.num_drafts = 0
            self._grow(request, scheduled.end)
        return scheduled

    def _share(self, request: Request, budget: int, plan: Plan) -> ScheduledRequest:
        num_new = min(request.num_uncomputed_tokens, budget)
        scheduled = ScheduledRequest(request, num_new)
        if scheduled.num_prompt_logits:
            num_left = MAX_PROMPT_LOGITS - plan.num_prompt_logits
            if scheduled.num_prompt_logits > num_left:
                num_told = max(0, request.num_scored_tokens - request.num_computed_tokens)
                num_new = num_told + num_left
                scheduled = ScheduledRequest(request, num_new)
        num_wanted = self._num_drafts_wanted(request)
        scheduled.is_drafted_for = num_wanted > 0
        if scheduled.samples:
            request.follow_grammar()
            request.edit_error = None  # one behind a draft that was rejected is of no account
            if num_wanted:
                # The last token needs no draft: verification emits one more than it accepts.
                room = min(
                    request.params.max_tokens - request.num_output_tokens - 1,
                    self._max_model_len - request.num_tokens - 1,
                )
                scheduled.num_next_drafts = max(0, min(num_wanted, room))
                # A first token need not wait for the draft to read the prompt, if it can do so
                # behind this step, in one pass with the others' drafts.
                if request.num_output_tokens > 0 or not self.plans_ahead:
                    scheduled.num_drafts = min(scheduled.num_next_drafts, budget - num_new)
        return scheduled

    def _num_drafts_wanted(self, request: Request) -> int:
        if not request.speculates:
            return 0
        k = request.params.num_speculative_tokens
        return self._num_speculative_tokens if k is None else min(k, self._max_speculative_tokens)

    def _has_room_ahead(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if request.num_output_tokens + 1 >= request.params.max_tokens:
            return False
        end = scheduled.end + scheduled.num_drafts + 1 + scheduled.num_next_drafts
        return end <= self._max_model_len and self._grow(request, end)

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
        self._slots.unseat(request)
        self._kv_cache.release(request)
        insort(self.waiting, request, key=_TURN)
        self.counters.num_preemptions += 1


def _decodes(num_prompt_tokens: int, num_decoding: int) -> bool:
    """Whether a step's time tells what decoding takes.

    A few prompt tokens more hardly show in it; a chunk of a long prompt does.
    """
    return num_prompt_tokens <= 2 * num_decoding
