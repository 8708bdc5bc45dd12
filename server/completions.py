"""POST /v1/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.server.answer import MIN_LOGPROB, Answer
from outrider.server.errors import unsupported
from outrider.server.generation import Delta, Token
from outrider.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from outrider.server.service import Service


async def create_completion(service: Service, body: CompletionRequest, http: Request) -> Response:
    """Answer a completion request, as a stream or as a whole."""
    service.check_request(body, num_prompts=len(body.prompts))
    _check(body)
    prompts = await service.tokenize(body.prompts, add_special_tokens=body.add_special_tokens)
    samples = service.samples(
        body, prompts, param="prompt", max_tokens=body.max_tokens, logprobs=body.logprobs
    )
    return await _CompletionAnswer(service, body, prompts).respond(http, samples)


def _check(body: CompletionRequest) -> None:
    if body.best_of not in (None, body.n):
        raise unsupported("best_of", f"best_of is {body.best_of}; only n ({body.n}) is supported.")
    if body.suffix:
        raise unsupported("suffix", "suffix is not supported: the model continues a prompt only.")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported yet.")


class _CompletionAnswer(Answer):
    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        super().__init__(service, body, prompts, id_prefix="cmpl")
        self._body = body
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

    def _answer(self, choices: list[Any]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self._head)

    def _choices(self, delta: Delta, *, first: bool) -> list[CompletionChoice]:
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
                choice.prompt_token_ids = self._prompts[delta.index // self._n]
        return [choice]

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
