"""POST /v1/responses, and the responses that have been stored."""

import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from ..http.api_keys import request_key
from ..http.errors import APIError, invalid_value
from ..text.message_parser import Part, Text
from .answer import Answer, Event
from .chat_protocol import ChatCompletionRequest
from .chat_turn import num_prompt_tokens, prepare_turn
from .generation import Delta, Generation, Sample, Token
from .input_items import InputItem, Item
from .response_items import OutputItems
from .response_store import ResponseStore, StoredResponse
from .responses_protocol import (
    InputTokensCount,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseItemList,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from .service import Service
from .streaming import obfuscation, server_sent
from .translation import renamed_fields

# Fields that have other names here than in chats.
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
}
_ITEMS: TypeAdapter[Any] = TypeAdapter(list[InputItem])
# What a later response has no use for; it is the most of a conversation, if it is there.
_NOT_CONTINUED: Any = {"__all__": {"content": {"__all__": {"logprobs"}}}}


async def create_response(
    service: Service, store: ResponseStore, body: ResponsesRequest, http: Request
) -> Response:
    """Answer a responses request, as a stream or as a whole."""
    service.check_fields(body, http)
    body = service.sampling_defaults.fill(body)  # the response reports them
    earlier = _earlier(service, store, body, http)
    with renamed_fields(FIELDS):
        chat = body.as_chat(earlier)
        samples = await prepare_turn(service, chat, http)
    kept_in = store if body.store and store.keeps else None
    answer = _ResponsesAnswer(service, body, chat, samples, earlier, kept_in, request_key(http))
    return await answer.respond(http)


async def count_input_tokens(
    service: Service, store: ResponseStore, body: ResponsesRequest, http: Request
) -> InputTokensCount:
    """Count the tokens of the prompt that a responses request would make."""
    service.check_fields(body, http)
    earlier = _earlier(service, store, body, http)
    with renamed_fields(FIELDS):
        count = await num_prompt_tokens(service, body.as_chat(earlier))
    return InputTokensCount(object="response.input_tokens", input_tokens=count)


def _earlier(
    service: Service, store: ResponseStore, body: ResponsesRequest, http: Request
) -> list[Item]:
    """The stored conversation that the input continues; raises APIError, also for no input."""
    if (response_id := body.previous_response_id) is None:
        if not body.items:
            raise invalid_value("input", "The input is empty; it needs at least one item.")
        return []
    param = "previous_response_id"
    if not store.keeps:
        raise invalid_value(
            param,
            "This server keeps no responses (server.response_store_bytes, server.api_workers): "
            "send the whole conversation as input.",
        )
    stored = _kept(store, response_id, http, param=param)
    num_bytes, most = len(stored.conversation), service.settings.max_body_bytes
    if num_bytes > most:  # read at once, it takes as much memory as if it had been sent
        raise invalid_value(
            param,
            f"The conversation up to this response is {num_bytes} bytes of JSON; at most {most} "
            "can be continued (server.max_body_bytes). Please send a shorter one as input.",
        )
    earlier: list[Item] = _ITEMS.validate_json(stored.conversation)
    return earlier


def stored_response(store: ResponseStore, response_id: str, http: Request) -> Response:
    """Raises APIError if the response is not stored, or belongs to another key."""
    stored = _kept(store, response_id, http)
    return Response(stored.response, media_type="application/json")


def stored_input_items(
    store: ResponseStore,
    response_id: str,
    http: Request,
    *,
    limit: int,
    order: Literal["asc", "desc"],
    after: str | None,
) -> ResponseItemList:
    """Up to `limit` items of the request, those that follow the item with the id `after`; raises
    APIError like `stored_response`."""
    items: list[dict[str, Any]] = from_json(_kept(store, response_id, http).input_items)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid_value("after", f"The response has no input item {after[:80]!r}.")
    start = 0 if after is None else ids.index(after) + 1
    end = start + limit
    told = ids[start:end]
    return ResponseItemList(
        object="list",
        data=items[start:end],
        first_id=told[0] if told else None,
        last_id=told[-1] if told else None,
        has_more=end < len(items),
    )


def delete_response(store: ResponseStore, response_id: str, http: Request) -> None:
    """Raises APIError like `stored_response`."""
    store.delete(_kept(store, response_id, http))


def _kept(
    store: ResponseStore, response_id: str, http: Request, *, param: str | None = None
) -> StoredResponse:
    """`param`: the field that names the response, if it is not named by the path."""
    if (stored := store.get(response_id, request_key(http))) is not None:
        return stored
    raise APIError(
        400 if param else 404,
        f"The response {response_id[:80]!r} is not kept: it was not stored, or was dropped "
        "for later ones (server.response_store_bytes).",
        code="previous_response_not_found" if param else "not_found",
        param=param,
    )


