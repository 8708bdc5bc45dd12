"""Turns a generation into an answer of any API: as a whole, or as a stream of events."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..base.errors import APIError
from ..base.streaming import COMMENT, EventStream, while_connected
from .acceptance import speculation_metrics
from .answer_size import PROMPT_TOKEN_BYTES
from .generation import Delta, Generation, Sample
from .protocol import ChoiceFields, RequestMetrics, TracedStep
from .service import Service

Event = tuple[str, dict[str, Any]]  # its name, and its fields

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
INLINE_LOGPROBS = 64  # an answer that lists more is written off the event loop


class Answer(ABC):
    """One request's answer, and counts of it so far; a subclass writes it as its API does."""

    keeps_body = False  # whether it needs parts of the body as they came
    _stream_class = EventStream
    _sign = COMMENT  # sent by a stream that would be silent otherwise

    def __init__(self, service: Service, body: ChoiceFields, samples: list[Sample]) -> None:
        self._service = service
        self._samples = samples
        self._num_samples = body.num_samples  # of each prompt
        self._prompts = [each.request.prompt_token_ids for each in samples[:: body.num_samples]]
        self._stream = body.stream
        settings, of_drafts = service.settings, body.speculation.metrics
        self._include_times = settings.request_metrics if body.metrics is None else body.metrics
        self._include_drafts = settings.speculation_metrics if of_drafts is None else of_drafts
        self._generation: Generation  # once it has started
        self._include_trace = body.speculation.trace
        self._steps: list[TracedStep] = []  # of an answer made of events
        self._num_steps_reported = 0
        self._ids_as_texts = body.return_tokens_as_token_ids
        self._num_prompt_tokens = sum(map(len, self._prompts))
        # For each sequence, so far: all its tokens, and the tokens of its reasoning.
        self._completion_tokens = [0] * len(samples)
        self._reasoning_tokens = [0] * len(samples)
        self._cached_tokens = [0] * len(self._prompts)

    @property
    def kept_bytes(self) -> int:
        """The most memory of what it needs of the request, besides parts of the body."""
        first, each = self._samples[0].request, self._samples[:: self._num_samples]
        params = first.params
        lists = (params.allowed_token_ids, params.logit_bias, *params.bad_words)
        num_ids = sum(map(len, lists)) * len(self._samples) + len(first.predicted_token_ids)
        num_ids += sum(len(sample.request.prompt_token_ids) for sample in each)
        return num_ids * PROMPT_TOKEN_BYTES

    @abstractmethod
    def _events(self) -> AsyncIterator[str]:
        """The answer as server-sent events, including the final one that reports success."""

    @abstractmethod
    async def _whole(self) -> str | bytes:
        """The answer as JSON."""

    @abstractmethod
    async def _failed(self, error: APIError) -> str:
        """The event that ends a stream after an error."""

    async def _start(self) -> None:
        service = self._service
        self._generation = await Generation.start(
            service.client, self._samples, service.metrics, service.settings.request_timeout_s
        )

    async def respond(self, http: Request) -> Response:
        """Generate, as a stream or as a whole; stops if the client disconnects."""
        await self._start()
        http.scope["state"]["facts"] = self._facts
        close = self._generation.aclose
        if self._stream:
            return self._stream_class(
                self._events(), close=close, failed=self._failed, sign=self._sign
            )
        try:
            whole = await while_connected(http.receive, self._whole())
        except ClientDisconnect:
            http.scope["state"]["outcome"] = "disconnected"
            return Response(status_code=499)  # the client has gone: nobody reads it
        finally:
            await close()
        return Response(whole, media_type="application/json")

    async def _written(self, num_logprobs: int, write: Callable[[*Ts], T], *args: *Ts) -> T:
        """What `write` returns; it runs off the event loop if it may list many logprobs.

        A step whose drafts are listed counts as one logprob.
        """
        if num_logprobs <= INLINE_LOGPROBS:
            return write(*args)
        async with self._service.long_answers:
            return await asyncio.to_thread(write, *args)

    def _count(self, delta: Delta) -> None:
        self._completion_tokens[delta.index] = delta.completion_tokens
        self._reasoning_tokens[delta.index] = delta.reasoning_tokens
        # Samples after the first find the prompt in the cache only because of the first.
        if delta.index % self._num_samples == 0:
            self._cached_tokens[delta.index // self._num_samples] = delta.cached_tokens

    @property
    def _num_completion_tokens(self) -> int:
        return sum(self._completion_tokens)

    @property
    def _num_cached_tokens(self) -> int:
        return sum(self._cached_tokens)

    @property
    def _metrics(self) -> RequestMetrics | None:
        """Times, and how many drafts were accepted, as far as asked for; None if there is nothing
        to report.
        """
        reported: dict[str, Any] = {}
        times = self._generation.times
        if self._include_times and times is not None:
            reported = {
                "time_to_first_token_ms": _milliseconds(times.first_token_s),
                "generation_time_ms": _milliseconds(times.generation_s),
                "queue_time_ms": _milliseconds(times.queue_s),
                "mean_itl_ms": times.token_s and _milliseconds(times.token_s),
                "tokens_per_second": times.tokens_per_s and round(times.tokens_per_s, 3),
            }
        if self._include_drafts:
            k = self._service.engine_info.max_drafts
            drafts = speculation_metrics([sample.acceptance for sample in self._samples], k)
            reported["speculative_decoding"] = drafts
        return RequestMetrics(**reported) if reported else None

    def _trace(self, delta: Delta) -> list[TracedStep]:
        """The steps that the delta came in, if they were asked for."""
        if not self._include_trace:
            return []
        proposer = self._service.engine_info.proposer
        return [step.traced(proposer, self._token_text) for step in delta.steps]

    def _with_trace(self, delta: Delta, events: Iterable[Event]) -> list[Event]:
        """The events of a delta, the last of them with the steps that brought it, and those before
        that brought no event.
        """
        self._steps += self._trace(delta)
        reported = list(events)
        if reported:
            name, fields = reported[-1]
            reported[-1] = name, fields | self._unreported_trace()
        return reported

    def _unreported_trace(self) -> dict[str, Any]:
        if not self._include_trace:
            return {}
        steps = self._steps[self._num_steps_reported :]
        self._num_steps_reported = len(self._steps)
        return {"trace": [step.model_dump() for step in steps]}

    def _facts(self) -> dict[str, float]:
        """What the access log says about the answer so far."""
        drafts = [sample.acceptance for sample in self._samples]
        facts: dict[str, float] = {
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": self._num_cached_tokens,
            "completion_tokens": self._num_completion_tokens,
            "draft_tokens": sum(each.num_draft_tokens for each in drafts),
            "accepted_tokens": sum(each.num_accepted_tokens for each in drafts),
            "max_generation_tokens": max(self._completion_tokens),
            "max_tokens": self._samples[0].request.params.max_tokens,
            "queue_s": round(max(sample.queue_s for sample in self._samples), 6),
        }
        if (first_token_s := self._generation.time_to_first_token_s) is not None:
            facts["first_token_s"] = round(first_token_s, 6)
        if (times := self._generation.times) is not None and times.token_s is not None:
            facts["token_s"] = round(times.token_s, 6)
        return facts

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token with its logprob, as in OpenAI's chats and responses."""
        return {
            "token": self._token_text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._service.tokenizer.token_bytes(token_id)),
        }

    def _token_text(self, token_id: int) -> str:
        if self._ids_as_texts:
            return f"token_id:{token_id}"
        return self._service.tokenizer.token_text(token_id)


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
