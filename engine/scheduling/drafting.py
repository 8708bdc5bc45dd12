"""How many drafts each sequence of a step gets, and which source makes them."""

from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from outrider.kernels.verify.sampling import MAX_DRAFTS

from ..acceptance import OwnAcceptance
from ..plan import Plan, ScheduledRequest
from ..proposers.proposer import Proposer
from ..request import Request
from .lookups import Worth
from .price import ROW_COST
from .sequences import Sequences

if TYPE_CHECKING:
    from ..grammars.grammar_process import GrammarProcess


_LOOKED_UP_MASKS = 8  # for looked-up drafts of a sequence, where masks are rationed


class Drafting:
    """Gives drafts to the sequences of the step that is planned.

    Of a model's drafts a request names its k, or the choice is ours, by what steps cost. Looked-up
    ones are as many as are worth their rows, whatever k is; of k = 0 there are none. Neither may
    exceed what the proposer can make, the room that the sequence has, and the masks that its
    grammar can compute in time.
    """

    def __init__(self, sequences: Sequences, proposer: Proposer) -> None:
        self._sequences, self._proposer = sequences, proposer
        self.k, self.least_chance = sequences.max_drawn, 0.0  # for requests that leave k open
        self._chosen: dict[Request, int] = {}  # k, where it is chosen for a sequence alone
        # Of the step that is planned: those that decode; of those that a model could draft for, who
        # leaves k open, how often their drafts are accepted, and the k of the others.
        self._decoding: list[Request] = []
        self._open: list[Request] = []
        self._owns: list[OwnAcceptance] = []
        self._named: list[int] = []
        self._worth: Worth | None = None  # of looked-up drafts in this step, if it was asked for
        # How many masks of its grammar each sequence may ask for in this step, where it matters.
        self._num_questions: dict[Request, int] = {}
        self._num_steps = 0
        sequences.on_finish = self._forget

    def ration_grammars(self, requests: list[Request]) -> None:
        """Decide how many questions each of these sequences may ask its grammar in this step, so
        that a slow grammar delays others no further than its allowance. Its own sequences take
        turns; a grammar whose sequences are alone may take its time.
        """
        self._num_steps += 1
        self._num_questions.clear()
        bound = [(r, r.grammar) for r in requests if r.grammar is not None]
        of_process: dict[GrammarProcess, list[tuple[int, Request]]] = {}
        for request, grammar in bound:
            of_process.setdefault(grammar.process, []).append((grammar.last_step, request))
        for process, sequences in of_process.items():
            process.allowance.begin_step()
            if len(sequences) == len(requests):
                continue
            for _, request in sorted(sequences, key=itemgetter(0)):
                looks_up = self._proposer.looks_up(request)
                looked_up = _LOOKED_UP_MASKS if looks_up else 0
                wanted = 1 + max(self._num_wanted(request), looked_up)
                self._num_questions[request] = process.allowance.take(wanted)
        for request, grammar in bound:
            if self._num_questions.get(request, 1) > 0:
                grammar.last_step = self._num_steps

    def taking_part(self, requests: list[Request]) -> list[Request]:
        """Those of these sequences that may be in the step."""
        if not self._num_questions:
            return requests
        return [request for request in requests if self._num_questions.get(request, 1) > 0]

    def choose_k(self, decoding: list[Request], prompts: list[Request]) -> None:
        """Choose the numbers of drafts for a step that also computes these prompts."""
        adaptive, before = self._sequences.adaptive, self._decoding
        self._decoding = decoding
        speedup = 1.0 if self._worth is None else self._worth.speedup
        self._worth = None
        if adaptive is None:
            return
        if decoding != before and any(map(_is_untried, decoding)):
            speedup = inf
        # Mostly they are those of the step before. Who was left out there may have a draft now.
        if decoding != before or len(self._open) + len(self._named) < len(decoding):
            able = [r for r in self._proposer.can_draft(decoding) if r.speculates]
            self._open = [r for r in able if r.params.num_speculative_tokens is None]
            self._owns = [r.acceptance for r in self._open]
            named = [k for r in able if (k := r.params.num_speculative_tokens) is not None]
            self._named = [min(k, self._sequences.max_drawn) for k in named]
        num_prompt_rows = sum(request.num_uncomputed_tokens for request in prompts)
        chosen = adaptive.choose(
            len(decoding),
            self._owns,
            self._named,
            num_prompt_rows=min(num_prompt_rows, self._sequences.config.max_num_batched_tokens),
            speedup=speedup,
        )
        self.k = adaptive.k
        self._chosen = dict(zip(self._open, chosen, strict=True)) if self.k > 0 else {}
        self.least_chance = adaptive.least_chance(len(decoding))

    def worth(self) -> Worth:
        """Of looked-up drafts in this step; most steps have none, and need not know."""
        if self._worth is None:
            adaptive, num_seqs = self._sequences.adaptive, max(1, len(self._decoding))
            if adaptive is None:
                self._worth = Worth(num_seqs, ROW_COST / num_seqs)
            else:
                self._worth = adaptive.worth(num_seqs)
        return self._worth

    def prepare(self, decoding: list[Request]) -> None:
        """Have the sources make ready for those of these sequences that decode by a grammar and get
        no drafts of a model: by its masks that drafts what is forced, too.
        """
        self._proposer.prepare(
            {
                request: self._num_questions.get(request, MAX_DRAFTS + 1)
                for request in decoding
                if request.grammar is not None
                and request.looks_up
                and self._num_wanted(request) == 0
            }
        )

    def give(self, scheduled: ScheduledRequest, num_rows_left: int, *, lag: int) -> None:
        """Set how many drafts a sequence may have, and of which source.

        `lag` is as in Scheduler.
        """
        request = scheduled.request
        k = self._num_wanted(request)
        if k == 0 and not self._is_due(request):
            return
        if request.is_in_flight and request.needs_host:
            return  # k has risen from 0 since `must_know`: from the next step on
        scheduled.is_drafted_for = k > 0
        # The last token needs no draft, since verification emits one more than it accepts.
        num_output_tokens = request.least_tokens - request.num_prompt_tokens
        # The first token does not wait until the draft has read the prompt: the next step does
        # that, in one pass with the drafts of others.
        if not scheduled.emits or (num_output_tokens == 0 and lag > 0):
            return
        room = min(
            request.params.max_tokens - num_output_tokens - 1,
            self._sequences.max_model_len - request.most_tokens - 1,
            num_rows_left,
        )
        self.set_drafts(scheduled, k, max(0, room))
        if request.params.num_speculative_tokens is None:
            scheduled.least_chance = self.least_chance

    def rank(self, plan: Plan) -> None:
        """Have the device choose which drafts of this step are verified, if that may pay.

        Sequences that named a k, and looked-up drafts, keep all of theirs; so do those of which the
        host must know where their rows are.
        """
        adaptive = self._sequences.adaptive
        if adaptive is None or adaptive.budget is None:
            return
        ranked, num_kept = [], 0
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.wish is not None or request.params.num_speculative_tokens is not None:
                continue
            has_known_rows = request.wants.edits or request.wants.logprobs
            if scheduled.max_drafts == 0 or has_known_rows or scheduled.num_prompt_logits:
                num_kept += scheduled.max_drafts
            else:
                ranked.append(scheduled)
        if ranked:
            num_drafts = max(0, adaptive.budget.num_drafts - num_kept)
            plan.rank(ranked, adaptive.budget._replace(num_drafts=num_drafts))

    def forgo_lookups_that_do_not_pay(self, plan: Plan) -> None:
        """Take looked-up drafts back if all of the step's together are not worth their cost.

        Who waits for a step has none in this one.
        """
        wished = [s for s in plan.scheduled if s.wish is not None and not s.wish.waits]
        if wished and not self.worth().pays:
            self._worth = None
            for scheduled in wished:
                scheduled.forgo_lookup()

    def leave_out_lookups(self, plan: Plan) -> None:
        """Have fewer looked-up drafts of each sequence, where more would only cost padding."""
        adaptive = self._sequences.adaptive
        drafted = [(s, s.wish) for s in plan.scheduled if s.wish is not None and s.max_drafts > 1]
        if adaptive is None or not drafted:
            return
        chances = [wish.chances[: s.max_drafts] for s, wish in drafted]
        num_rows = sum([s.max_rows for s in plan.scheduled])
        num_tokens = self.worth().num_tokens
        count = adaptive.num_left_out(len(plan.scheduled), num_rows, num_tokens, chances)
        for scheduled, _ in drafted:
            scheduled.max_drafts = max(1, scheduled.max_drafts - count)

    def set_drafts(self, scheduled: ScheduledRequest, k: int, room: int) -> None:
        """Set how many drafts a sequence may have, never more than there is room for, and of which
        source: the one of whose drafts the most are expected to be accepted.
        """
        request, adaptive = scheduled.request, self._sequences.adaptive
        scheduled.max_drawn = scheduled.max_drafts = min(k, room)
        if adaptive is not None and adaptive.is_measuring:
            return
        most = min(room, self._sequences.max_drafts)
        most = min(most, max(0, self._num_questions.get(request, most + 1) - 1))
        wishes = self._proposer.wishes(request) if self._is_due(request) else ()
        if not wishes:
            return
        best, count, gain = None, 0, self._sequences.acceptance.expected(scheduled.max_drawn)
        for wish in wishes:
            num_drafts, expected = self.worth().best(wish.chances[:most])
            if expected > gain * (1 + wish.waits):
                best, count, gain = wish, num_drafts, expected / (1 + wish.waits)
        if best is None:
            return
        scheduled.wish = best
        if best.waits:
            scheduled.max_drawn = scheduled.max_drafts = 0
            return
        scheduled.max_drafts = count
        self.worth().take(count, gain)

    def _is_due(self, request: Request) -> bool:
        """Whether drafts of it are looked up in the next step."""
        return request.looks_up and len(request.token_ids) >= request.next_wish

    def would_draft(self, request: Request) -> bool:
        """Whether something is likely to draft for it in the next step."""
        if self._num_wanted(request) > 0:
            return True
        wishes = self._proposer.wishes(request) if self._is_due(request) else ()
        likely = [wish for wish in wishes if self.worth().best(wish.chances)[0]]
        for wish in likely:
            self._proposer.grant(request, wish)  # once the tokens before are known
        return bool(likely)

    def _num_wanted(self, request: Request) -> int:
        """How many drafts of a model a sequence wants."""
        k = request.params.num_speculative_tokens
        if k is None:
            k = self._chosen.get(request, self.k)
        if k == 0 or not request.speculates or not self._proposer.can_draft([request]):
            return 0
        k = min(k, self._sequences.max_drawn)
        return min(k, max(0, self._num_questions.get(request, k + 1) - 1))

    def _forget(self, request: Request) -> None:
        """A sequence has ended: keep nothing of it."""
        self._proposer.forget(request)
        self._num_questions.pop(request, None)
        self._chosen, self._decoding, self._open, self._owns, self._named = {}, [], [], [], []


def _is_untried(request: Request) -> bool:
    """Whether it predicts its answer, of which nothing is known yet."""
    return request.looks_up and request.num_output_tokens == 0 and bool(request.predicted_token_ids)
