"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from ..base.errors import APIError
from ..base.held import json_bytes
from ..base.json_text import json_text
from ..base.off_loop import off_loop
from ..base.streaming import server_sent
from .answer import Answer, Event
from .chat_protocol import ChatCompletionRequest
from .chat_turn import num_prompt_tokens, prepare_turn
from .generation import Delta, Sample
from .growth import AnswerBlock, BlockChange, Growth
from .messages_protocol import (
    AnthropicAnswer,
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesUsage,
    StopReason,
)
from .protocol import STREAM
from .service import Service
from .thinking import can_bound_thinking
from .tools import object_of
from .translation import renamed_fields

# Fields that have other names here than in chats.
FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}
# How a block grows, by its type: the type of the delta, and the name of its field.
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def add_message_routes(router: APIRouter, service: Service) -> None:
    @router.post("", response_model=AnthropicAnswer, responses=STREAM)
    async def messages(body: MessagesRequest, http: Request) -> Answer:
        """Answer a conversation as Anthropic's API does; as a whole, or as server-sent events."""
        await service.check_fields(body, http)
        with renamed_fields(FIELDS):
            chat = await off_loop(json_bytes(http), body.as_chat)
            if body.thinking.budget_tokens is not None and not can_bound_thinking(service):
                # Clients cannot ask for thinking without it, whatever the model can do.
                chat.thinking_token_budget = body.thinking_token_budget
            samples = await prepare_turn(service, chat, http)
        return _MessagesAnswer(service, chat, samples)

    @router.post("/count_tokens")
    async def tokens(body: CountTokensRequest, http: Request) -> CountTokensResponse:
        """Count the tokens of a conversation."""
        await service.check_fields(body, http)
        with renamed_fields(FIELDS):
            chat = await off_loop(json_bytes(http), body.as_chat)
            return CountTokensResponse(input_tokens=await num_prompt_tokens(service, chat))


class _MessagesAnswer(Answer):
    _sign = server_sent('{"type": "ping"}', "ping")

    def __init__(
        self, service: Service, body: ChatCompletionRequest, samples: list[Sample]
    ) -> None:
        super().__init__(service, body, samples)
        self.keeps_body = bool(body.tools)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[dict[str, Any]] = []
        self._growth = Growth()
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None

    async def _events(self) -> AsyncIterator[str]:
        yield _event("message_start", message=self._message().model_dump(exclude_unset=True))
        async for delta in self._generation:
            self._count(delta)
            if delta.progress is not None:
                yield _event("ping", prompt_progress=delta.progress.model_dump())
            for name, fields in self._with_trace(delta, self._added(delta)):
                yield _event(name, **fields)
        last: dict[str, Any] = {
            "delta": {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence},
            "usage": self._usage().model_dump(),
        }
        if (metrics := self._metrics) is not None:
            last["metrics"] = metrics.model_dump(exclude_unset=True)
        yield _event("message_delta", **last, **self._unreported_trace())
        yield _event("message_stop")

    async def _whole(self) -> str:
        async for delta in self._generation:
            self._count(delta)
            self._with_trace(delta, self._added(delta))
        message = self._message()
        if (metrics := self._metrics) is not None:
            message.metrics = metrics
        if self._include_trace:
            message.trace = self._steps
        return message.to_json()

    async def _failed(self, error: APIError) -> str:
        return server_sent(json_text(error.anthropic_body()), "error")

    def _added(self, delta: Delta) -> Iterator[Event]:
        """Add to the content; returns the events that report it."""
        for part in delta.parts:
            yield from map(self._changed, self._growth.add(part))
        if delta.finish_reason is not None:
            yield from map(self._changed, self._growth.close())
            self._stop_reason = "max_tokens" if delta.finish_reason == "length" else "end_turn"
            if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
            elif delta.finish_reason == "stop" and delta.num_calls:
                self._stop_reason = "tool_use"

    def _changed(self, change: BlockChange) -> Event:
        how, block, text = change
        if how == "opens":
            self._content.append(self._begun(block))
            shown = dict(self._content[-1])
            return "content_block_start", {"index": block.index, "content_block": shown}
        content = self._content[block.index]
        kind, name = DELTAS[content["type"]]
        if how == "grows":
            delta = {"type": kind, name: text}
            return "content_block_delta", {"index": block.index, "delta": delta}
        content |= {name: block.text} if block.call is None else {"input": object_of(block.text)}
        return "content_block_stop", {"index": block.index}

    def _begun(self, block: AnswerBlock) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        call = block.started_call
        call_id = self._service.message_format.call_id(call, "toolu_")
        return {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}

    def _message(self) -> AnthropicAnswer:
        return AnthropicAnswer(
            id=self._id,
            type="message",
            role="assistant",
            model=self._service.model_name,
            content=self._content,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        return MessagesUsage(
            input_tokens=self._num_prompt_tokens - self._num_cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=self._num_cached_tokens,
            output_tokens=self._num_completion_tokens,
        )


def _event(name: str, **fields: Any) -> str:
    return server_sent(json_text({"type": name, **fields}), name)
