"""What a body takes in memory is counted before it is read, and let go once it is not needed."""

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from asgi import Call, Reply, post, start_post
from pydantic_core import from_json
from scripted_client import steps
from served import Served

from outrider.server.api import service, stored_responses
from outrider.server.api.chat_protocol import ChatCompletionRequest, Message
from outrider.server.api.messages_protocol import MessagesRequest
from outrider.server.api.protocol import CompletionRequest
from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.base import held
from outrider.server.base.content import TextPart
from outrider.server.http import json_routes

Serve = Callable[..., Served]
SAID = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
# By its path, a small request of each kind, and its field that takes anything.
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "Hi"}, "metadata"),
    (CHAT, {"messages": SAID}, "chat_template_kwargs"),
    (CHAT, {"messages": SAID}, "x"),
    ("/v1/responses", {"input": "Hi"}, "client_metadata"),
    ("/v1/responses/input_tokens", {"input": "Hi"}, "x"),
    ("/v1/messages", {"messages": SAID, "max_tokens": 9}, "container"),
    ("/v1/messages/count_tokens", {"messages": SAID}, "x"),
    ("/tokenize", {"prompt": "Hi"}, "x"),
    ("/detokenize", {"tokens": [70]}, "x"),
]


def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(json_routes, "from_json", unread)
    served = serve(max_body_bytes=65_536)
    for path, body, field in REQUESTS:
        for item in ("[{}]", "[]", "{}", "0", '{"a":0}'):
            values = ",".join([item] * (60_000 // (len(item) + 1)))
            sent = json.dumps(body)[:-1] + f', "{field}": [{values}]}}'
            reply = post(served.app, sent.encode(), path=path)
            assert reply.status == 413, (path, item)
            assert "objects" in json.dumps(reply.json())


@pytest.mark.parametrize(
    "item",
    ["[{}]", "[]", "{}", "0", "12345", '""', '"ab"', "1e5", '{"a":0}', '{"a":{}}', '"é"', '"a😀b"'],
)
def test_values_take_no_more_memory_than_is_counted(item: str) -> None:
    sent = ("[" + ",".join([item] * 5000) + "]").encode()
    assert took_bytes(lambda: from_json(sent)) + len(sent) <= held.memory_of(sent)


@pytest.mark.parametrize(
    ("kind", "item"),
    [(Message, {"role": "user", "content": ""}), (TextPart, {"type": "text", "text": ""})],
)
def test_models_take_no_more_memory_than_is_counted(kind: Any, item: dict[str, Any]) -> None:
    sent = json.dumps([item] * 2000, separators=(",", ":")).encode()

    def read() -> Any:
        given = from_json(sent)
        return given, [kind.model_validate(each) for each in given]

    assert took_bytes(read) + len(sent) <= held.memory_of(sent)


def took_bytes(make: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        made = make()
        assert made
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_requests_beyond_the_memory_for_all_are_turned_away_until_there_is_room(
    serve: Serve,
) -> None:
    done = asyncio.Event()
    served = serve(
        lambda request: [*steps(request, [70, 71])[:1], done, *steps(request, [70])],
        max_bodies_bytes=2**20,
    )
    large = {"input": "Hi", "x": [[]] * 5500}

    async def run() -> None:
        first = start_post(served.app, large, path="/v1/responses")
        while not served.client.submitted:
            await asyncio.sleep(0)
        again = start_post(served.app, large, path="/v1/responses")
        await again.finished
        assert (again.reply.status, again.reply.error["code"]) == (429, "queue_full")
        assert "server.max_bodies_bytes" in again.reply.error["message"]
        small = start_post(served.app, {"messages": SAID}, path=CHAT)
        while len(served.client.submitted) < 2:
            await asyncio.sleep(0)
        done.set()
        for call in (first, small):
            await call.finished
            assert call.reply.status == 200
        again = start_post(served.app, large, path="/v1/responses")
        await again.finished
        assert again.reply.status == 200

    asyncio.run(run())


def test_what_has_arrived_of_a_body_counts(serve: Serve) -> None:
    served = serve(max_bodies_bytes=2**20)
    headers = {"content-type": "application/json"}

    class Waiting(Call):
        async def _receive(self) -> Any:
            if len(self.unread) == 1:
                await asyncio.sleep(3600)
            return await super()._receive()

    async def run() -> None:
        part = b" " * 500_000
        waiting = Waiting(served.app, "POST", "/v1/completions", [part, b""], headers)
        await asyncio.sleep(0.01)
        other = Call(served.app, "POST", "/v1/completions", [part, b"{}"], headers)
        await other.finished
        assert (other.reply.status, other.reply.error["code"]) == (429, "queue_full")
        waiting.finished.cancel()
        await asyncio.gather(waiting.finished, return_exceptions=True)
        other = Call(served.app, "POST", "/v1/completions", [part, b"{}"], headers)
        await other.finished
        assert other.reply.status == 400  # it was read

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 9}),
    ],
)
def test_no_body_is_kept_while_it_is_answered(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    done = asyncio.Event()
    served = serve(lambda request: [*steps(request, [70, 71])[:1], done, *steps(request, [70])])
    kinds = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest)

    async def run() -> Reply:
        call = start_post(served.app, body | {"stream": stream}, path=path)
        while not served.client.submitted:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) in kinds]
        done.set()
        await call.finished
        return call.reply

    gc.collect()
    assert asyncio.run(run()).status == 200


def test_a_large_body_is_validated_off_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    validated = json_routes._validated

    def noting(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return validated(*args)

    monkeypatch.setattr(json_routes, "_validated", noting)
    served = serve()
    for path, body, field in REQUESTS:
        for size in (10, 5000, 20_000, 100_000):
            post(served.app, body | {field: " " * size}, path=path)
            assert (threads.pop() == threading.get_ident()) == (size < 2**14)


def test_many_bad_words_are_tokenized_off_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noting(words: list[str], tokenizer: object) -> tuple[tuple[int, ...], ...]:
        threads.append(threading.get_ident())
        return ()

    monkeypatch.setattr(service, "bad_word_ids", noting)
    served = serve()
    for path, body, _ in REQUESTS[:2]:
        for num_words in (0, 10, 100):
            post(served.app, body | {"bad_words": ["x"] * num_words}, path=path)
            assert (threads.pop() == threading.get_ident()) == (num_words < 50)


def test_a_stored_conversation_is_read_off_the_event_loop_and_counted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            if name == "validate_json":
                threads.append(-1)
                return self._validate_json
            return getattr(items, name)

        def _validate_json(self, sent: bytes) -> Any:
            threads[-1] = threading.get_ident()
            return items.validate_json(sent)

    items = stored_responses._ITEMS
    monkeypatch.setattr(stored_responses, "_ITEMS", Noting())
    served = serve(max_bodies_bytes=2**20)
    thoughts = {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}] * 500}
    first = post(served.app, {"input": [*SAID, thoughts, *SAID]}, path="/v1/responses").json()
    again = {"input": "Hi", "previous_response_id": first["id"]}
    assert post(served.app, again, path="/v1/responses").status == 200
    assert threads
    assert threading.get_ident() not in threads
    # As if the whole had been sent.
    reply = post(served.app, again | {"input": [thoughts, *SAID]}, path="/v1/responses")
    assert reply.status == 413
