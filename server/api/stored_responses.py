"""The responses that have been stored: asked for, deleted, and continued by others."""

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from ..base.errors import APIError, invalid_value, unsupported
from ..base.off_loop import off_loop
from ..base.request_key import request_key
from .input_items import InputItem, Item
from .response_store import ResponseStore, StoredResponse
from .responses_protocol import DeletedResponse, ResponseItemList, ResponseObject, ResponsesRequest
from .service import Service

_ITEMS: TypeAdapter[Any] = TypeAdapter(list[InputItem])
# What a later response has no use for; it is the most of a conversation, if it is there.
_NOT_CONTINUED: Any = {"__all__": {"content": {"__all__": {"logprobs"}}}}


async def earlier_items(
    service: Service, store: ResponseStore, body: ResponsesRequest, http: Request
) -> tuple[bytes, list[Item]]:
    """The stored conversation that the input continues, as JSON and as items.

    Raises APIError, also for no input. The JSON is counted as if it had been sent.
    """
    if (response_id := body.previous_response_id) is None:
        if not body.items:
            raise invalid_value("input", "The input is empty; it needs at least one item.")
        return b"[]", []
    param = "previous_response_id"
    if not store.keeps:
        raise invalid_value(
            param,
            "This server keeps no responses (server.response_store_bytes, server.api_workers): "
            "send the whole conversation as input.",
        )
    json = _kept(store, response_id, http, param=param).conversation
    if len(json) > (most := service.settings.max_body_bytes):
        raise invalid_value(
            param,
            f"The conversation up to this response is {len(json)} bytes of JSON; at most {most} "
            "can be continued (server.max_body_bytes). Please send a shorter one as input.",
        )
    http.state.held.read(json)
    items: list[Item] = await off_loop(len(json), _ITEMS.validate_json, json)
    return json, items


class Keeper:
    """Keeps a response once it is done. Until then its conversation is JSON: as objects it may
    take 25 times as much.
    """

    def __init__(
        self,
        store: ResponseStore,
        earlier: bytes,
        items: list[Item],
        key: str | None,
        in_background: bool,
    ) -> None:
        self.store = store
        self._conversation = _joined(earlier, _json_of(items))
        self._input_items = tuple(map(_input_item, items))
        self.key = key
        self._in_background = in_background

    def stored(self, response_id: str, shown: str, output: list[dict[str, Any]]) -> StoredResponse:
        """What is kept of the response with this JSON and these items of output."""
        return StoredResponse(
            id=response_id,
            response=shown.encode(),
            input_items=self._input_items,
            conversation=_joined(self._conversation, _json_of(_ITEMS.validate_python(output))),
            key=self.key,
            in_background=self._in_background,
        )


def _json_of(items: list[Item]) -> bytes:
    return _ITEMS.dump_json(items, exclude_unset=True, exclude=_NOT_CONTINUED)


def _joined(first: bytes, then: bytes) -> bytes:
    """Two lists of JSON as one."""
    if first == b"[]" or then == b"[]":
        return then if first == b"[]" else first
    return b"%s,%s" % (first[:-1], then[1:])


def add_stored_response_routes(router: APIRouter, store: ResponseStore) -> None:
    @router.get("/responses/{response_id}", response_model=ResponseObject)
    async def response(response_id: str, http: Request) -> Response:
        """A response that was stored, or that is made in the background."""
        if http.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "Stored responses are not streamed: leave stream out.")
        running = store.get_running(response_id, request_key(http))
        shown = _kept(store, response_id, http).response if running is None else running.as_json()
        return Response(shown, media_type="application/json")

    @router.get("/responses/{response_id}/input_items", response_model=ResponseItemList)
    async def input_items(
        response_id: str,
        http: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that it was asked with, a page at a time."""
        items = _kept(store, response_id, http).input_items
        if order == "desc":
            items = items[::-1]
        start = 0
        if after is not None:
            start = next((at for at, (name, _) in enumerate(items, 1) if name == after), 0)
            if not start:
                raise invalid_value("after", f"The response has no input item {after[:80]!r}.")
        shown = items[start : start + limit]
        page: dict[str, Any] = {
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
            "has_more": start + limit < len(items),
        }
        data = b",".join(json for _, json in shown)
        body = b'{"object":"list","data":[%s],%s' % (data, to_json(page)[1:])
        return Response(body, media_type="application/json")

    @router.post("/responses/{response_id}/cancel", response_model=ResponseObject)
    async def cancel(response_id: str, http: Request) -> Response:
        """End a response that is made in the background."""
        if (running := store.get_running(response_id, request_key(http))) is not None:
            await running.cancel()
        stored = _kept(store, response_id, http)
        if not stored.in_background:
            raise invalid_value(
                None, "Only a response that was made with background: true can be cancelled."
            )
        return Response(stored.response, media_type="application/json")

    @router.delete("/responses/{response_id}")
    async def delete(response_id: str, http: Request) -> DeletedResponse:
        if (running := store.get_running(response_id, request_key(http))) is not None:
            await running.cancel()
        store.delete(_kept(store, response_id, http))
        return DeletedResponse(id=response_id, object="response", deleted=True)


def _kept(
    store: ResponseStore, response_id: str, http: Request, *, param: str | None = None
) -> StoredResponse:
    """The response; raises APIError if there is none, it is not done, or it belongs to another key.

    `param`: the field that names it, if the path does not.
    """
    key = request_key(http)
    if (stored := store.get(response_id, key)) is not None:
        return stored
    if store.get_running(response_id, key) is not None:
        raise APIError(
            409,
            f"The response {response_id[:80]!r} is not done yet: ask for it until its status is "
            "final.",
            code="response_in_progress",
            param=param,
        )
    raise APIError(
        400 if param else 404,
        f"The response {response_id[:80]!r} is not kept: it was not stored, or was dropped "
        "for later ones (server.response_store_bytes).",
        code="previous_response_not_found" if param else "not_found",
        param=param,
    )


def _input_item(item: Item) -> tuple[str, bytes]:
    """An item in the form in which it can be fetched later: with an id, and text as a part."""
    shown: dict[str, Any] = {"id": f"item_{uuid.uuid4().hex}", "type": "message"}
    shown |= item.model_dump(exclude_unset=True)
    if isinstance(content := shown.get("content"), str):
        kind = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": content}]
    for part in shown.get("content", ()):
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return str(shown["id"]), to_json(shown)
