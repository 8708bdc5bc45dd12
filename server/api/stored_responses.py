"""The responses that have been stored: asked for, deleted, and continued by others."""

import uuid
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from ..base.errors import APIError, invalid_value, unsupported
from ..base.off_loop import off_loop
from ..base.request_key import request_key
from .input_items import InputItem, Item
from .response_store import ResponseStore, StoredResponse
from .responses_protocol import ResponsesRequest
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


def stored_response(store: ResponseStore, response_id: str, http: Request) -> Response:
    """The response, also one that is not done yet; raises APIError if there is none, or if it
    belongs to another key.
    """
    if http.query_params.get("stream", "false") != "false":
        raise unsupported("stream", "Stored responses are not streamed: leave stream out.")
    running = store.get_running(response_id, request_key(http))
    shown = _kept(store, response_id, http).response if running is None else running.as_json()
    return Response(shown, media_type="application/json")


async def cancel_response(store: ResponseStore, response_id: str, http: Request) -> Response:
    """End a response in the background; one that has ended already stays as it is. Raises APIError
    like `stored_response`, and for one that was not made in the background.
    """
    if (running := store.get_running(response_id, request_key(http))) is not None:
        await running.cancel()
    stored = _kept(store, response_id, http)
    if not stored.in_background:
        raise invalid_value(
            None, "Only a response that was made with background: true can be cancelled."
        )
    return Response(stored.response, media_type="application/json")


def stored_input_items(
    store: ResponseStore,
    response_id: str,
    http: Request,
    *,
    limit: int,
    order: Literal["asc", "desc"],
    after: str | None,
) -> Response:
    """Up to `limit` items of the request, those that follow the item with the id `after`, as they
    are stored; raises APIError like `stored_response`.
    """
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


async def delete_response(store: ResponseStore, response_id: str, http: Request) -> None:
    """Raises APIError like `stored_response`; one that is not done yet is cancelled."""
    if (running := store.get_running(response_id, request_key(http))) is not None:
        await running.cancel()
    store.delete(_kept(store, response_id, http))


def _kept(
    store: ResponseStore, response_id: str, http: Request, *, param: str | None = None
) -> StoredResponse:
    """`param`: the field that names the response, if it is not named by the path."""
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
