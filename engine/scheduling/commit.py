"""Updates the sequences: when a step is launched, and when the host has read it."""

from bisect import bisect_left
from typing import Any

import numpy as np

from ..acceptance import DeadDrafts
from ..api import STEP_TOKENS, RequestOutput
from ..plan import Plan, ScheduledRequest
from ..request import Request
from .adaptive_speculation import AdaptiveSpeculation, times_decoding
from .sequences import Sequences


class Committer:
    """Advances sequences by what steps compute and draw, and ends those that are done.

    Only here does the host learn new tokens. KV is right for a sequence's known tokens and the
    accepted drafts; the next step overwrites what lies after them. What a step drew for a sequence
    that was preempted after its launch is void: it is skipped.
    """

    def __init__(self, sequences: Sequences, *, is_learning: bool) -> None:
        """`is_learning`: the sequences are dummies, whose drafts need not be good."""
        self._sequences = sequences
        self._memory, self._stats = sequences.memory, sequences.stats
        self._dead_drafts = None if is_learning else DeadDrafts()

    def put_in_flight(self, plan: Plan) -> None:
        """Record what a launched step computes; what it draws is recorded by `commit`. The step
        before must be committed already.
        """
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.is_void:
                continue
            if scheduled.emits:
                request.num_drafts_in_flight = scheduled.num_made
                request.drafts_in_flight = scheduled.known_drafts
            self._memory.launch(scheduled.memory, scheduled.relative_end, scheduled.draft_end)

    def commit(self, plan: Plan, elapsed_s: float, drafting_s: float) -> list[RequestOutput]:
        """Advance every sequence by what a step drew; ends those that are done, skips void ones.

        `elapsed_s` is the time from when the step before was read to when this one was, of which
        drafting took `drafting_s`.
        """
        self._observe(plan, elapsed_s, drafting_s)
        num_generated = self._stats.generation_tokens
        num_of_prompts, outputs = 0, []
        for scheduled in plan.scheduled:
            if scheduled.is_void:
                if scheduled.has_nan:  # others may find its pages
                    self._memory.forget(scheduled.memory)
                continue
            if not scheduled.request.num_output_tokens:
                num_of_prompts += scheduled.num_new_tokens
            if scheduled.emits:
                outputs.append(self._commit_drawn(scheduled))
            elif output := self._commit_chunk(scheduled):
                outputs.append(output)
        self._count_step(num_of_prompts + self._stats.generation_tokens - num_generated)
        return outputs

    def _count_step(self, num_tokens: int) -> None:
        self._stats.steps += 1
        self._stats.step_tokens += num_tokens
        self._stats.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def _observe(self, plan: Plan, elapsed_s: float, drafting_s: float) -> None:
        """Report to the choice of k how many drafts were accepted, and how long the step took.

        Looked-up drafts say nothing of a model's, for which k is chosen. Those of void sequences
        teach nothing: one that was preempted draws them again, and no choice may have seen them.
        """
        num_prompt_rows = plan.num_prompt_rows
        if plan.follows_another:
            self._sequences.chunks.observe(num_prompt_rows, elapsed_s)
        num_drafts = sum([s.num_drafts for s in plan.emitting])
        of_models = []
        if num_drafts or plan.depth:
            of_models = [s for s in plan.emitting if not s.is_looked_up]
        drawn = [s for s in of_models if not s.is_void]
        wanted, accepted = [s.num_drafts for s in drawn], [len(s.token_ids) - 1 for s in drawn]
        ratios = [s.request.acceptance.ratio for s in drawn]
        adaptive, chances, left_out = self._sequences.adaptive, {}, []
        if adaptive is not None and plan.ranges_np is not None:
            chances = _calibrate(adaptive, plan)
            left_out = [chances[s.slot][s.num_drafts] if s.is_ranked else 0.0 for s in drawn]
        if any(wanted):  # where nobody is drafted for, nothing is learned or forgotten of anybody
            if self._dead_drafts is not None:
                self._stats.dead_drafts += self._dead_drafts.observe(sum(wanted), sum(accepted))
            of_all = self._sequences.acceptance
            for s, num_wanted, num_accepted in zip(drawn, wanted, accepted, strict=True):
                own, alike = s.request.acceptance, of_all.of_length(s.request.num_tokens)
                of_any = chances.get(s.slot, of_all.by_position)
                alike.observe(num_wanted, num_accepted, of_any)
                own.observe(num_wanted, num_accepted, of_any, alike.ratio)
        if adaptive is None or not plan.emitting:
            self._sequences.acceptance.observe(wanted, accepted, ratios=ratios)
            return
        num_prefill_rows = num_prompt_rows - (len(plan.scheduled) - len(plan.emitting))
        is_timed = plan.follows_another and times_decoding(num_prefill_rows, len(plan.emitting))
        adaptive.observe(
            plan.num_decoding,
            wanted,
            accepted,
            elapsed_s if is_timed else None,
            drafting_s,
            num_looked_up=num_drafts - sum([s.num_drafts for s in of_models]),
            num_void=sum([s.num_drafts for s in of_models if s.is_void]),
            is_trial=plan.is_trial,
            depth=plan.depth,
            left_out=left_out,
            ratios=ratios,
        )

    def _commit_chunk(self, scheduled: ScheduledRequest) -> RequestOutput | None:
        request = scheduled.request
        if scheduled.has_nan:
            if not request.speculates:
                return self._commit_undrawn(scheduled, may_be_its_edits=False)
            self._start_over(request)
            return None
        if scheduled.prompt_logprobs is not None:
            request.num_scored_tokens = scheduled.end
        num_computed = scheduled.num_computed_prompt_tokens
        if scheduled.prompt_logprobs is None and num_computed is None:
            return None
        return request.output(
            [],
            prompt_logprobs=scheduled.prompt_logprobs,
            num_computed_prompt_tokens=num_computed,
        )

    def _commit_drawn(self, scheduled: ScheduledRequest) -> RequestOutput:
        request, num_drafts = scheduled.request, scheduled.num_drafts
        request.num_drafts_in_flight, request.drafts_in_flight = None, []
        drawn = scheduled.token_ids
        num_accepted = len(drawn) - 1
        if is_bad := scheduled.is_bad or scheduled.has_nan:
            may_be_its_edits = bool(request.bans) and not scheduled.has_nan
            if num_drafts == 0 and (may_be_its_edits or not request.speculates):
                return self._commit_undrawn(scheduled, may_be_its_edits=may_be_its_edits)
            if num_accepted == 0 or request.draws_are_fixed or scheduled.has_nan:
                self._start_over(request)
                return request.output([])
            # The accepted drafts lead to a dead end. They are kept, as they would be in plain
            # decoding: redrawing would bias the output away from dead ends.
            drawn = drawn[:num_accepted]
        if num_drafts:
            for j in range(num_drafts):
                self._stats.drafted_per_position[j] += 1
                self._stats.accepted_per_position[j] += j < num_accepted
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        request.num_scored_tokens = request.num_prompt_tokens
        num_computed = scheduled.num_computed_prompt_tokens  # before there is any token
        kept = self._until_stop(request, drawn)
        request.learn(kept)
        self._stats.generation_tokens += len(kept)
        self._memory.advance(scheduled.memory, num_accepted, scheduled.draft_end)

        output = request.output(kept)
        if scheduled.logprobs is not None:
            output.logprobs = scheduled.logprobs[: len(kept)]
        output.prompt_logprobs = scheduled.prompt_logprobs
        output.draft_token_ids = scheduled.draft_token_ids
        output.num_computed_prompt_tokens = num_computed
        output.source = scheduled.source
        if request.finish_reason is not None:
            self._sequences.finish(request)
        elif is_bad:
            self._start_over(request)
        return output

    def _start_over(self, request: Request) -> None:
        """Compute the sequence again, without drafts and in other pages: it may be sound then.

        A draft whose values are NaN spoils the rows before it, and so their KV (0 * NaN in
        attention). Another sequence may have found the page already.
        """
        request.speculates = request.looks_up = False
        self._memory.forget(request.memory)
        self._sequences.preempt(request)

    def _commit_undrawn(
        self, scheduled: ScheduledRequest, *, may_be_its_edits: bool
    ) -> RequestOutput:
        """End a sequence that no token could be drawn for: an error, unless it needs none."""
        request = scheduled.request
        error: dict[str, Any] = {}
        if may_be_its_edits and request.params.max_tokens == 0:
            request.finish_reason = "length"
        elif may_be_its_edits and _is_complete(request):
            request.finish_reason = "stop"
        else:
            request.finish_reason = "error"
            reason, is_dead_end = _why_undrawn(request, may_be_its_edits=may_be_its_edits)
            error = {"error": reason, "is_dead_end": is_dead_end}
        logprobs = None if scheduled.has_nan else scheduled.prompt_logprobs
        output = request.output([], prompt_logprobs=logprobs, **error)
        self._sequences.finish(request)
        return output

    def _until_stop(self, request: Request, drawn: list[int]) -> list[int]:
        """The drawn tokens up to a stop; sets the request's finish reason if they end it."""
        room = request.max_len - len(request.token_ids)
        kept = drawn[:room]
        for j, token_id in enumerate(kept):
            if token_id in request.stop_token_ids:
                request.finish_reason = "stop"
                request.stop_token_id = token_id
                return kept[: j + 1]
        if len(drawn) >= room:
            request.finish_reason = "length"
        return kept


