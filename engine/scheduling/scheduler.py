"""Plans the next step: which sequences run, for how many tokens, with how many drafts."""

from ..plan import MAX_PROMPT_LOGITS, Plan, ScheduledRequest
from ..proposers.proposer import Proposer
from ..request import Request
from .drafting import Drafting
from .sequences import Sequences


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
        self._sequences, self.drafting = sequences, Drafting(sequences, proposer)
        self._memory = sequences.memory
        self._spare_rows = 0  # of this step, for more drafts than a model makes
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
        drafting = self.drafting
        drafting.ration_grammars([*running, *startable[: len(self._sequences.free_slots)]])
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in drafting.taking_part(running):
            (decoding if request.decodes else prefilling).append(request)
        startable = drafting.taking_part(startable)
        seatable = startable[: len(self._sequences.free_slots)]
        # Who is left out may be preempted, and somebody else get its seat in this step.
        num_seqs, of_each = len(running) + len(seatable), self._sequences.max_drawn + 1
        self._spare_rows = self._sequences.max_verified - num_seqs * of_each
        if seatable and not self._fits(seatable[0]):
            seatable = []  # no rows are left to them: it may wait for long, and they behind it
        plan.num_decoding = len(decoding)
        drafting.choose_k(decoding, prefilling + seatable)
        plan.is_trial = self._sequences.adaptive is not None and self._sequences.adaptive.is_trial
        drafting.prepare(decoding)
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
            if not self._fits(request):  # beside what the running ones have just been given
                break
            # If nobody else runs, the device may wait for the copies: meanwhile the host seats the
            # sequence and launches its step.
            num_reusable, is_alone = request.num_reusable_tokens, not self._sequences.running
            if self._memory.bring_back(request.memory, num_reusable, steps_wait=is_alone):
                continue
            budget -= self._admit(request, budget, plan)
            prefilling.append(request)
        drafting.leave_out_lookups(plan)
        drafting.forgo_lookups_that_do_not_pay(plan)
        drafting.rank(plan)
        if plan and self._memory.states is not None:
            plan.state_copies = self._memory.states.take_copies()
        return plan

    def must_know(self) -> bool:
        """Whether the host must read the step in flight before it can plan the next one."""
        needing = [request for request in self._sequences.running if request.needs_host]
        return any(r.is_in_flight and self.drafting.would_draft(r) for r in needing)

    def _schedule_running(self, request: Request, budget: int, plan: Plan) -> int:
        """Give a running sequence its share of the step; returns its number of rows, or 0."""
        if request.slot is None:  # preempted by this step
            return 0
        # Asked of each sequence, here and in _share: `is_in_flight` would be two calls more.
        if request.num_drafts_in_flight is not None and request.least_tokens >= request.max_len:
            return 0  # the step in flight is sure to end it
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
        memory, end = scheduled.memory, scheduled.end
        if self._memory.allocate(memory, end + scheduled.max_drafts):
            return True
        scheduled.max_drafts = 0
        return self._memory.allocate(memory, end)

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
        num_tokens = min(request.num_tokens + 1, request.max_len)  # a prompt may fill the context
        return self._memory.fits(request.memory, num_tokens, request.num_reusable_tokens)

    def _share(self, request: Request, budget: int, plan: Plan) -> ScheduledRequest:
        num_new = 1
        if request.num_drafts_in_flight is None:
            num_new = min(request.num_uncomputed_tokens, budget)
            num_new = request.memory.rows_up_to_an_edge(num_new)
        scheduled = ScheduledRequest(request, num_new)
        if scheduled.num_prompt_logits:
            num_left = MAX_PROMPT_LOGITS - plan.num_prompt_logits
            if scheduled.num_prompt_logits > num_left:
                num_scored = max(0, request.num_scored_tokens - request.memory.num_computed_tokens)
                num_new = num_scored + num_left
                scheduled = ScheduledRequest(request, num_new)
        most = self._sequences.max_drawn + self._spare_rows
        self.drafting.give(scheduled, min(budget - num_new, most), lag=self.lag)
        self._spare_rows -= max(0, scheduled.max_drafts - self._sequences.max_drawn)
        return scheduled
