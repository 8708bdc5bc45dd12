"""POST /v1/chat/completions."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.server.answer import MIN_LOGPROB, Answer
from outrider.server.chat_protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatFields,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    TopLogprob,
)
from outrider.server.chat_template import ChatTemplateError
from outrider.server.errors import invalid_value, unsupported
from outrider.server.generation import Delta, Token
from outrider.server.service import Service


async def create_chat_completion(
    service: Service, body: ChatCompletionRequest, http: Request
) -> Response:
    """Answer a chat completion request, as a stream or as a whole."""
    service.check_request(body, num_prompts=1)
    _check(body)
    prompt = await chat_prompt(service, body, with_tools=body.tool_choice != "none")
    room_tokens = max(1, service.engine_info.max_model_len - len(prompt))
    samples = service.samples(
        body,
        [prompt],
        param="messages",
        max_tokens=body.max_completion_tokens or body.max_tokens or room_tokens,
        logprobs=body.top_logprobs if body.logprobs else None,
    )
    return await _ChatAnswer(service, body, prompt).respond(http, samples)


async def chat_prompt(service: Service, body: ChatFields, *, with_tools: bool = True) -> list[int]:
    """Token ids of the prompt that the model's chat template makes; raises APIError."""
    template = service.tokenizer.chat_template
    if template is None:
        raise invalid_value(
            "messages",
            f"The model {service.model_name!r} has no chat template and takes no messages; "
            "send a prompt to /v1/completions.",
        )
    if body.has_two_ends:
        raise invalid_value(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other: the prompt ends "
            "either within the last message or with the beginning of a new one.",
        )
    if reserved := sorted(template.reserved & body.chat_template_kwargs.keys()):
        raise invalid_value(
            "chat_template_kwargs",
            f"chat_template_kwargs cannot set {reserved[0]}: it sets variables of the model's chat "
            "template.",
        )

    def render() -> list[int]:
        text = template.render(
            [message.for_template() for message in body.messages],
            tools=body.tools if with_tools else [],
            add_generation_prompt=body.prompts_an_answer,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        return service.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)

    try:
        return await asyncio.to_thread(render)
    except ChatTemplateError as error:
        raise invalid_value(
            "messages", f"The model's chat template refuses these messages: {error}"
        ) from None


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true.")
    if body.tool_choice not in ("none", "auto"):
        raise unsupported(
            "tool_choice",
            "tool_choice can only be none or auto: this server shows tools to the model, and gives "
            "back its calls as text.",
        )


class _ChatAnswer(Answer):
    def __init__(self, service: Service, body: ChatCompletionRequest, prompt: list[int]) -> None:
        super().__init__(service, body, [prompt], id_prefix="chatcmpl")
        self._body = body
        if body.return_token_ids:
            self._head["prompt_token_ids"] = prompt

    def _answer(self, choices: list[Any]) -> ChatCompletion | ChatCompletionChunk:
        if not self._body.stream:
            return ChatCompletion(object="chat.completion", choices=choices, **self._head)
        chunk = ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self._head)
        self._head.pop("prompt_token_ids", None)  # told once
        return chunk

    def _choice(self, delta: Delta, *, first: bool) -> ChatChoice | ChatChunkChoice:
        fields: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.tokens) if self._body.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in delta.tokens]
        if not self._body.stream:
            message = ChatMessage(role="assistant", content=delta.text, refusal=None)
            return ChatChoice(message=message, **fields)
        if first:
            return ChatChunkChoice(delta=ChatDelta(role="assistant", content=delta.text), **fields)
        return ChatChunkChoice(
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(), **fields
        )

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs:
        content = []
        for token in tokens:
            assert token.logprobs is not None  # they were asked for
            top = [
                TopLogprob(**self._entry(token_id, logprob))
                for token_id, logprob in token.logprobs.top
            ]
            chosen = self._entry(token.id, token.logprobs.logprob)
            content.append(TokenLogprob(**chosen, top_logprobs=top))
        return ChatLogprobs(content=content, refusal=None)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._service.tokenizer.token_bytes(token_id)),
        }
