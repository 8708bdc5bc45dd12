"""Answers that are lists of choices: OpenAI's completions and chats."""

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from ..base.errors import APIError
from ..base.json_text import json_text
from ..base.streaming import obfuscation, server_sent
from ..text.message_parser import MessagePart
from .answer import MIN_LOGPROB, Answer
from .generation import Delta, Sample, Token
from .protocol import (
    APIResponse,
    ChoiceFields,
    CompletionTokensDetails,
    GenerationResponse,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from .service import Service
from .trace import TraceStep

# Of a choice in a chunk that is not the last of its delta.
BARE: dict[str, Any] = dict.fromkeys(("logprobs", "finish_reason", "stop_reason"))


class ChoicesAnswer(Answer):
    """A subclass defines what a choice looks like."""

    def __init__(
        self, service: Service, body: ChoiceFields, samples: list[Sample], *, id_prefix: str
    ) -> None:
        super().__init__(service, body, samples)
        # The fields that every part of the answer begins with.
        self._head: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": service.fingerprint,
        }
        self._n = body.n  # how many of each prompt's sequences are in the answer
        self._stream_options = body.stream_options or StreamOptions()
        self._include_usage = self._stream_options.include_usage or service.settings.include_usage
        self._is_predicted = body.prediction is not None
        self._begun: set[int] = set()  # choices of which something was sent
        # JSON around the choices of all chunks but the first, which may say more.
        self._frame: tuple[str, str] | None = None

    @abstractmethod
    def _choices(self, delta: Delta, *, first: bool) -> Sequence[APIResponse]:
        """One choice, or what a stream adds to it, chunk by chunk; `first` if nothing of it was
        sent before.
        """

    @abstractmethod
    def _nothing(self, index: int) -> APIResponse:
        """A choice of a stream to which nothing is added."""

    @abstractmethod
    def _answer(self, choices: list[Any]) -> GenerationResponse:
        """An answer, or one chunk of a stream."""

    def _opening(self) -> Sequence[APIResponse]:
        """Choices that a stream begins with, before there is any text."""
        return ()

    async def _events(self) -> AsyncIterator[str]:
        for choice in self._opening():
            yield self._chunk(choice)
        async for delta in self._generation:
            if delta.progress is not None:
                chunk = self._chunk_of(self._nothing(delta.index))
                chunk.prompt_progress = delta.progress
                yield self._event(chunk)
                continue
            # Each delta has the prompt's logprobs, but only a choice's first chunk reports them.
            num_logprobs = 0 if delta.index in self._begun else len(delta.prompt_logprobs)
            choices = await self._written(num_logprobs, self._next_choices, delta)
            for choice in choices[:-1]:
                yield self._chunk(choice)
            self._count(delta)  # its tokens are counted with its last chunk
            for choice in choices[-1:]:
                yield self._chunk(choice)
        if self._include_usage:
            last = self._answer([])
            last.usage = self._usage()
            self._add_metrics(last)
            yield self._event(last)
        yield server_sent("[DONE]")

    async def _failed(self, error: APIError) -> str:
        return server_sent(json_text(error.body()))

    async def _whole(self) -> bytes:
        """The chunks of a stream, joined."""
        last: dict[int, Delta] = {}
        texts: dict[int, list[str]] = {}
        parts: dict[int, list[MessagePart]] = {}
        tokens: dict[int, list[Token]] = {}
        steps: dict[int, list[TraceStep]] = {}
        async for delta in self._generation:
            self._count(delta)
            texts.setdefault(delta.index, []).append(delta.text)
            parts.setdefault(delta.index, []).extend(delta.parts)
            tokens.setdefault(delta.index, []).extend(delta.tokens)
            steps.setdefault(delta.index, []).extend(delta.steps)
            last[delta.index] = delta
        deltas = [
            replace(delta, text="".join(texts[i]), parts=parts[i], tokens=tokens[i], steps=steps[i])
            for i, delta in sorted(last.items())
        ]
        chosen = self._chosen(deltas)
        num_logprobs = sum(map(_num_logprobs, chosen))
        choices = [  # one by one, because to_json lets nothing else run
            await self._written(num_logprobs, self._choices_json, delta) for delta in chosen
        ]
        whole = self._answer([])
        whole.usage = self._usage()
        self._add_metrics(whole)
        before, after = _around_choices(whole)
        return b"%s%s%s" % (before.encode(), b",".join(choices), after.encode())

    def _chosen(self, deltas: list[Delta]) -> list[Delta]:
        """The n best samples of each prompt, by the mean logprob of their tokens."""
        if self._num_samples == self._n:
            return deltas
        chosen: list[Delta] = []
        for first in range(0, len(deltas), self._num_samples):
            samples = deltas[first : first + self._num_samples]
            chosen += sorted(samples, key=_mean_logprob, reverse=True)[: self._n]
        return [replace(delta, index=index) for index, delta in enumerate(chosen)]

    def _prompt_logprobs(self, delta: Delta, num_top: int) -> PromptLogprobs:
        """The prompt's tokens, each with its best alternatives; the first token has none."""
        prompt = self._prompts[delta.index // self._n]
        entries: PromptLogprobs = [None]
        for token_id, entry in zip(prompt[1:], delta.prompt_logprobs, strict=True):
            ranked = [(token_id, entry.logprob, entry.rank or 0)]
            ranked += [(i, lp, rank) for rank, (i, lp) in enumerate(entry.top[:num_top], start=1)]
            entries.append(
                {
                    i: PromptLogprob(
                        logprob=max(logprob, MIN_LOGPROB),
                        rank=rank,
                        decoded_token=self._service.tokenizer.token_text(i),
                    )
                    for i, logprob, rank in ranked
                }
            )
        return entries

    def _chunk_of(self, *choices: APIResponse) -> GenerationResponse:
        chunk = self._answer(list(choices))
        if self._include_usage:
            every = self._stream_options.continuous_usage_stats
            chunk.usage = self._usage() if every else None
        return chunk

    def _chunk(self, choice: APIResponse) -> str:
        if self._stream_options.continuous_usage_stats or self._stream_options.include_obfuscation:
            return self._event(self._chunk_of(choice))
        if self._frame is None:
            first = self._chunk_of(choice)
            self._frame = _around_choices(self._chunk_of())
            return self._event(first)
        before, after = self._frame
        return server_sent(f"{before}{choice.to_json()}{after}")

    def _event(self, chunk: GenerationResponse) -> str:
        if not self._stream_options.include_obfuscation:
            return server_sent(chunk.to_json())
        chunk.obfuscation = ""
        chunk.obfuscation = obfuscation(chunk.to_json())
        return server_sent(chunk.to_json())

    def _add_metrics(self, answer: GenerationResponse) -> None:
        if (metrics := self._metrics) is not None:
            answer.metrics = metrics

    def _next_choices(self, delta: Delta) -> Sequence[APIResponse]:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        return self._choices(delta, first=first)

    def _choices_json(self, delta: Delta) -> bytes:
        return b",".join(choice.to_json().encode() for choice in self._next_choices(delta))

    def _usage(self) -> Usage:
        details = CompletionTokensDetails(reasoning_tokens=sum(self._reasoning_tokens))
        if self._is_predicted:
            each = [sample.acceptance for sample in self._samples]
            details.accepted_prediction_tokens = sum(a.num_predicted_accepted for a in each)
            details.rejected_prediction_tokens = sum(a.num_predicted_rejected for a in each)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=details,
        )


def _around_choices(answer: GenerationResponse) -> tuple[str, str]:
    """The JSON of an answer without choices, before and after the place of these."""
    # Found once: quotes within a string of JSON are escaped.
    before, after = answer.to_json().split('"choices":[]')
    return f'{before}"choices":[', f"]{after}"


def _num_logprobs(delta: Delta) -> int:
    """How many tokens with logprobs, and steps with drafts, the answer may list."""
    with_logprobs = sum(token.logprobs is not None for token in delta.tokens)
    return len(delta.prompt_logprobs) + with_logprobs + len(delta.steps)


def _mean_logprob(delta: Delta) -> float:
    values = [token.logprobs.logprob for token in delta.tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else 0.0
