"""Responses in the background: they go on without their client, until they end or are cancelled."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest
from asgi import Call, Reply, start_post
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.api import NewRequest
from outrider.engine.processes.client import EngineUnavailableError, QueueFullError
from outrider.server.api.answer import Answer

Serve = Callable[..., Served]

ASK = {"input": "Hi", "background": True}
FINAL = ("completed", "incomplete", "failed", "cancelled")


class Script:
    """A few tokens, the first of them once `begun` is set and the others once `goes_on` is."""

    def __init__(self, end: Any = None) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self._end = end

    def __call__(self, request: NewRequest) -> Iterator[Any]:
        first, *rest = steps(request, [70, 71, 0], finish="stop")
        yield self.begun
        yield first
        yield self.goes_on
        yield from [self._end] if self._end else rest


class Client:
    """Asks an application, all within one event loop."""

    def __init__(self, served: Served, headers: dict[str, str] | None = None) -> None:
        self.served, self.headers = served, headers or {}

    async def post(self, path: str = "/v1/responses", **fields: Any) -> Reply:
        call = start_post(self.served.app, fields, self.headers, path=path)
        await call.finished
        return call.reply

    async def ask(self, method: str, path: str, query: str = "") -> Reply:
        call = Call(self.served.app, method, path, [b""], self.headers, query)
        await call.finished
        return call.reply

    async def until(self, response_id: str, *statuses: str) -> Any:
        """The response once it has one of these states."""
        async with asyncio.timeout(5):
            while True:
                answered = (await self.ask("GET", f"/v1/responses/{response_id}")).json()
                if answered["status"] in statuses:
                    return answered
                await asyncio.sleep(0.001)


def in_one_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(serve: Serve) -> None:
        asyncio.run(test(serve))  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@in_one_loop
async def test_a_response_in_the_background_is_asked_for_until_it_is_done(serve: Serve) -> None:
    script = Script()
    client = Client(serve(script))
    first = (await client.post(**ASK, metadata={"a": "b"})).json()
    assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
    path = f"/v1/responses/{first['id']}"
    assert (await client.ask("GET", path)).json() == first
    script.begun.set()
    assert (await client.until(first["id"], "in_progress"))["metadata"] == {"a": "b"}
    script.goes_on.set()
    last = await client.until(first["id"], *FINAL)
    assert (last["status"], last["background"], last["id"]) == ("completed", True, first["id"])
    assert last["output"][0]["content"][0]["text"]
    assert last["usage"]["output_tokens"] == 3
    assert last["created_at"] == first["created_at"]
    assert (await client.ask("GET", f"{path}/input_items")).json()["data"]
    # A conversation goes on from it as from any other.
    plain = await client.post(input="And?", previous_response_id=first["id"])
    assert plain.json()["status"] == "completed"


@in_one_loop
async def test_it_says_what_a_response_in_the_foreground_says(serve: Serve) -> None:
    script = Script()
    script.begun.set()
    script.goes_on.set()
    client = Client(serve(script))
    answered = [(await client.post(**ASK | {"background": b})).json() for b in (True, False)]
    answered[0] = await client.until(answered[0]["id"], *FINAL)
    assert (await client.ask("GET", f"/v1/responses/{answered[1]['id']}")).json() == answered[1]
    for each in answered:
        for name in ("id", "created_at", "completed_at", "background"):
            del each[name]
        del each["output"][0]["id"]
    assert answered[0] == answered[1]


@pytest.mark.parametrize("begun", [True, False])
def test_a_response_that_is_cancelled_frees_its_sequence_and_is_kept(
    serve: Serve, begun: bool
) -> None:
    async def run() -> None:
        script = Script()
        client = Client(serve(script))
        first = (await client.post(**ASK)).json()
        if begun:
            script.begun.set()
            await client.until(first["id"], "in_progress")
        path = f"/v1/responses/{first['id']}"
        reply = await client.ask("POST", f"{path}/cancel")
        assert (reply.status, reply.json()["status"]) == (200, "cancelled")
        assert client.served.client.aborted == [client.served.client.submitted[0][0].request_id]
        assert [item["status"] for item in reply.json()["output"]] == ["incomplete"] * begun
        # Again, and later, it is the same.
        for method, each in (("POST", f"{path}/cancel"), ("GET", path)):
            assert (await client.ask(method, each)).json() == reply.json()

    asyncio.run(run())


@pytest.mark.usefixtures("slow_writing")
@in_one_loop
async def test_who_cancels_at_the_same_time_gets_the_same(serve: Serve) -> None:
    client = Client(serve(Script()))
    path = f"/v1/responses/{(await client.post(**ASK)).json()['id']}"

    async def cancel(after_s: float) -> Reply:
        await asyncio.sleep(after_s)
        return await client.ask("POST", f"{path}/cancel")

    replies = await asyncio.gather(*map(cancel, (0, 0, 0.02)))
    assert [reply.status for reply in replies] == [200] * 3
    assert {reply.json()["status"] for reply in replies} == {"cancelled"}


@pytest.fixture
def slow_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an answer that lists many logprobs, which a thread writes."""

    async def written(self: Answer, num_logprobs: int, write: Any, *args: Any) -> Any:
        await asyncio.sleep(0.1)
        return write(*args)

    monkeypatch.setattr(Answer, "_written", written)


