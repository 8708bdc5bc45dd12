"""POST /v1/responses, and the responses that have been stored."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..base.errors import APIError, from_exception, invalid_value, unsupported
from ..base.held import Held, json_bytes
from ..base.json_text import json_text
from ..base.off_loop import off_loop
from ..base.request_key import request_key
from ..base.streaming import obfuscation, server_sent
from ..text.message_parser import MessagePart, Text
from .answer import Answer, Event
from .chat_protocol import ChatCompletionRequest
from .chat_turn import num_prompt_tokens, prepare_turn
from .generation import Delta, Sample, Token
from .namespaces import names_of_calls
from .protocol import STREAM
from .response_items import OutputItems
from .response_store import ResponseStore
from .responses_protocol import (
    InputTokensCount,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)
from .service import Service
from .stored_responses import Keeper, earlier_items
from .translation import renamed_fields

log = logging.getLogger("outrider.server.requests")

# Fields that have other names here than in chats.
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}


def add_response_routes(router: APIRouter, service: Service, store: ResponseStore) -> None:
    @router.post("/responses", response_model=ResponseObject, responses=STREAM)
    async def responses(body: ResponsesRequest, http: Request) -> Answer:
        """Answer a conversation with a list of items; as a whole, or as server-sent events."""
        await service.check_fields(body, http)
        _check_background(body, store)
        body = service.sampling_defaults.fill(body)  # the response reports them
        json, earlier = await earlier_items(service, store, body, http)
        with renamed_fields(FIELDS):
            chat = await off_loop(json_bytes(http), body.as_chat, earlier)
            samples = await prepare_turn(service, chat, http)
        keeper = None
        if body.store and store.keeps:
            key = request_key(http)
            keeper = await off_loop(
                json_bytes(http), Keeper, store, json, body.items, key, body.background
            )
        return _ResponsesAnswer(service, body, chat, samples, keeper)

    @router.post("/responses/input_tokens")
    async def input_tokens(body: ResponsesRequest, http: Request) -> InputTokensCount:
        """Count the tokens of a conversation."""
        await service.check_fields(body, http)
        _, earlier = await earlier_items(service, store, body, http)
        with renamed_fields(FIELDS):
            chat = await off_loop(json_bytes(http), body.as_chat, earlier)
            count = await num_prompt_tokens(service, chat)
        return InputTokensCount(object="response.input_tokens", input_tokens=count)


def _check_background(body: ResponsesRequest, store: ResponseStore) -> None:
    if body.background and body.stream:
        raise unsupported(
            "stream",
            "A response in the background is not streamed: ask for it (GET /v1/responses/{id}) "
            "until its status is final.",
        )
    if body.background and not (body.store and store.keeps):
        raise invalid_value(
            "background",
            "background needs store: true, and a server that keeps responses "
            "(server.response_store_bytes, server.api_workers).",
        )


class _ResponsesAnswer(Answer):
    keeps_body = True

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        samples: list[Sample],
        keeper: Keeper | None,
    ) -> None:
        super().__init__(service, chat, samples)
        self._asked = _repeated(body)
        self._keeper = keeper  # None: the response is not kept
        self.key = None if keeper is None else keeper.key
        self._obfuscates = body.stream_options.include_obfuscation
        self._with_logprobs = body.wants_logprobs
        self._tokens: deque[Token] = deque()  # whose text no part has brought yet
        self._items = OutputItems(service.message_format, names_of_calls(body.tools))
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._in_background = body.background
        self._status: ResponseStatus = "queued" if body.background else "in_progress"
        self._error: dict[str, Any] | None = None
        self._num_events = 0

    async def respond(self, http: Request) -> Response:
        if not self._in_background:
            return await super().respond(http)
        await self._start()
        self._task = asyncio.create_task(self._run_in_background(http.state.held.pass_on()))
        await asyncio.sleep(0)  # it begins: a task that has not begun would end without a trace
        return Response(self.as_json(), media_type="application/json")

    async def _run_in_background(self, held: Held) -> None:
        """Go on without the client, until the response ends or is cancelled."""
        assert self._keeper is not None
        running = self._keeper.store.running
        running[self._id] = self
        try:
            await self._finish_in_background()
        finally:
            del running[self._id]
            held.hold(0)
            await self._generation.aclose()

    async def cancel(self) -> None:
        """End a response in the background; it is stored then."""
        if not self._task.cancelling():  # a second time, it could not keep the response
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _finish_in_background(self) -> None:
        """Generate to the end, whatever that is; the response is kept."""
        start_s = time.perf_counter()
        try:
            await self._whole()
            return
        except asyncio.CancelledError:
            if self._status in ("queued", "in_progress"):
                self._cut_off("cancelled")
        except Exception as error:
            self._fail(reason := from_exception(error))
            if reason.status_code == 500 and reason is not error:
                log.exception("a response in the background failed")
        finally:
            duration_s = time.perf_counter() - start_s
            self._service.metrics.observe(self._facts() | {"duration_s": duration_s})
        await self._finish()

    def as_json(self) -> str:
        """The response as JSON, as far as it has come."""
        return self._response().to_json()

    async def _events(self) -> AsyncIterator[str]:
        for name in ("created", "in_progress"):
            yield self._whole_event(name, self._response().to_json())
        async for delta in self._generation:
            if delta.progress is not None:
                progress = {"prompt_progress": delta.progress.model_dump()}
                yield self._event("response.prompt_progress", progress)
            for name, fields in self._with_trace(delta, self._added(delta)):
                if name.endswith(".done"):  # repeats the item
                    yield await self._written(self._num_logprobs, self._event, name, fields)
                else:
                    yield self._event(name, fields)
        response = await self._finish()
        yield await self._written(self._num_logprobs, self._whole_event, self._status, response)

    async def _whole(self) -> str:
        async for delta in self._generation:
            self._with_trace(delta, self._added(delta))
        return await self._finish()

    def _cut_off(self, status: ResponseStatus) -> None:
        """What is there of the output stays."""
        self._status = status
        deque(self._items.close("incomplete"), maxlen=0)

    def _fail(self, error: APIError) -> None:
        self._cut_off("failed")
        code = error.code if error.status_code < 500 else "server_error"
        self._error = {"code": code, "message": error.message}

    async def _failed(self, error: APIError) -> str:
        self._fail(error)
        response = await self._written(self._num_logprobs, self._response().to_json)
        return await self._written(self._num_logprobs, self._whole_event, "failed", response)

    def _added(self, delta: Delta) -> Iterator[Event]:
        """Add to the output; returns the events that report it."""
        self._count(delta)
        self._status = "in_progress"
        if self._with_logprobs:
            self._tokens += delta.tokens
        for part in delta.parts:
            yield from self._items.add(part, self._logprobs(part))
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._items.close(self._status)

    async def _finish(self) -> str:
        """The response as JSON; it is kept, too."""
        response = self._response()
        json = await self._written(self._num_logprobs, response.to_json)
        if (keeper := self._keeper) is not None:
            kept = response.id, json, response.output
            keeper.store.put(await self._written(self._num_logprobs, keeper.stored, *kept))
        return json

    @property
    def _num_logprobs(self) -> int:
        """How many tokens with logprobs, and steps with drafts, the answer may list."""
        num_logprobs = self._num_completion_tokens if self._with_logprobs else 0
        return num_logprobs + len(self._steps)

    def _logprobs(self, part: MessagePart) -> list[dict[str, Any]]:
        """Those of the tokens that a text came from; earlier tokens have no text of their own."""
        entries: list[dict[str, Any]] = []
        if not isinstance(part, Text):
            return entries
        start = part.end - len(part.text)
        while self._tokens and self._tokens[0].text_offset < part.end:
            token = self._tokens.popleft()
            ends_before = bool(self._tokens) and self._tokens[0].text_offset <= start
            if part.reasoning or (token.text_offset < start and ends_before):
                continue
            assert token.logprobs is not None  # they were asked for
            top = [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top]
            entries.append(self._entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
        return entries

    def _event(self, name: str, fields: dict[str, Any]) -> str:
        event = {"type": name, "sequence_number": self._next_number(), **fields}
        if name.endswith(".delta") and self._obfuscates:
            event["obfuscation"] = ""
            event["obfuscation"] = obfuscation(json_text(event))
        return server_sent(json_text(event), name)

    def _whole_event(self, name: str, response: str) -> str:
        """An event with the whole response, which is JSON already."""
        head = f'"type": "response.{name}", "sequence_number": {self._next_number()}'
        return server_sent(f'{{{head}, "response": {response}}}', f"response.{name}")

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _response(self) -> ResponseObject:
        ended = self._status in ("completed", "incomplete")
        cut_off = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        speculation: dict[str, Any] = {}
        if ended and (metrics := self._metrics) is not None:
            speculation["metrics"] = metrics
        if ended and self._include_trace:
            speculation["trace"] = self._steps
        return ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created_at,
            completed_at=int(time.time()) if self._status == "completed" else None,
            status=self._status,
            background=self._in_background,
            error=self._error,
            incomplete_details=cut_off,
            model=self._service.model_name,
            output=list(self._items.items),
            store=self._keeper is not None,
            truncation="disabled",
            usage=self._usage() if ended else None,
            **self._asked,
            **speculation,
        )

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self._num_prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=self._num_cached_tokens, cache_write_tokens=0
            ),
            output_tokens=self._num_completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=sum(self._reasoning_tokens)),
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
        )


def _repeated(body: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request that the response repeats."""
    form = body.text.format
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "temperature": body.temperature,
        "text": {
            "format": {"type": form.type} | form.model_dump(by_alias=True, exclude_unset=True)
        },
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "user": body.user,
    }
