"""What the host knows of one sequence, from submission to its last token."""

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .acceptance import OwnAcceptance
from .api import FinishReason, NewRequest, RequestOutput, SamplingParams, Verification
from .memory.sequence import SequenceMemory

if TYPE_CHECKING:
    from .grammars.grammar import Grammar
    from .logits_processors import LogitsProcessor


class Wants(NamedTuple):
    """What verification does for a sequence, or for any of several, besides what it always does."""

    filters: bool
    draws: bool
    edits: bool  # its logits
    logprobs: bool
    drafts: bool  # to be returned


class Request:
    """One sequence: its tokens, its parameters, and what a step in flight may do to it."""

    def __init__(
        self,
        new: NewRequest,
        eos_token_ids: tuple[int, ...] = (),
        verification: Verification = "block",
        *,
        is_edited: bool = False,
    ) -> None:
        """`verification` is the rule if the request names none; `is_edited`: its logits are."""
        self.request_id = new.request_id
        self.params: SamplingParams = new.params
        self.verification: Verification = new.params.verification or verification
        self.stop_token_ids = frozenset(new.params.stop_token_ids)
        # The tokens that min_tokens bans: eos too, even if ignore_eos is set.
        self.end_token_ids = self.stop_token_ids | frozenset(eos_token_ids)
        if not new.params.ignore_eos:
            self.stop_token_ids = self.end_token_ids
        self.token_ids: list[int] = list(new.prompt_token_ids)
        self.num_prompt_tokens = len(new.prompt_token_ids)
        # Where it ends at the latest; the engine also knows how long a sequence may be.
        self.max_len = self.num_prompt_tokens + new.params.max_tokens
        self.wants = Wants(
            new.params.is_filtered,
            new.params.temperature > 0,
            is_edited,
            new.params.logprobs is not None,
            new.returns_drafts,
        )
        self.turn = (new.priority, 0)  # sort key; the scheduler sets the order of arrival
        self.logits_processors: list[tuple[str, LogitsProcessor]] = []
        # Whether the host must know all its tokens before anything is drafted for it.
        self.needs_host = False
        self.edit_error: str | None = None  # why its logits could not be edited
        self.slot: int | None = None  # its row of the device state, while it runs

        self.memory = SequenceMemory(self.token_ids, new.cache_salt)
        # Leading tokens that need no (more) logits for prompt_logprobs.
        scores_prompt = new.params.prompt_logprobs is not None
        self.num_scored_tokens = 0 if scores_prompt else self.num_prompt_tokens
        # Drafts of the step in flight that draws for it; None if there is no such step.
        self.num_drafts_in_flight: int | None = None
        # Which ones, as far as the host knows; None: a model drafts them on the device.
        self.drafts_in_flight: list[int] | None = []
        self.reports_prompt = new.reports_prompt
        self.predicted_token_ids = new.predicted_token_ids
        self.sources = new.sources

        self.grammar: Grammar | None = None  # the engine sets it; compiled by the first step

        self.speculates = True
        self.looks_up = new.params.num_speculative_tokens != 0  # whether drafts may be looked up
        self.next_wish = 0.0  # how many tokens must be known before drafts are looked up again
        self.acceptance = OwnAcceptance()
        self.arrival_s = time.perf_counter()
        self.queue_s = 0.0
        self.num_cached_tokens: int | None = None  # prefix cache hits when it was first admitted
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that the host has not read yet draws for it."""
        return self.num_drafts_in_flight is not None

    @property
    def decodes(self) -> bool:
        """Whether all its known tokens but the last have KV."""
        if self.num_drafts_in_flight is not None:
            return True
        return len(self.token_ids) - self.memory.num_computed_tokens == 1

    @property
    def least_tokens(self) -> int:
        """The fewest tokens that the device may know once the step in flight is done."""
        return len(self.token_ids) + (self.num_drafts_in_flight is not None)

    @property
    def most_tokens(self) -> int:
        """The most tokens that the device may know once the step in flight is done."""
        in_flight = self.num_drafts_in_flight
        return len(self.token_ids) + (0 if in_flight is None else in_flight + 1)

    def may_use(self, source: str) -> bool:
        """Whether this source may draft for it."""
        return self.sources is None or source in self.sources

    @property
    def bans(self) -> list[str]:
        """Names of its parameters that together may ban every token."""
        names = ("allowed_token_ids", "bad_words", "logits_processors", "grammar")
        return [name for name in names if getattr(self.params, name)]

    @property
    def draws_are_fixed(self) -> bool:
        """Whether its tokens are the same whatever is drafted for it."""
        return self.params.temperature <= 0 or self.verification == "match"

    @property
    def can_start(self) -> bool:
        return self.grammar is None or self.grammar.is_compiled

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.memory.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that the prefix cache may supply: only their KV is needed, no logits."""
        if self.num_scored_tokens < self.num_prompt_tokens - 1:
            return self.num_scored_tokens
        return len(self.token_ids) - 1

    def output(self, token_ids: list[int], **fields: Any) -> RequestOutput:
        """An output with these new tokens and fields, and the sequence's present state."""
        return RequestOutput(
            request_id=self.request_id,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
            queue_s=self.queue_s,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            **fields,
        )

    def learn(self, token_ids: list[int]) -> None:
        """Extend the known tokens, and forget errors and masks that concerned drafts."""
        self.token_ids.extend(token_ids)
        self.edit_error = None
        if self.grammar is not None:
            self.grammar.follow(token_ids)

    def start_over(self) -> None:
        """Its pages are gone: everything must be computed again from its tokens."""
        self.memory = self.memory.emptied()  # makes void what is in flight
        self.num_drafts_in_flight, self.drafts_in_flight = None, []
        self.learn([])  # the drafts of a step in flight are void