def _calibrate(adaptive: AdaptiveSpeculation, plan: Plan) -> dict[int, list[float]]:
    """Learn from ranked sequences that are not void; returns, by slot, the chance of each of their
    drafts, and 0.
    """
    assert plan.ranges_np is not None
    are_void = np.array([s.is_void for s in plan.ranked])
    if are_void.all():
        return {}
    ranked = [s for s in plan.ranked if not s.is_void]
    chances_np = adaptive.calibrate(
        plan.ranges_np[~are_void, : plan.depth],
        [s.request.acceptance for s in ranked],
        [s.num_drafts for s in ranked],
        [len(s.token_ids) - 1 for s in ranked],
    )
    rows = np.pad(chances_np, ((0, 0), (0, 1))).tolist()
    return dict(zip((s.slot for s in ranked), rows, strict=True))


def _is_complete(request: Request) -> bool:
    """Whether its text is whole by its grammar, and other edits ban what would end it or go on."""
    if request.grammar is None or request.bans == ["grammar"] or request.edit_error is not None:
        return False
    return request.grammar.may_end


def _why_undrawn(request: Request, *, may_be_its_edits: bool) -> tuple[str, bool]:
    """The reason, and whether the request's own parameters left no token."""
    if not may_be_its_edits:
        return "the target produced no finite logits for this sequence", False
    if request.edit_error is not None:
        return request.edit_error, request.grammar is not None and request.grammar.is_at_fault
    first, *others = request.bans
    together = f", together with {' and '.join(others)}" if others else ""
    return f"{first}: it left no token to go on with{together}", True
