"""POST /v1/completions."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from ..base.errors import invalid_value, unsupported
from ..base.held import json_bytes
from ..base.off_loop import MANY_CHARS, off_loop
from ..text.detokenizer import Detokenizer
from .answer import MIN_LOGPROB, Answer
from .asked import Asked
from .choices import BARE, ChoicesAnswer
from .generation import Delta, Sample, Token
from .protocol import STREAM, Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from .service import Service
from .thinking import ends_in_thought, thinking_budget


def add_completion_routes(router: APIRouter, service: Service) -> None:
    @router.post("/completions", response_model=Completion, responses=STREAM)
    async def completions(body: CompletionRequest, http: Request) -> Answer:
        """Continue a prompt, or several; as a whole, or as server-sent events."""
        samples = await prepare_completion(service, body, http)
        prompts = samples[:: body.num_samples]
        num_tokens = body.echo * sum(len(each.request.prompt_token_ids) for each in prompts)
        echoed_chars = num_tokens * service.tokenizer.longest_token
        return await off_loop(
            echoed_chars, _CompletionAnswer, service, body, samples, threshold=MANY_CHARS
        )


async def prepare_completion(
    service: Service, body: CompletionRequest, http: Request
) -> list[Sample]:
    """Samples of a completion; raises APIError."""
    await service.check_request(body, http, num_prompts=len(body.prompts))
    _check(body)
    logprobs = body.logprobs = service.num_logprobs(body.logprobs, "logprobs")
    prompts = await service.tokenize(
        body.prompts,
        add_special_tokens=body.add_special_tokens and not body.suffix,
        must_fit="prompt" if body.truncate_prompt_tokens is None else None,
    )
    if body.suffix:
        prompts = await _gaps(service, body, prompts, body.suffix)
    else:
        prompts = [service.truncate(body, prompt, body.max_tokens) for prompt in prompts]
    ranks_samples = body.num_samples > body.n
    salt = service.cache_salt(body, http)
    budget = thinking_budget(service, body.thinking_token_budget)
    asked = Asked(
        fields=body,
        prompts=prompts,
        param="prompt",
        max_tokens=service.room(prompts) if body.max_tokens is None else body.max_tokens,
        logprobs=0 if logprobs is None and ranks_samples else logprobs,
        prompt_logprobs=[body.prompt_logprobs, logprobs if body.echo else None],
        salt=salt,
        grammar=await service.grammars.grammar_of(
            body.response_format, body.structured_outputs, salt, json_bytes(http)
        ),
        thinking=[
            budget and replace(budget, begun=ends_in_thought(prompt, budget)) for prompt in prompts
        ],
        predicted=await service.predicted(body),
    )
    return await service.samples(asked, json_bytes(http))


def _check(body: CompletionRequest) -> None:
    if body.num_samples < body.n:
        raise invalid_value("best_of", f"best_of is {body.best_of}; n ({body.n}) needs as many.")
    if body.num_samples > body.n and body.stream:
        raise invalid_value("best_of", "best_of cannot be streamed: the best are known at the end.")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid_value(
            "max_tokens", "max_tokens must be at least 1, or 0 with echo or prompt_logprobs."
        )
    if body.suffix and body.echo:
        raise invalid_value("suffix", "suffix and echo exclude each other.")


async def _gaps(
    service: Service, body: CompletionRequest, prompts: list[list[int]], suffix: str
) -> list[list[int]]:
    """Prompts for the text between each of these and the suffix; raises APIError."""
    if service.fill_in_the_middle is None:
        raise unsupported(
            "suffix",
            f"The model {service.model_name!r} was not trained to fill in the middle: its "
            "vocabulary has no marks for it. Leave suffix out.",
        )
    most = service.most_prompt_tokens(body, body.max_tokens)
    (behind,) = await service.tokenize(
        [suffix], add_special_tokens=False, must_fit="suffix" if most is None else None
    )
    body.stop_token_ids = [*body.stop_token_ids, *service.fill_in_the_middle.ends]
    return [
        service.fill_in_the_middle.prompt(prompt, behind, most=most, side=body.truncation_side)
        for prompt in prompts
    ]


class _CompletionAnswer(ChoicesAnswer):
    def __init__(self, service: Service, body: CompletionRequest, samples: list[Sample]) -> None:
        super().__init__(service, body, samples, id_prefix="cmpl")
        self._logprobs_asked = body.logprobs
        self._prompt_logprobs_asked = body.prompt_logprobs
        self._with_ids = body.return_token_ids
        self._echoes = body.echo
        # For each prompt, the text echoed before its choices, and the tokens of that text.
        self._echo = [""] * len(self._prompts)
        self._echoed_tokens: list[list[Token]] = [[] for _ in self._prompts]
        if body.echo:
            for i, (given, prompt) in enumerate(zip(body.prompts, self._prompts, strict=True)):
                self._echo[i], self._echoed_tokens[i] = _echoed(service, body, given, prompt)

    def _answer(self, choices: list[Any]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self._head)

    def _nothing(self, index: int) -> CompletionChoice:
        return CompletionChoice(index=index, text="", **BARE)

    def _choices(self, delta: Delta, *, first: bool) -> list[CompletionChoice]:
        prompt_index = delta.index // self._n
        choice = CompletionChoice(
            index=delta.index,
            text=self._echo[prompt_index] + delta.text if first else delta.text,
            logprobs=None if self._logprobs_asked is None else self._logprobs(delta, first=first),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if not self._stream:  # vLLM's clients expect these fields
            choice.token_ids = choice.prompt_token_ids = choice.prompt_logprobs = None
        if self._with_ids:
            choice.token_ids = [token.id for token in delta.tokens]
            if first:
                choice.prompt_token_ids = self._prompts[prompt_index]
        if self._include_trace:
            choice.trace = self._trace(delta)
        if self._prompt_logprobs_asked is not None:
            choice.prompt_logprobs = self._prompt_logprobs(delta, self._prompt_logprobs_asked)
        return [choice]

    def _logprobs(self, delta: Delta, *, first: bool) -> CompletionLogprobs:
        """Logprobs of the new tokens, after those of the prompt if it is echoed."""
        tokens: list[Token] = []
        if self._echoes and first:
            echoed, most = self._echoed_tokens[delta.index // self._n], self._logprobs_asked
            tokens += (
                # prompt_logprobs may ask for more.
                replace(token, logprobs=entry and replace(entry, top=entry.top[:most]))
                for token, entry in zip(echoed, [None, *delta.prompt_logprobs], strict=True)
            )
        num_echoed_chars = len(self._echo[delta.index // self._n])
        tokens += (
            replace(token, text_offset=num_echoed_chars + token.text_offset)
            for token in delta.tokens
        )
        return CompletionLogprobs(
            text_offset=[token.text_offset for token in tokens],
            token_logprobs=[
                None if token.logprobs is None else max(token.logprobs.logprob, MIN_LOGPROB)
                for token in tokens
            ],
            tokens=[self._token_text(token.id) for token in tokens],
            top_logprobs=[self._alternatives(token) for token in tokens],
        )

    def _alternatives(self, token: Token) -> dict[str, float] | None:
        """Logprobs by text, the token itself first; by id if several tokens have the same text.

        Clients consider a token greedy if no value here is above its own.
        """
        if token.logprobs is None:
            return None
        entries = {self._token_text(token.id): max(token.logprobs.logprob, MIN_LOGPROB)}
        for token_id, logprob in token.logprobs.top:
            if token_id != token.id:
                text = self._token_text(token_id)
                name = f"token_id:{token_id}" if text in entries else text
                entries[name] = max(logprob, MIN_LOGPROB)
        return entries


def _echoed(
    service: Service, body: CompletionRequest, given: object, prompt: list[int]
) -> tuple[str, list[Token]]:
    """A prompt's text, as it was given if all of it was kept, and its tokens."""
    tokenizer = service.tokenizer
    if isinstance(given, str) and body.truncate_prompt_tokens is None:
        # The special tokens that the text does not spell were added to it.
        used = tokenizer.special_ids.intersection(prompt)
        added = frozenset(each for each in used if tokenizer.token_text(each) not in given)
        return given, _decoded(service, prompt, added)[1]
    skipped = tokenizer.special_ids if body.skip_special_tokens else frozenset[int]()
    return _decoded(service, prompt, skipped)


def _decoded(
    service: Service, prompt: list[int], skipped_ids: frozenset[int]
) -> tuple[str, list[Token]]:
    """A prompt's text, and the offset at which each of its tokens begins."""
    detokenizer = Detokenizer(service.tokenizer, [], skipped_ids=skipped_ids)
    tokens, pieces, num_chars = [], [], 0
    for token_id in prompt:
        tokens.append(Token(token_id, num_chars, None))
        pieces.append(detokenizer.push(token_id))
        num_chars += len(pieces[-1])
    return "".join([*pieces, detokenizer.flush()]), tokens
