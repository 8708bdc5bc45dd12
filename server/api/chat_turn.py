"""The next turn of a conversation, which chats, responses and messages all ask for."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from ..base.errors import invalid_value
from ..base.held import json_bytes
from ..base.off_loop import MANY_CHARS, off_loop
from ..grammar.thoughts import after_thoughts
from ..grammar.tool_choice import Calls, calls_grammar, choose, text_and_calls_grammar
from ..text.chat_template import ChatTemplateError
from ..text.message_format import ThoughtsFirst
from ..text.message_parser import MessageParser
from ..text.message_reader import MessageReader, RawCall
from ..text.tool_calls import tools_by_name
from .asked import Asked
from .chat_protocol import ChatCompletionRequest, ChatFields
from .generation import Sample
from .service import Service
from .thinking import thinking_budget


async def prepare_turn(
    service: Service, body: ChatCompletionRequest, http: Request
) -> list[Sample]:
    """Samples of the next turn, whose deltas carry the parts of the answer; raises APIError."""
    await service.check_request(body, http, num_prompts=1)
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true.")
    body.top_logprobs = service.num_logprobs(body.top_logprobs, "top_logprobs") or 0
    calls = choose(body.tool_choice, body.tools, parallel=body.parallel_tool_calls)
    if calls.required and calls.input_grammar is None:
        body.stop = []  # the answer is JSON that the client does not see
    prompt, ids = await chat_prompt(
        service,
        body,
        calls.shown,
        body.template_variables,
        must_fit=body.truncate_prompt_tokens is None,
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    ids = service.truncate(body, ids, max_tokens)
    turn = _Turn(
        service,
        body,
        calls,
        prompt,
        salt=service.cache_salt(body, http),
        num_bytes=json_bytes(http),
        has_begun_reasoning=service.message_format.has_begun_reasoning(prompt, body.continued),
    )
    thinking = thinking_budget(service, body.thinking_token_budget, begun=turn.has_begun_reasoning)
    first = turn.thoughts_first()
    grammar = await turn.grammar(first)
    of_calls = None if grammar is not None else await turn.grammar_of_strict_calls()
    readers = await turn.readers(
        follows_grammar=grammar is not None,
        thinks_first=first is not None,
        calls_are_json=of_calls is not None,
    )
    asked = Asked(
        fields=body,
        prompts=[ids],
        param="messages",
        max_tokens=max_tokens or service.room([ids]),
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=[body.prompt_logprobs],
        salt=turn.salt,
        grammar=grammar or of_calls,
        thinking=[thinking],
        predicted=await service.predicted(body),
        readers=readers,
        shown_special_ids=_shown_special_ids(service, readers),
    )
    return await service.samples(asked, turn.num_bytes)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose prompt is known; what may follow it, and who reads that."""

    service: Service
    body: ChatCompletionRequest
    calls: Calls
    prompt: str
    salt: str  # as `Service.cache_salt` returns it
    num_bytes: int  # of the request's JSON
    has_begun_reasoning: bool  # the prompt ends within a thought

    def thoughts_first(self) -> ThoughtsFirst | None:
        """The thoughts before an answer which follows a grammar, if it may think at all."""
        service, body, calls = self.service, self.body, self.calls
        is_bound = calls.required or body.response_format or body.structured_outputs
        if not is_bound or calls.input_grammar is not None:  # that one is the tool's input alone
            return None
        first = service.message_format.thoughts_before_answer(
            self.prompt,
            service.tokenizer.has_tokens,
            begun=self.has_begun_reasoning,
            continues=body.continue_final_message,
        )
        # Required calls are JSON that is on no channel.
        return None if first is not None and first.channels and calls.required else first

    async def grammar(self, first: ThoughtsFirst | None) -> str | None:
        """The grammar of the answer, behind these thoughts; raises APIError.

        A required call takes precedence over a format, which clients send for the turn after the
        calls.
        """
        body, calls, within = self.body, self.calls, None
        grammars, tokenizer = self.service.grammars, self.service.tokenizer
        if first is not None:
            within = partial(after_thoughts, first=first, id_of=tokenizer.id_of)
        if calls.input_grammar is not None:
            return await grammars.check("tools", calls.input_grammar, self.salt)
        if calls.required:
            make = partial(calls_grammar, calls.tools, several=calls.most is None)
            grammar = await off_loop(self.num_bytes, make, threshold=MANY_CHARS)
            return await grammars.check("tool_choice", grammar, self.salt, within)
        return await grammars.grammar_of(
            body.response_format, body.structured_outputs, self.salt, self.num_bytes, within
        )

    async def grammar_of_strict_calls(self) -> str | None:
        """That of an answer which may call strict tools, if it can be had; raises APIError."""
        grammars, tools = self.service.grammars, self.calls.tools
        form, tokenizer = self.service.message_format, self.service.tokenizer
        markers = form.markers_of_bindable_calls
        if markers is None or not any(each["function"].get("strict") is True for each in tools):
            return None
        if not (grammars.can_compile and tokenizer.has_tokens(markers)):
            return None
        make = partial(
            text_and_calls_grammar,
            tools,
            reasons=form.has_reasoning,
            begun=self.has_begun_reasoning,
        )
        grammar = await off_loop(self.num_bytes, make, threshold=MANY_CHARS)
        return await grammars.check("tools", grammar, self.salt)

    async def readers(self, **shape: bool) -> list[MessageReader]:
        """One reader for each answer, of this shape: see `MessageFormat.parser`."""
        # A model's own response template reads the whole prompt.
        length = self.num_bytes + self.body.n * len(self.prompt)
        return await off_loop(length, partial(self._readers, **shape))

    def _readers(self, **shape: bool) -> list[MessageReader]:
        calls, body = self.calls, self.body
        tools = tools_by_name(calls.tools)

        def parser() -> MessageParser | None:
            if calls.input_grammar is not None:
                return RawCall(calls.tools[0]["function"]["name"])
            return self.service.message_format.parser(
                self.prompt, tools, continued=body.continued, must_call=calls.required, **shape
            )

        return [
            MessageReader(
                parser(),
                calls_only=calls.required,
                with_reasoning=body.include_reasoning,
                max_calls=calls.most,
                free_text=calls.free_text,
            )
            for _ in range(body.n)
        ]


