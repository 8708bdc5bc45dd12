"""One step as data: what the scheduler wants of each sequence, and what came of it."""

from dataclasses import dataclass, field
from math import isnan

import numpy as np

from ..api import TokenLogprobs
from ..request import Request
from ..state.host_copy import HostCopy

# Rows of a step that may go through the LM head for prompt logprobs: a whole chunk's logits would
# take 150,000 numbers a token.
MAX_PROMPT_LOGITS = 512


@dataclass(slots=True)
class ScheduledRequest:
    """One sequence's share of a step."""

    request: Request
    num_new_tokens: int  # known tokens that the target computes
    num_drafts: int = 0  # that the target scores behind them: as many as wanted, then as proposed
    is_drafted_for: bool = False  # in this step or, while its prompt goes on, in later ones
    # Of the prompt tokens that this step scores: on their way to the host, then there.
    prompt_scores: HostCopy | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    slot: int | None = field(init=False)
    epoch: int = field(init=False)
    start: int = field(init=False)  # the first new token; the last known one is at -1
    # The highest position, and one more, that the known tokens of this step may have.
    end: int = field(init=False)
    samples: bool = field(init=False)  # reaches the last known token, so that new ones are drawn
    # Rows, the last ones of the prompt's, that tell the next prompt token's logprob.
    num_prompt_logits: int = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.slot, self.epoch = request.slot, request.epoch
        self.start = (
            -1 if request.is_in_flight else request.num_computed_tokens - request.num_tokens
        )
        self.end = request.most_tokens + self.start + self.num_new_tokens
        self.samples = self.start + self.num_new_tokens == 0
        first = max(request.num_computed_tokens, request.num_scored_tokens)
        last = min(self.end, request.num_prompt_tokens - 1)
        self.num_prompt_logits = 0 if request.is_in_flight else max(0, last - first)

    @property
    def is_void(self) -> bool:
        """Whether the sequence was started over, or left, since this was launched."""
        return self.epoch != self.request.epoch

    @property
    def has_nan(self) -> bool:
        return self.prompt_logprobs is not None and any(
            isnan(entry.logprob) for entry in self.prompt_logprobs
        )


@dataclass(slots=True)
class Plan:
    """One step: B sequences in batch order. Row i of every per-request array is `scheduled[i]`."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    is_timed: bool = False  # it begins when the step before it ends

    def __bool__(self) -> bool:
        return bool(self.scheduled)

    @property
    def sampled(self) -> list[ScheduledRequest]:
        """The sequences that draw tokens in this step, in batch order."""
        return [s for s in self.scheduled if s.samples]

    @property
    def num_drafts_np(self) -> np.ndarray:
        """k_i of each sampled sequence. Shape: [B]."""
        return np.array([s.num_drafts for s in self.sampled], dtype=np.int64)

    @property
    def num_prompt_logits(self) -> int:
        return sum(s.num_prompt_logits for s in self.scheduled)


def slots_of(scheduled: list[ScheduledRequest]) -> np.ndarray:
    """[B], batch_idx -> slot."""
    return np.array([s.slot for s in scheduled], dtype=np.int64)


@dataclass(slots=True)
class Verified:
    """What a step drew, on the host; row i is the plan's i-th sampled sequence."""

    token_ids: list[list[int]]  # accepted drafts, then one recovered or bonus token
    is_bad: list[bool]  # no finite logit, or a NaN
    logprobs: list[list[TokenLogprobs] | None]
    draft_token_ids: list[list[int] | None]  # of sequences that tell them

    @staticmethod
    def nothing() -> "Verified":
        return Verified([], [], [], [])
