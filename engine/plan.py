"""One step as data: what to compute for each sequence, and what came out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .api import SourceName, TokenLogprobs
from .memory.sequence import SequenceMemory
from .request import Request, Wants

# (whether any sequence filters, whether any draws): kernels leave out what is not needed.
SAMPLING_KINDS = ((True, True), (False, True), (False, False))
# The same of drafts, and whether logits are edited on the device. Edits are rare, so they are
# captured with all that they may be asked for with, alone: others are spared their launches.
DRAFTING_KINDS = ((True, True, True), *((*kind, False) for kind in SAMPLING_KINDS))

# Rows of one step that may go through the output layer for prompt logprobs. Logits take up to
# 150,000 numbers a row, too much for a whole chunk.
MAX_PROMPT_LOGITS = 512


class RowBudget(NamedTuple):
    """How many drafts of a step are verified, and by what they are chosen on the device. All of it
    is of steps that the host has read.
    """

    num_drafts: int  # of the ranked sequences together, or as many as were made
    by_range_np: np.ndarray  # [NUM_RANGES] how often drafts are accepted, by their log odds


class Chosen(NamedTuple):
    """How many drafts are verified of each ranked sequence, which are the last N of the plan."""

    num_drafts: int  # of all of them
    counts: Tensor  # [N] int32
    ranges: Tensor  # [N, K] int32, of the drafts' log odds: see rank.py


class Wish(NamedTuple):
    """What a source would draft for a sequence, known before the step is planned."""

    source: SourceName
    drafts: list[int]
    chances: list[float]  # of each draft, with all before it and all that is assumed of a step
    # It must know first which drafts in flight are accepted: this step has none, the next these.
    waits: bool = False


@dataclass(slots=True)
class ScheduledRequest:
    """One sequence's share of a step."""

    request: Request
    num_new_tokens: int  # known tokens that the target computes
    max_drafts: int = 0  # there are rows and pages for so many
    max_drawn: int = 0  # how many of them may be drawn from a model
    wish: Wish | None = None  # the drafts are the first of these; None: a model may draft
    num_made: int = 0  # how many drafts were made
    is_ranked: bool = False  # the device chooses how many of them are verified
    # How many are verified: k_i. Of ranked sequences, 0 until the host has read the step.
    num_drafts: int = 0
    source: SourceName | None = None  # where they are from; None: there are none
    # End of the tokens whose KV the draft has after the step, if all drafts are accepted; relative
    # to the end of the known tokens. None: it computes nothing.
    draft_end: int | None = None
    # No draft follows drafts that are less likely than this to be accepted, all of them.
    least_chance: float = 0.0
    is_drafted_for: bool = False  # drafted for in this step or, if its prompt goes on, later
    # Logprobs of the prompt tokens scored in this step: while copied to the host, and then there.
    prompt_scores: list[np.ndarray] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # What the step emitted, once the host has read it. The tokens are accepted drafts, then one
    # recovered or bonus token.
    token_ids: list[int] = field(default_factory=list)
    is_bad: bool = False  # its logits have a NaN, or none that is finite
    logprobs: list[TokenLogprobs] | None = None  # those of `token_ids`, if the request wants them
    draft_token_ids: list[int] | None = None  # None unless the request `returns_drafts`
    slot: int = field(init=False)
    memory: SequenceMemory = field(init=False)  # that the step computes in
    # First token to compute, relative to the end of the known tokens: the last one is at -1.
    start: int = field(init=False)
    # Absolute end of the known tokens that this step computes: at most, if one is in flight.
    end: int = field(init=False)
    emits: bool = field(init=False)  # it computes the last known token, so new ones come
    # How many of its prompt rows yield the logprob of the next prompt token.
    num_prompt_logits: int = field(init=False)

    def __post_init__(self) -> None:
        request, memory = self.request, self.request.memory
        assert request.slot is not None
        self.slot, self.memory, self.start = request.slot, memory, -1
        is_in_flight = request.num_drafts_in_flight is not None
        if not is_in_flight:
            self.start = memory.num_computed_tokens - len(request.token_ids)
        self.end = request.most_tokens + self.start + self.num_new_tokens
        self.emits = self.start + self.num_new_tokens == 0
        self.num_prompt_logits = 0
        if not is_in_flight and request.num_scored_tokens < request.num_prompt_tokens:
            first = max(memory.num_computed_tokens, request.num_scored_tokens)
            last = min(self.end, request.num_prompt_tokens - 1)
            self.num_prompt_logits = max(0, last - first)

    def forgo_lookup(self) -> None:
        """Have no looked-up drafts: no more rows than it has got may be drawn from a model."""
        self.wish, self.max_drafts = None, min(self.max_drawn, self.max_drafts)

    @property
    def relative_end(self) -> int:
        """End of the known tokens that this step computes, relative to the end of all."""
        return self.start + self.num_new_tokens

    @property
    def max_rows(self) -> int:
        return self.num_new_tokens + self.max_drafts

    @property
    def num_computed_prompt_tokens(self) -> int | None:
        """How much of the prompt is computed after this step, if that is to be reported."""
        request = self.request
        if not request.reports_prompt or request.num_output_tokens:
            return None
        return min(self.end, request.num_prompt_tokens)

    @property
    def is_looked_up(self) -> bool:
        """Whether its drafts are from a text, not from a model."""
        return self.source not in (None, "draft_model")

    @property
    def known_drafts(self) -> list[int] | None:
        """Its drafts, as far as the host knows them; None: a model drafts them on the device."""
        if self.num_made == 0:
            return []
        return self.wish.drafts[: self.num_made] if self.wish and self.is_looked_up else None

    @property
    def is_void(self) -> bool:
        """Whether the sequence has lost its slot since this was planned."""
        return self.memory is not self.request.memory

    @property
    def has_nan(self) -> bool:
        return self.prompt_logprobs is not None and any(
            isnan(entry.logprob) for entry in self.prompt_logprobs
        )