def _shown_special_ids(service: Service, readers: list[MessageReader]) -> frozenset[int]:
    """Special tokens that must appear in the text, because the readers look for them."""
    if not readers[0].parses:
        return frozenset()
    return service.tokenizer.special_ids_of(service.message_format.delimiters)


async def num_prompt_tokens(service: Service, body: ChatCompletionRequest) -> int:
    """How many tokens the prompt of this conversation has; raises APIError."""
    calls = choose(body.tool_choice, body.tools, parallel=body.parallel_tool_calls)
    _, ids = await chat_prompt(service, body, calls.shown, body.template_variables)
    return len(ids)


async def chat_prompt(
    service: Service,
    body: ChatFields,
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    must_fit: bool = False,
) -> tuple[str, list[int]]:
    """The prompt that the model's chat template makes, and its token ids; raises APIError."""
    template = service.tokenizer.chat_template
    if template is None:
        raise invalid_value(
            "messages",
            f"The model {service.model_name!r} has no chat template and takes no messages; "
            "send a prompt to /v1/completions, or start the server with --chat-template FILE.",
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
            f"There are {len(body.messages)} messages of at least one token each; this model's "
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
        text = await off_loop(body.num_chars, render, threshold=MANY_CHARS)
    except ChatTemplateError as error:
        raise invalid_value(
            "messages",
            f"The model's chat template refuses these messages: {error}",
            reason="the model's chat template refuses the messages",
        ) from None
    (ids,) = await service.tokenize(
        [text],
        add_special_tokens=body.add_special_tokens,
        must_fit="messages" if must_fit else None,
    )
    return text, ids