def _input_item(item: Item) -> dict[str, Any]:
    """An item in the form in which it can be fetched later: with an id, and text as a part."""
    told: dict[str, Any] = {"id": f"item_{uuid.uuid4().hex}", "type": "message"}
    told |= item.model_dump(exclude_unset=True)
    if isinstance(content := told.get("content"), str):
        kind = "output_text" if told["role"] == "assistant" else "input_text"
        told["content"] = [{"type": kind, "text": content}]
    for part in told.get("content", ()):
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return told


class _ResponsesAnswer(Answer):
    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        samples: list[Sample],
        earlier: list[Item],
        store: ResponseStore | None,
        key: str | None,
    ) -> None:
        super().__init__(service, chat, samples)
        self._body = body
        self._earlier = earlier
        self._store = store  # None: the response is not kept
        self._key = key  # of the response, if it is kept
        self._with_logprobs = body.wants_logprobs
        self._tokens: deque[Token] = deque()  # whose text no part has brought yet
        self._items = OutputItems(service.message_format)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created_at = int(time.time())
        self._status: Status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._num_events = 0

    async def _events(self, generation: Generation) -> AsyncIterator[str]:
        for name in ("created", "in_progress"):
            yield self._told(name, self._response().to_json())
        async for delta in generation:
            if delta.progress is not None:
                progress = {"prompt_progress": delta.progress.model_dump()}
                yield self._event("response.prompt_progress", progress)
            for name, fields in self._with_trace(delta, self._added(delta)):
                if name.endswith(".done"):  # repeats the item
                    yield await self._written(self._num_logprobs, self._event, name, fields)
                else:
                    yield self._event(name, fields)
        told = await self._finish()
        yield await self._written(self._num_logprobs, self._told, self._status, told)

    async def _whole(self, generation: Generation) -> str:
        async for delta in generation:
            self._with_trace(delta, self._added(delta))
        return await self._finish()

    async def _failed(self, error: APIError) -> str:
        self._status = "failed"
        code = error.code if error.status_code < 500 else "server_error"
        self._error = {"code": code, "message": error.message}
        told = await self._written(self._num_logprobs, self._response().to_json)
        return await self._written(self._num_logprobs, self._told, "failed", told)

    def _added(self, delta: Delta) -> Iterator[Event]:
        """Add to the output; returns the events that report it."""
        self._count(delta)
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
        told = await self._written(self._num_logprobs, response.to_json)
        if self._store is not None:
            self._store.put(await self._written(self._num_logprobs, self._kept, response, told))
        return told

    def _kept(self, response: ResponseObject, told: str) -> StoredResponse:
        """What is kept of a response whose JSON is `told`."""
        new = self._body.items
        output = _ITEMS.validate_python(response.output)
        conversation = [*self._earlier, *new, *output]
        return StoredResponse(
            id=response.id,
            response=told.encode(),
            input_items=to_json(list(map(_input_item, new))),
            conversation=_ITEMS.dump_json(conversation, exclude_unset=True, exclude=_NOT_CONTINUED),
            key=self._key,
        )

    @property
    def _num_logprobs(self) -> int:
        """How many tokens with logprobs, and steps with drafts, the answer may list."""
        num_logprobs = self._num_completion_tokens if self._with_logprobs else 0
        return num_logprobs + len(self._steps)

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        """Those of the tokens that a text came from; earlier tokens have no text of their own."""
        told: list[dict[str, Any]] = []
        if not isinstance(part, Text):
            return told
        start = part.end - len(part.text)
        while self._tokens and self._tokens[0].text_offset < part.end:
            token = self._tokens.popleft()
            ends_before = bool(self._tokens) and self._tokens[0].text_offset <= start
            if part.reasoning or (token.text_offset < start and ends_before):
                continue
            assert token.logprobs is not None  # they were asked for
            top = [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top]
            told.append(self._entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
        return told

    def _event(self, name: str, fields: dict[str, Any]) -> str:
        event = {"type": name, "sequence_number": self._next_number(), **fields}
        if name.endswith(".delta") and self._body.stream_options.include_obfuscation:
            event["obfuscation"] = ""
            event["obfuscation"] = obfuscation(msgspec.json.encode(event))
        return server_sent(msgspec.json.encode(event).decode(), name)

    def _told(self, name: str, response: str) -> str:
        """An event that tells the whole response, which is JSON already."""
        head = f'"type": "response.{name}", "sequence_number": {self._next_number()}'
        return server_sent(f'{{{head}, "response": {response}}}', f"response.{name}")

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _response(self) -> ResponseObject:
        body = self._body
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
            background=False,
            error=self._error,
            incomplete_details=cut_off,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            model=self._service.model_name,
            output=list(self._items.items),
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning.effort, "summary": None},
            store=self._store is not None,
            temperature=body.temperature,
            text={"format": _format(body)},
            tool_choice=body.tool_choice,
            tools=body.tools,
            top_logprobs=body.top_logprobs,
            top_p=body.top_p,
            truncation="disabled",
            usage=self._usage() if ended else None,
            user=body.user,
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


def _format(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format
    return {"type": form.type} | form.model_dump(by_alias=True, exclude_unset=True)
