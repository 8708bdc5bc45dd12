"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ..grammar.tool_choice import NamedTool, callable_tools, calls_grammar
from ..http.api_keys import request_key
from ..http.errors import invalid_value
from ..text.chat_template import ChatTemplateError
from ..text.message_parser import Text
from ..text.tool_calls import call_id
from .answer import MIN_LOGPROB, Answer
from .chat_protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatFields,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    TokenLogprob,
    ToolCallChunk,
    TopLogprob,
)
from .generation import Delta, Token
from .service import Service


async def create_chat_completion(
    service: Service, body: ChatCompletionRequest, http: Request
) -> Response:
    """Answer a chat completion request, as a stream or as a whole."""
    service.check_request(body, http, num_prompts=1)
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true.")
    tools = callable_tools(body.tool_choice, body.tools)
    prompt = await chat_prompt(
        service,
        body,
        body.tools if tools else [],
        body.template_variables,
        must_fit=body.truncate_prompt_tokens is None,
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    kept = service.truncate(body, prompt.token_ids, max_tokens or 1)
    prompt = prompt._replace(token_ids=kept)
    room_tokens = max(1, service.engine_info.max_model_len - len(kept))
    grammar = await _grammar(service, body, tools)
    # Off the event loop, because a model's own response template goes over the prompt.
    answer = await asyncio.to_thread(
        _ChatAnswer, service, body, prompt, tools, follows_grammar=grammar is not None
    )
    samples = service.samples(
        body,
        [prompt.token_ids],
        param="messages",
        max_tokens=max_tokens
        or min(room_tokens, service.sampling_defaults.max_tokens or room_tokens),
        logprobs=body.top_logprobs if body.logprobs else None,
        key=request_key(http),
        told_of_prompts=[body.prompt_logprobs],
        grammar=grammar,
        shown_special_ids=answer.shown_special_ids,
    )
    return await answer.respond(http, samples)


class ChatPrompt(NamedTuple):
    text: str
    token_ids: list[int]


async def chat_prompt(
    service: Service,
    body: ChatFields,
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    must_fit: bool = False,
) -> ChatPrompt:
    """The prompt that the model's chat template makes; raises APIError."""
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
    if reserved := sorted(template.reserved & variables.keys()):
        raise invalid_value(
            "chat_template_kwargs",
            f"chat_template_kwargs cannot set {reserved[0]}: it sets variables of the model's chat "
            "template.",
        )

    if len(body.messages) > (most := service.engine_info.max_model_len):
        raise invalid_value(
            "messages",
            f"There are {len(body.messages)} messages, of a token each at least; this model's "
            f"maximum context length is {most} tokens. Please shorten the messages.",
        )

    def render() -> str:
        return template.render(
            [message.for_template() for message in body.messages],
            tools=tools,
            add_generation_prompt=body.prompts_an_answer,
            continue_final_message=body.continue_final_message,
            variables=variables,
        )

    try:
        text = await asyncio.to_thread(render)
    except ChatTemplateError as error:
        raise invalid_value(
            "messages", f"The model's chat template refuses these messages: {error}"
        ) from None
    (ids,) = await service.tokenize(
        [text],
        add_special_tokens=body.add_special_tokens,
        must_fit="messages" if must_fit else None,
    )
    return ChatPrompt(text, ids)


async def _grammar(
    service: Service, body: ChatCompletionRequest, tools: list[dict[str, Any]]
) -> str | None:
    """What the answer must follow; raises APIError."""
    asked = await service.grammars.grammar_of(body.response_format, body.structured_outputs)
    if not body.must_call:
        return asked
    if asked is not None:
        raise invalid_value(
            "tool_choice", "A call that is required and a format of the answer exclude each other."
        )
    at_once = body.tool_choice == "required" and body.parallel_tool_calls
    grammar = calls_grammar(tools, max_calls=None if at_once else 1)
    return await service.grammars.check("tool_choice", grammar)


class _ChatAnswer(Answer):
    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        prompt: ChatPrompt,
        tools: list[dict[str, Any]],
        *,
        follows_grammar: bool,
    ) -> None:
        super().__init__(service, body, [prompt.token_ids], id_prefix="chatcmpl")
        self._body = body
        self._format = service.message_format
        self._parsers = [
            self._format.parser(
                prompt.text, tools, must_call=body.must_call, follows_grammar=follows_grammar
            )
            for _ in range(body.n)
        ]
        self._num_calls = [0] * body.n
        if body.return_token_ids:
            self._head["prompt_token_ids"] = prompt.token_ids

    @property
    def shown_special_ids(self) -> frozenset[int]:
        """Special tokens that are part of the text, as the answer is taken apart by them."""
        if self._parsers[0] is None:
            return frozenset()
        return self._service.tokenizer.special_ids_of(self._format.delimiters)

    def _answer(self, choices: list[Any]) -> ChatCompletion | ChatCompletionChunk:
        if not self._body.stream:
            for name in ("prompt_logprobs", "prompt_token_ids"):
                self._head.setdefault(name, None)  # as vLLM's clients look for them
            return ChatCompletion(object="chat.completion", choices=choices, **self._head)
        chunk = ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **self._head)
        self._head.pop("prompt_token_ids", None)  # told once
        return chunk

    def _choices(self, delta: Delta, *, first: bool) -> Sequence[ChatChoice | ChatChunkChoice]:
        if first and self._body.prompt_logprobs is not None:
            told = self._prompt_logprobs(delta, self._body.prompt_logprobs)
            self._head["prompt_logprobs"] = told
        said = self._said(delta)
        if first and self._body.echoed:
            said.insert(0, {"content": self._body.echoed})
        fields: dict[str, Any] = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.tokens) if self._body.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        # As OpenAI has it: who names the one tool to call learns nothing from the reason.
        named = isinstance(self._body.tool_choice, NamedTool)
        if delta.finish_reason == "stop" and self._num_calls[delta.index] and not named:
            fields["finish_reason"] = "tool_calls"
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in delta.tokens]
        if not self._body.stream:
            fields.setdefault("token_ids", None)  # as vLLM's clients look for it
            return [ChatChoice(message=_message(said), **fields)]
        # A chunk for the role and one for each call: clients look for no more than one in it.
        if first:
            said.insert(0, {"role": "assistant", "content": ""})
        last: list[dict[str, Any]] = []
        if len(said) > first:
            last = [said.pop()]
        elif fields["finish_reason"] or fields["logprobs"] or "token_ids" in fields:
            last = [{}]
        bare = dict.fromkeys(("logprobs", "finish_reason", "stop_reason"))
        return [
            *(ChatChunkChoice(index=delta.index, delta=ChatDelta(**each), **bare) for each in said),
            *(ChatChunkChoice(delta=ChatDelta(**each), **fields) for each in last),
        ]

    def _said(self, delta: Delta) -> list[dict[str, Any]]:
        """What the delta adds to the message: texts, and calls one by one."""
        parser = self._parsers[delta.index]
        if parser is None:
            return [{"content": delta.text}] if delta.text else []
        parts = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.flush()
        said: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Text):
                if self._body.must_call:  # a call that was cut off
                    continue
                if part.reasoning and not self._body.include_reasoning:
                    continue
                name = "reasoning_content" if part.reasoning else "content"
                if not (said and name in said[-1]):
                    said.append({name: []})
                said[-1][name].append(part.text)
            elif self._body.parallel_tool_calls or not self._num_calls[delta.index]:
                call = ToolCallChunk(
                    index=self._num_calls[delta.index],
                    id=call_id(short=self._format.short_ids),
                    type="function",
                    function=FunctionCall(name=part.name, arguments=part.arguments),
                )
                self._num_calls[delta.index] += 1
                said.append({"tool_calls": [call]})
        joined = [
            {
                name: value if name == "tool_calls" else "".join(value)
                for name, value in each.items()
            }
            for each in said
        ]
        for each in joined:
            if "reasoning_content" in each:
                each["reasoning"] = each["reasoning_content"]  # clients look for one or the other
        return joined

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


def _message(said: list[dict[str, Any]]) -> ChatMessage:
    """The parts of a message as one; without content, it has calls."""
    texts: dict[str, list[str]] = {}
    calls: list[ToolCallChunk] = []
    for part in said:
        calls += part.get("tool_calls", ())
        for name in part.keys() - {"tool_calls"}:
            texts.setdefault(name, []).append(part[name])
    fields: dict[str, Any] = {"content": None if calls else ""}
    fields |= {name: "".join(pieces) for name, pieces in texts.items()}
    if calls:
        fields["tool_calls"] = calls
    return ChatMessage(role="assistant", refusal=None, **fields)
