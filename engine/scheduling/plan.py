"""One step as data: what the scheduler wants of each sequence, and what came of it."""

from dataclasses import dataclass, field
from math import isnan

import numpy as np

from ..api import TokenLogprobs
from ..request import Request
from ..state.host_copy import HostCopy


@dataclass(slots=True)
class ScheduledRequest:
    """One sequence's share of a step."""

    request: Request
    num_new_tokens: int  # known tokens that the target computes
    num_drafts: int = 0  # at most this many proposals are scored behind them
    is_drafted_for: bool = False  # in this step or, where its prompt goes on, in later ones
    # It may go on, and there is room for the next step's drafts behind whatever this one draws.
    has_room_ahead: bool = False
    num_next_drafts: int = 0  # that the next step will want
    # Of the prompt tokens that this step scores: on their way to the host, then there.
    prompt_scores: HostCopy | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    end: int = field(init=False)  # position behind the last known token that this step computes
    samples: bool = field(init=False)  # reaches the last known token, so that new ones are drawn
    # Rows, the last ones of the prompt's, that tell the next prompt token's logprob.
    num_prompt_logits: int = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.end = request.num_computed_tokens + self.num_new_tokens
        self.samples = self.end == request.num_tokens
        first = max(request.num_computed_tokens, request.num_scored_tokens)
        self.num_prompt_logits = max(0, min(self.end, request.num_prompt_tokens - 1) - first)

    @property
    def has_nan(self) -> bool:
        return self.prompt_logprobs is not None and any(
            isnan(entry.logprob) for entry in self.prompt_logprobs
        )


@dataclass(slots=True)
class Plan:
    """One step: B sequences in batch order. Row i of every per-request array is `scheduled[i]`."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    # The target may score what this step draws before the host knows it.
    scores_ahead: bool = False

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    @property
    def sampled(self) -> list[ScheduledRequest]:
        """The sequences that draw tokens in this step, in batch order."""
        return [s for s in self.scheduled if s.samples]

    @property
    def is_plain(self) -> bool:
        """Whether each sequence draws one token."""
        return all(s.samples and s.num_drafts == s.num_next_drafts == 0 for s in self.scheduled)

    @property
    def num_prompt_logits(self) -> int:
        return sum(s.num_prompt_logits for s in self.scheduled)


def slots_of(scheduled: list[ScheduledRequest]) -> np.ndarray:
    """[B], batch_idx -> slot."""
    return np.array([s.request.slot for s in scheduled], dtype=np.int64)


@dataclass(slots=True)
class Verified:
    """What a step drew, on the host; row i is the plan's i-th sampled sequence."""

    token_ids: list[list[int]]  # accepted drafts, then one recovered or bonus token
    num_drafts: list[int]
    is_bad: list[bool]  # no finite logit, or a NaN
    logprobs: list[list[TokenLogprobs] | None]
