"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outrider.server.errors import invalid_value, unsupported
from outrider.server.generation import Delta, Generation, Token
from outrider.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptTokensDetails,
    Usage,
    check_unknown_fields,
)
from outrider.server.service import Service
from outrider.server.streaming import EventStream, while_connected

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


async def create_completion(service: Service, body: CompletionRequest, http: Request) -> Response:
    """Answer a completion request, as a stream or as a whole."""
    _check(service, body)
    prompts = await service.tokenize(body.prompts, add_special_tokens=body.add_special_tokens)
    samples = service.samples(
        body, prompts, param="prompt", max_tokens=body.max_tokens, logprobs=body.logprobs
    )
    answer = _Answer(service, body, prompts)
    generation = await Generation.start(service.client, samples, service.metrics)
    if body.stream:
        return EventStream(answer.events(generation), close=generation.aclose)
    try:
        whole = await while_connected(http.receive, answer.whole(generation))
    except ClientDisconnect:
        http.scope["state"]["outcome"] = "disconnected"
        return Response(status_code=499)  # nobody reads it
    finally:
        await generation.aclose()
    return Response(whole.to_json(), media_type="application/json")


def _check(service: Service, body: CompletionRequest) -> None:
    service.check_model(body.model)
    check_unknown_fields(body)
    service.check_num_samples(len(body.prompts), body.n)
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "stream_options needs stream: true.")
    if body.best_of not in (None, body.n):
        raise unsupported("best_of", f"best_of is {body.best_of}; only n ({body.n}) is supported.")
    if body.suffix:
        raise unsupported("suffix", "suffix is not supported: the model continues a prompt only.")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported yet.")


class _Answer:
    """One request's deltas as the JSON of its answer."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = service.model_name
        self._tokenizer = service.tokenizer
        self._body = body
        self._prompts = prompts
        self._num_prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = [0] * (len(prompts) * body.n)
        self._cached_tokens = [0] * len(prompts)
        self._begun: set[int] = set()  # choices of which something has been said
        # Per choice, what goes before its first text.
        self._echo = [""] * (len(prompts) * body.n)
        if body.echo:
            texts = [
                service.tokenizer.decode(given, skip_special_tokens=body.skip_special_tokens)
                if isinstance(given, list)
                else given
                for given in body.prompts
            ]
            self._echo = [text for text in texts for _ in range(body.n)]

    async def events(self, generation: Generation) -> AsyncIterator[str]:
        """The chunks of a stream."""
        continuous = self._body.continuous_usage
        async for delta in generation:
            self._count(delta)
            chunk = self._completion([self._choice(delta)])
            if self._body.include_usage:
                chunk.usage = self._usage() if continuous else None
            yield chunk.to_json()
        if self._body.include_usage:
            last = self._completion([])
            last.usage = self._usage()
            yield last.to_json()

    async def whole(self, generation: Generation) -> Completion:
        """The chunks of a stream, joined."""
        merged: dict[int, Delta] = {}
        texts: dict[int, list[str]] = {}
        async for delta in generation:
            self._count(delta)
            texts.setdefault(delta.index, []).append(delta.text)
            earlier = merged.get(delta.index)
            tokens = earlier.tokens + delta.tokens if earlier else delta.tokens
            merged[delta.index] = replace(delta, tokens=tokens)
        choices = [
            self._choice(replace(delta, text="".join(texts[index])))
            for index, delta in sorted(merged.items())
        ]
        completion = self._completion(choices)
        completion.usage = self._usage()
        return completion

    def _count(self, delta: Delta) -> None:
        self._completion_tokens[delta.index] = delta.completion_tokens
        # The samples of one prompt find its pages in the cache because of each other.
        if delta.index % self._body.n == 0:
            self._cached_tokens[delta.index // self._body.n] = delta.cached_tokens

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = CompletionChoice(
            index=delta.index,
            text=self._echo[delta.index] + delta.text if first else delta.text,
            logprobs=None if self._body.logprobs is None else self._logprobs(delta.tokens),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = [token.id for token in delta.tokens]
            if first:
                choice.prompt_token_ids = self._prompts[delta.index // self._body.n]
        return choice

    def _usage(self) -> Usage:
        completion_tokens = sum(self._completion_tokens)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._num_prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)),
        )

    def _logprobs(self, tokens: list[Token]) -> CompletionLogprobs:
        texts = [self._token_text(token.id) for token in tokens]
        chosen = []
        alternatives: list[dict[str, float] | None] = []
        for text, token in zip(texts, tokens, strict=True):
            assert token.logprobs is not None  # they were asked for
            chosen.append(max(token.logprobs.logprob, MIN_LOGPROB))
            # The chosen token goes first: another of the same text must not hide its value.
            entries = {text: chosen[-1]}
            for token_id, logprob in token.logprobs.top:
                entries.setdefault(self._token_text(token_id), max(logprob, MIN_LOGPROB))
            alternatives.append(entries)
        return CompletionLogprobs(
            text_offset=[token.text_offset for token in tokens],
            token_logprobs=list(chosen),
            tokens=texts,
            top_logprobs=alternatives,
        )

    def _token_text(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)