@in_one_loop
async def test_only_a_response_in_the_background_can_be_cancelled(serve: Serve) -> None:
    script = Script()
    script.begun.set()
    script.goes_on.set()
    client = Client(serve(script))
    plain = (await client.post(input="Hi")).json()
    reply = await client.ask("POST", f"/v1/responses/{plain['id']}/cancel")
    assert (reply.status, "background: true" in reply.error["message"]) == (400, True)
    assert (await client.ask("POST", "/v1/responses/resp_0/cancel")).status == 404
    done = (await client.post(**ASK)).json()
    last = await client.until(done["id"], "completed")
    assert (await client.ask("POST", f"/v1/responses/{done['id']}/cancel")).json() == last


@in_one_loop
async def test_what_needs_the_whole_of_it_waits(serve: Serve) -> None:
    client = Client(serve(Script()))
    first = (await client.post(**ASK)).json()
    path = f"/v1/responses/{first['id']}"
    for reply in (
        await client.post(input="And?", previous_response_id=first["id"]),
        await client.ask("GET", f"{path}/input_items"),
    ):
        assert (reply.status, reply.error["code"]) == (409, "response_in_progress")
    stream = await client.ask("GET", path, "stream=true")
    assert (stream.status, stream.error["param"]) == (400, "stream")
    # Deleted, it ends.
    assert (await client.ask("DELETE", path)).json()["deleted"] is True
    assert len(client.served.client.aborted) == 1
    assert (await client.ask("GET", path)).status == 404


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (EngineUnavailableError("the engine died"), "server_error", "the engine died"),
        (ZeroDivisionError("secret"), "server_error", "failed to answer"),
    ],
)
def test_a_failure_is_the_end_of_it(
    serve: Serve, failure: Exception, code: str, words: str
) -> None:
    async def run() -> None:
        script = Script(end=failure)
        client = Client(serve(script))
        first = (await client.post(**ASK)).json()
        script.begun.set()
        script.goes_on.set()
        last = await client.until(first["id"], *FINAL)
        assert (last["status"], last["error"]["code"]) == ("failed", code)
        assert words in last["error"]["message"]
        assert "secret" not in json.dumps(last)

    asyncio.run(run())


@in_one_loop
async def test_what_cannot_begin_is_refused_at_once(serve: Serve) -> None:
    client = Client(serve(Script()))
    client.served.client.refusal = QueueFullError("full")
    assert (await client.post(**ASK)).status == 429
    for settings in ({"response_store_bytes": 0}, {"api_workers": 2}):
        client = Client(serve(Script(), **settings))
        reply = await client.post(**ASK)
        assert (reply.status, reply.error["param"]) == (400, "background")
        assert "server.response_store_bytes" in reply.error["message"]


@in_one_loop
async def test_it_belongs_to_the_key_it_was_asked_with(serve: Serve) -> None:
    served = serve(Script(), api_keys=("a", "b"))
    own, other = (Client(served, {"authorization": f"Bearer {key}"}) for key in "ab")
    path = f"/v1/responses/{(await own.post(**ASK)).json()['id']}"
    for method, each in (("GET", path), ("POST", f"{path}/cancel"), ("DELETE", path)):
        assert (await other.ask(method, each)).status == 404
    assert (await own.ask("GET", path)).json()["status"] == "queued"
    assert (await own.ask("POST", f"{path}/cancel")).json()["status"] == "cancelled"


@in_one_loop
async def test_what_it_keeps_of_its_body_is_counted_until_it_is_done(serve: Serve) -> None:
    script = Script()
    client = Client(serve(script, max_bodies_bytes=6_000_000, max_body_bytes=400_000))
    tools = [
        {"type": "function", "name": f"f{i}", "parameters": {"type": "object"}} for i in range(900)
    ]
    replies = [await client.post(**ASK, tools=tools, tool_choice="none") for _ in range(9)]
    taken = [reply for reply in replies if reply.status == 200]
    assert 0 < len(taken) < 9
    assert {reply.status for reply in replies if reply not in taken} == {429}
    for reply in taken:
        await client.ask("POST", f"/v1/responses/{reply.json()['id']}/cancel")
    assert (await client.post(**ASK, tools=tools, tool_choice="none")).status == 200


def test_openais_client_polls_and_cancels(serve: Serve) -> None:
    def play(request: NewRequest) -> Iterator[Any]:
        outputs = steps(request, [70, 0], finish="stop")
        yield from outputs if request.params.max_tokens < 100 else [outputs[0], asyncio.Event()]

    with on_a_socket(serve(play)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request: Any = {"model": "test-model", "input": "Hi", "background": True}
        response = client.responses.create(**request, max_output_tokens=9)
        while response.status in ("queued", "in_progress"):
            response = client.responses.retrieve(response.id)
        assert (response.status, bool(response.output_text)) == ("completed", True)
        endless = client.responses.create(**request)
        assert client.responses.cancel(endless.id).status == "cancelled"
        assert client.responses.retrieve(endless.id).status == "cancelled"