@dataclass
class Plan:
    """One step: B sequences in batch order. Row i of every per-request array is `scheduled[i]`."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    follows_another: bool = False  # directly, with no idle time between
    num_decoding: int = 0  # sequences behind their prompt, for which k was chosen
    is_trial: bool = False  # it has more or fewer drafts than usual, to see whether that is better
    budget: RowBudget | None = None  # for ranked sequences, if there are any
    chosen: Chosen | None = None  # within that budget; once the step is launched
    ranges_np: np.ndarray | None = None  # those of `chosen`, once the host has read them
    depth: int = 0  # how many drafts a model made of one sequence, at most
    newcomers: list[Request] = field(default_factory=list)  # those that have just got their slots
    # (from, to): slots whose states are copied before the step, one after the other.
    state_copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    def set_drafts(self, num_drafts: Sequence[int]) -> None:
        """Set how many drafts each sequence has, once all are made. Shape: [B]."""
        for scheduled, count in zip(self.scheduled, num_drafts, strict=True):
            scheduled.num_made = count
            scheduled.num_drafts = 0 if scheduled.is_ranked else count
        if any(num_drafts):
            of_models = [s.num_made for s in self.scheduled if not s.is_looked_up]
            self.depth = max(of_models, default=0)

    def rank(self, ranked: Collection[ScheduledRequest], budget: RowBudget) -> None:
        """Have the device choose which drafts of these sequences are verified. They become the last
        ones, so that the host knows where the rows of all others are.
        """
        self.budget = budget
        for scheduled in ranked:
            scheduled.is_ranked = True
        self.scheduled.sort(key=attrgetter("is_ranked"))

    @property
    def ranked(self) -> list[ScheduledRequest]:
        return [s for s in self.scheduled if s.is_ranked]

    def read_chosen(self, counts_np: np.ndarray, ranges_np: np.ndarray) -> None:
        """Enter what the device has chosen. Shape: [N], [N, K]."""
        self.ranges_np = ranges_np
        for scheduled, count in zip(self.ranked, counts_np.tolist(), strict=True):
            scheduled.num_drafts = count

    @cached_property
    def emitting(self) -> list[ScheduledRequest]:
        """The sequences that get new tokens in this step, in batch order; once it is planned."""
        return [s for s in self.scheduled if s.emits]

    @property
    def num_prompt_rows(self) -> int:
        """Known tokens that it computes besides the last one of each sequence."""
        return sum([s.num_new_tokens for s in self.scheduled]) - len(self.emitting)

    @property
    def num_drafts_np(self) -> np.ndarray:
        """k_i of each emitting sequence, as far as the host knows. Shape: [len(emitting)]."""
        return np.array([s.num_drafts for s in self.emitting], dtype=np.int64)

    @cached_property
    def concerns_sources(self) -> bool:
        """Whether any source of drafts must know of this step: most plain steps concern none."""
        concerned = [
            s.max_drafts > 0
            or s.is_drafted_for
            or s.wish is not None
            or s.request.grammar is not None
            for s in self.scheduled
        ]
        return any(concerned)

    @cached_property
    def wants(self) -> Wants:
        """What any emitting sequence wants."""
        return wants_of(self.emitting)

    @property
    def num_prompt_logits(self) -> int:
        return sum([s.num_prompt_logits for s in self.scheduled])


def wants_of(scheduled: list[ScheduledRequest]) -> Wants:
    """What any of these sequences wants; there must be one."""
    each = {s.request.wants for s in scheduled}  # mostly all want the same
    return Wants(*map(any, zip(*each, strict=True)))


def slots_of(scheduled: list[ScheduledRequest]) -> np.ndarray:
    """[B], batch_idx -> slot."""
    return np.array([s.slot for s in scheduled], dtype=np.int64)
