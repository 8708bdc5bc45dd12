"""From a generation to the JSON of its answer, for completions and chat alike."""

import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .generation import Delta, Generation, Sample, Token
from .protocol import (
    APIResponse,
    GenerationResponse,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    RequestMetrics,
    SamplingFields,
    Usage,
)
from .service import Service
from .streaming import EventStream, while_connected

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
OBFUSCATION_BLOCK_BYTES = 256  # sizes of obfuscated events are multiples of this


class Answer(ABC):
    """One request's deltas as the JSON of its answer; subclasses say what a choice looks like."""

    def __init__(
        self, service: Service, body: SamplingFields, prompts: list[list[int]], *, id_prefix: str
    ) -> None:
        # What all parts of the answer begin with.
        self._head: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._service = service
        self._prompts = prompts
        self._n = body.n
        self._num_samples = body.num_samples  # of each prompt; the answer has n of them
        self._stream = body.stream
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._include_obfuscation = body.include_obfuscation
        asked = body.speculation.metrics
        self._include_metrics = service.settings.speculation_metrics if asked is None else asked
        self._samples: list[Sample] = []
        self._ids_as_texts = body.return_tokens_as_token_ids
        self._num_prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = [0] * (len(prompts) * body.num_samples)
        self._num_completion_tokens = 0  # of all of them
        self._cached_tokens = [0] * len(prompts)
        self._begun: set[int] = set()  # choices of which something has been said

    @abstractmethod
    def _choices(self, delta: Delta, *, first: bool) -> Sequence[APIResponse]:
        """One choice, or what a stream adds to it, chunk by chunk; `first` where nothing was said
        of it before."""

    @abstractmethod
    def _answer(self, choices: list[Any]) -> GenerationResponse:
        """An answer, or one chunk of a stream."""

    async def respond(self, http: Request, samples: list[Sample]) -> Response:
        """Generate, as a stream or as a whole, for as long as the client stays."""
        self._samples = samples
        service = self._service
        generation = await Generation.start(
            service.client,
            samples,
            service.metrics,
            service.settings.request_timeout_s or None,
        )
        http.scope["state"]["facts"] = lambda: self._facts(generation)
        if self._stream:
            return EventStream(self._events(generation), close=generation.aclose)
        try:
            whole = await while_connected(http.receive, self._whole(generation))
        except ClientDisconnect:
            http.scope["state"]["outcome"] = "disconnected"
            return Response(status_code=499)  # nobody reads it
        finally:
            await generation.aclose()
        return Response(whole.to_json(), media_type="application/json")

    async def _events(self, generation: Generation) -> AsyncIterator[str]:
        async for delta in generation:
            choices = self._next_choices(delta)
            for choice in choices[:-1]:
                yield self._chunk(choice)
            self._count(delta)  # its tokens come with the last of its chunks
            for choice in choices[-1:]:
                yield self._chunk(choice)
        if self._include_usage:
            last = self._answer([])
            last.usage = self._usage()
            self._add_metrics(last)
            yield self._event(last)

    async def _whole(self, generation: Generation) -> GenerationResponse:
        """The chunks of a stream, joined."""
        last: dict[int, Delta] = {}
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[Token]] = {}
        async for delta in generation:
            self._count(delta)
            texts.setdefault(delta.index, []).append(delta.text)
            tokens.setdefault(delta.index, []).extend(delta.tokens)
            last[delta.index] = delta
        deltas = [
            replace(delta, text="".join(texts[i]), tokens=tokens[i])
            for i, delta in sorted(last.items())
        ]
        whole = self._answer(
            [choice for delta in self._chosen(deltas) for choice in self._next_choices(delta)]
        )
        whole.usage = self._usage()
        self._add_metrics(whole)
        return whole

    def _chosen(self, deltas: list[Delta]) -> list[Delta]:
        """The n best of each prompt's samples, by the mean logprob of their tokens."""
        if self._num_samples == self._n:
            return deltas
        chosen: list[Delta] = []
        for first in range(0, len(deltas), self._num_samples):
            samples = deltas[first : first + self._num_samples]
            chosen += sorted(samples, key=_mean_logprob, reverse=True)[: self._n]
        return [replace(delta, index=index) for index, delta in enumerate(chosen)]

    def _prompt_logprobs(self, delta: Delta, num_top: int) -> PromptLogprobs:
        """Of the prompt's tokens, each with its best alternatives; the first has none."""
        prompt = self._prompts[delta.index // self._n]
        told: PromptLogprobs = [None]
        for token_id, entry in zip(prompt[1:], delta.prompt_logprobs, strict=True):
            ranked = [(token_id, entry.logprob, entry.rank or 0)]
            ranked += [(i, lp, rank) for rank, (i, lp) in enumerate(entry.top[:num_top], start=1)]
            told.append(
                {
                    i: PromptLogprob(
                        logprob=max(logprob, MIN_LOGPROB),
                        rank=rank,
                        decoded_token=self._service.tokenizer.token_text(i),
                    )
                    for i, logprob, rank in ranked
                }
            )
        return told

    def _chunk(self, choice: APIResponse) -> str:
        chunk = self._answer([choice])
        if self._include_usage:
            chunk.usage = self._usage() if self._continuous_usage else None
        return self._event(chunk)

    def _event(self, chunk: GenerationResponse) -> str:
        if not self._include_obfuscation:
            return chunk.to_json()
        # All chunks of about the same size: how many tokens a step brought is nobody else's affair.
        chunk.obfuscation = ""
        chunk.obfuscation = _padding(-len(chunk.to_json().encode()) % OBFUSCATION_BLOCK_BYTES)
        return chunk.to_json()

    def _add_metrics(self, answer: GenerationResponse) -> None:
        """Of requests with one sequence, which they can be told of."""
        if self._include_metrics and len(self._samples) == 1:
            k = self._service.engine_info.num_speculative_tokens
            if metrics := self._samples[0].acceptance.metrics(k):
                answer.metrics = RequestMetrics(speculative_decoding=metrics)

    def _next_choices(self, delta: Delta) -> Sequence[APIResponse]:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        return self._choices(delta, first=first)

    def _count(self, delta: Delta) -> None:
        self._num_completion_tokens += (
            delta.completion_tokens - self._completion_tokens[delta.index]
        )
        self._completion_tokens[delta.index] = delta.completion_tokens
        # The samples of one prompt find its pages in the cache because of each other.
        if delta.index % self._num_samples == 0:
            self._cached_tokens[delta.index // self._num_samples] = delta.cached_tokens

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)),
        )

    def _facts(self, generation: Generation) -> dict[str, float]:
        """What the access log tells of the answer, as far as it has come."""
        usage = self._usage()
        drafts = [sample.acceptance for sample in self._samples]
        facts: dict[str, float] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": sum(self._cached_tokens),
            "completion_tokens": usage.completion_tokens,
            "draft_tokens": sum(each.num_draft_tokens for each in drafts),
            "accepted_tokens": sum(each.num_accepted_tokens for each in drafts),
            "max_tokens": self._samples[0].request.params.max_tokens,
            "queue_s": round(max(sample.queue_s for sample in self._samples), 6),
        }
        if (first_token_s := generation.time_to_first_token_s) is not None:
            facts["first_token_s"] = round(first_token_s, 6)
        return facts

    def _token_text(self, token_id: int) -> str:
        if self._ids_as_texts:
            return f"token_id:{token_id}"
        return self._service.tokenizer.token_text(token_id)


def _mean_logprob(delta: Delta) -> float:
    values = [token.logprobs.logprob for token in delta.tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else 0.0


def _padding(num_chars: int) -> str:
    """Random, because what is all alike would be compressed away."""
    return secrets.token_hex(num_chars // 2 + 1)[:num_chars]
