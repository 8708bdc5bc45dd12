"""Plans the next step: which sequences run, for how many tokens, with how many drafts."""

from operator import itemgetter
from typing import TYPE_CHECKING

from outrider.kernels.verify.sampling import MAX_DRAFTS

from ..plan import MAX_PROMPT_LOGITS, Plan, ScheduledRequest
from ..proposers.proposer import Proposer
from ..request import Request
from .lookups import ROW_COST, Worth
from .sequences import Sequences

if TYPE_CHECKING:
    from ..grammars.grammar_process import GrammarProcess


_LOOKED_UP_MASKS = 8  # for looked-up drafts of a sequence, where masks are rationed


class Scheduler:
    """By priority, then first come, first served, within a token budget and the free pages.

    Decoding sequences go before those in prefill, so that a long prompt, computed in chunks, delays
    no other sequence's next token. A sequence waits while another computes a prefix that it can
    share; so a prompt with n answers is computed only once, even if they arrive together. Sequences
    behind it in the queue may start meanwhile, and a prompt in chunks leaves rows to short prompts.

    When pages run out, drafts are given up first. Then the running sequence that is last in turn is
    preempted: it loses slot and pages, waits again, and is computed again later from its tokens.
    """

    def __init__(self, sequences: Sequences, proposer: Proposer) -> None:
        self._sequences, self._proposer = sequences, proposer
        self._memory, self._max_model_len = sequences.memory, sequences.max_model_len
        # For requests that leave k open.
        self._num_speculative_tokens, self._least_chance = sequences.max_drawn, 0.0
        self._chosen: dict[Request, int] = {}  # k, where it is chosen for a sequence alone
        self._worth = Worth(0.0, 0.0)  # of looked-up drafts in the step that is planned
        # How many masks of its grammar each sequence may ask for in this step, where it matters.
        self._num_questions: dict[Request, int] = {}
        self._num_steps = 0
        self.lag = 0  # 0 or 1 steps launched ahead of the last one that the host has read

    def schedule(self) -> Plan:
        """Choose the sequences of the next step, and give each the pages that it may need.

        A sequence in flight may have any number of tokens between `least_tokens` and `most_tokens`,
        so its pages are allocated for the most.
        """
        self._memory.receive()
        waiting, running = self._sequences.waiting, self._sequences.running
        plan = Plan(follows_another=bool(running))
        startable = [r for r in waiting if r.can_start]
        self._ration_grammars([*running, *startable[: len(self._sequences.free_slots)]])
        decoding = [r for r in running if r.decodes and self._takes_part(r)]
        prefilling = [r for r in running if not r.decodes and self._takes_part(r)]
        startable = [r for r in startable if self._takes_part(r)]
        seatable = startable[: len(self._sequences.free_slots)]
        if seatable and not self._fits(seatable[0]):
            seatable = []  # it may wait for long, and holds up those behind it
        plan.num_decoding = len(decoding)
        self._choose_k(decoding, prefilling + seatable)
        plan.is_trial = self._sequences.adaptive is not None and self._sequences.adaptive.is_trial
        self._proposer.prepare(
            {r: self._num_questions.get(r, MAX_DRAFTS + 1) for r in decoding if self._may_draft(r)}
        )
        budget = self._sequences.config.max_num_batched_tokens
        for i, request in enumerate(decoding, 1):
            # Drafts get only what is left when every decoding or seatable sequence has a row.
            num_behind = len(decoding) - i + len(seatable)
            if budget > 0:
                budget -= self._schedule_running(request, max(1, budget - num_behind), plan)
        if plan.scheduled and (most_rows := self._sequences.chunks.most_rows) is not None:
            budget = min(budget, most_rows)
        reserved = self._num_rows_of_short(startable, prefilling, budget // 2) if prefilling else 0
        for request in prefilling:
            if budget > 0:
                budget -= self._schedule_running(request, budget - reserved, plan)
        prefilling = [r for r in prefilling if r.slot is not None]
        for request in startable:
            if budget == 0 or not self._sequences.free_slots:
                break
            if self._should_wait(request, prefilling, plan):
                continue
            if not self._fits(request):
                break
            if self._memory.bring_back(request.memory, request.num_reusable_tokens):
                continue
            budget -= self._admit(request, budget, plan)
            prefilling.append(request)
        if not self._worth.pays:
            for scheduled in plan.scheduled:
                scheduled.forgo_lookup()
        if plan and self._memory.states is not None:
            plan.state_copies = self._memory.states.take_copies()
        return plan

    def _ration_grammars(self, requests: list[Request]) -> None:
        """Decide how many questions each of these sequences may ask its grammar in this step, so
        that a slow grammar delays others no further than its allowance. Its own sequences take
        turns; a grammar whose sequences are alone may take its time.
        """
        self._num_steps += 1
        self._num_questions.clear()
        of_process: dict[GrammarProcess, list[tuple[int, Request]]] = {}
        for request in requests:
            if (grammar := request.grammar) is not None:
                each = of_process.setdefault(grammar.process, [])
                each.append((grammar.last_step, request))
        for process, sequences in of_process.items():
            process.allowance.begin_step()
            if len(sequences) == len(requests):
                continue
            for _, request in sorted(sequences, key=itemgetter(0)):
                looks_up = self._proposer.looks_up(request)
                looked_up = _LOOKED_UP_MASKS if looks_up else 0
                wanted = 1 + max(self._num_drafts_wanted(request), looked_up)
                self._num_questions[request] = process.allowance.take(wanted)
        for request in requests:
            if request.grammar is not None and self._takes_part(request):
                request.grammar.last_step = self._num_steps

    def _takes_part(self, request: Request) -> bool:
        return self._num_questions.get(request, 1) > 0

    def must_know(self) -> bool:
        """Whether the host must read the step in flight before it can plan the next one."""
        return any(
            request.is_in_flight and request.needs_host and self._would_draft(request)
            for request in self._sequences.running
        )

    def _choose_k(self, decoding: list[Request], prompts: list[Request]) -> None:
        """Choose the numbers of drafts for a step that also computes these prompts."""
        adaptive = self._sequences.adaptive
        if adaptive is None:
            num_seqs = max(1, len(decoding))
            self._worth = Worth(num_seqs, ROW_COST / num_seqs)
            return
        drafting = [r for r in decoding if r.speculates and self._proposer.draws_for(r)]
        named = [k for r in drafting if (k := r.params.num_speculative_tokens) is not None]
        drafting = [r for r in drafting if r.params.num_speculative_tokens is None]
        num_prompt_rows = sum(request.num_uncomputed_tokens for request in prompts)
        chosen = adaptive.choose(
            len(decoding),
            [request.acceptance.ratio for request in drafting],
            [min(k, self._sequences.max_drawn) for k in named],
            num_prompt_rows=min(num_prompt_rows, self._sequences.config.max_num_batched_tokens),
        )
        self._num_speculative_tokens = adaptive.k
        self._chosen = dict(zip(drafting, chosen, strict=True))
        self._least_chance = adaptive.least_chance(len(decoding))
        self._worth = adaptive.worth(len(decoding))

    def _schedule_running(self, request: Request, budget: int, plan: Plan) -> int:
        """Give a running sequence its share of the step; returns its number of rows, or 0."""
        if request.slot is None or not self._may_go_on(request):  # None: preempted by this step
            return 0
        scheduled = self._share(request, budget, plan)
        if scheduled.num_new_tokens == 0:
            return 0
        while not self._allocate(scheduled):
            if request.is_in_flight:
                return 0  # once the step in flight is read, it may need fewer pages
            victim = self._sequences.preempt_last()
            plan.scheduled = [s for s in plan.scheduled if s.request is not victim]
            if victim is request:
                return 0
        plan.scheduled.append(scheduled)
        return scheduled.max_rows

    def _allocate(self, scheduled: ScheduledRequest) -> bool:
        """Get its pages; if there are too few, for no drafts: they are not worth a preemption."""
        request, end = scheduled.request, scheduled.end
        if self._memory.allocate(request.memory, end + scheduled.max_drafts):
            return True
        scheduled.max_drafts = 0
        return self._memory.allocate(request.memory, end)

    def _may_go_on(self, request: Request) -> bool:
        """Whether the sequence may be in the next step: not if the step in flight is sure to end
        it, because it reaches `max_tokens` or fills the context.
        """
        num_output_tokens = request.least_tokens - request.num_prompt_tokens
        return not request.is_in_flight or (
            num_output_tokens < request.params.max_tokens
            and request.least_tokens < self._max_model_len
        )

    def _num_rows_of_short(
        self, startable: list[Request], prefilling: list[Request], most: int
    ) -> int:
        """Rows, up to `most`, that a prompt in chunks leaves to short prompts which one step can
        compute whole: they may take slots that are free anyway.
        """
        num_rows, num_seats = 0, len(self._sequences.free_slots)
        for request in startable:
            wanted = num_rows + request.num_uncomputed_tokens
            if num_seats == 0:
                break
            if (
                wanted <= most
                and self._memory.pages_for(wanted + 1) <= self._memory.num_free_pages
                and not self._prefix_is_coming(request, prefilling)
            ):
                num_rows, num_seats = wanted, num_seats - 1
        return num_rows

    def _should_wait(self, request: Request, prefilling: list[Request], plan: Plan) -> bool:
        """Whether the request should wait for a later step, even if this one has room."""
        scores_prompt = request.params.prompt_logprobs is not None
        if scores_prompt and plan.num_prompt_logits >= MAX_PROMPT_LOGITS:
            return True
        if self._memory.is_coming_back(request.memory):
            return True
        return self._prefix_is_coming(request, prefilling)

    def _prefix_is_coming(self, request: Request, prefilling: list[Request]) -> bool:
        return self._memory.prefix_is_coming(
            request.memory, request.num_reusable_tokens, (other.memory for other in prefilling)
        )

    def _admit(self, request: Request, budget: int, plan: Plan) -> int:
        """Seat a waiting sequence; there must be pages for all its known tokens.

        Returns the number of rows of its share of the step.
        """
        slot = self._sequences.free_slots[-1]  # that it is about to get
        num_reusable = request.num_reusable_tokens
        num_cached = self._memory.attach_prefix(request.memory, num_reusable, slot)
        self._sequences.admit(request, num_cached)
        plan.newcomers.append(request)
        scheduled = self._share(request, budget, plan)
        is_allocated = self._allocate(scheduled)
        assert is_allocated, "a sequence that fits found no pages"
        plan.scheduled.append(scheduled)
        return scheduled.max_rows

    def _fits(self, request: Request) -> bool:
        return self._memory.fits(
            request.memory, request.num_tokens + 1, request.num_reusable_tokens
        )

    def _share(self, request: Request, budget: int, plan: Plan) -> ScheduledRequest:
        num_new = 1
        if not request.is_in_flight:
            num_new = min(request.num_uncomputed_tokens, budget)
            num_new = request.memory.rows_up_to_an_edge(num_new)
        scheduled = ScheduledRequest(request, num_new)
        if scheduled.num_prompt_logits:
            num_left = MAX_PROMPT_LOGITS - plan.num_prompt_logits
            if scheduled.num_prompt_logits > num_left:
                num_told = max(0, request.num_scored_tokens - request.memory.num_computed_tokens)
                num_new = num_told + num_left
                scheduled = ScheduledRequest(request, num_new)
        k, may_draft = self._num_drafts_wanted(request), self._may_draft(request)
        if may_draft and request.is_in_flight and request.needs_host:
            k, may_draft = 0, False  # k has risen from 0 since `must_know`: from the next step on
        scheduled.is_drafted_for = k > 0
        if scheduled.draws and may_draft:
            # The last token needs no draft, since verification emits one more than it accepts.
            num_output_tokens = request.least_tokens - request.num_prompt_tokens
            room = min(
                request.params.max_tokens - num_output_tokens - 1,
                self._max_model_len - request.most_tokens - 1,
                budget - num_new,
            )
            # The first token does not wait until the draft has read the prompt: the next step does
            # that, in one pass with the drafts of others.
            if num_output_tokens > 0 or self.lag == 0:
                self._set_drafts(scheduled, k, max(0, room))
                if request.params.num_speculative_tokens is None:
                    scheduled.least_chance = self._least_chance
        return scheduled

    def _set_drafts(self, scheduled: ScheduledRequest, k: int, room: int) -> None:
        """Set how many drafts a sequence may have, never more than there is room for, and of which
        source: the one of whose drafts the most are expected to be accepted.
        """
        request, adaptive = scheduled.request, self._sequences.adaptive
        scheduled.max_drawn = scheduled.max_drafts = min(k, room)
        if adaptive is not None and adaptive.is_measuring:
            return
        own_k = request.params.num_speculative_tokens
        most = min(room, self._sequences.max_drafts if own_k is None else own_k)
        most = min(most, max(0, self._num_questions.get(request, most + 1) - 1))
        best, count, gain = None, 0, self._sequences.acceptance.expected(scheduled.max_drawn)
        for wish in self._proposer.wishes(request):
            num_drafts, expected = self._worth.best(wish.chances[:most])
            if expected > gain * (1 + wish.waits):
                best, count, gain = wish, num_drafts, expected / (1 + wish.waits)
        if best is None:
            return
        scheduled.wish = best
        if best.waits:
            scheduled.max_drawn = scheduled.max_drafts = 0
            return
        scheduled.max_drafts = count
        self._worth.take(count, gain)

    def _may_draft(self, request: Request) -> bool:
        """Whether anything may draft for it in the next step."""
        return self._num_drafts_wanted(request) > 0 or (
            request.speculates
            and request.params.num_speculative_tokens != 0
            and self._proposer.looks_up(request)
        )

    def _would_draft(self, request: Request) -> bool:
        """Whether something is likely to draft for it in the next step."""
        return self._num_drafts_wanted(request) > 0 or (
            self._may_draft(request)
            and any(self._worth.best(wish.chances)[0] for wish in self._proposer.wishes(request))
        )

    def _num_drafts_wanted(self, request: Request) -> int:
        """How many drafts of a model a sequence wants."""
        if not request.speculates or not self._proposer.draws_for(request):
            return 0
        k = request.params.num_speculative_tokens
        if k is None:
            k = self._chosen.get(request, self._num_speculative_tokens)
        k = min(k, self._sequences.max_drawn)
        return min(k, max(0, self._num_questions.get(request, k + 1) - 1))
