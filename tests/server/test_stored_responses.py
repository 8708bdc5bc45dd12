"""Responses that are kept: what goes on from them, and what is let go."""

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest
from asgi import Call, Reply, get, post
from response_requests import Serve, ask, events, prompts, saying
from served import Served

from outrider.server.text.tokenizer import Tokenizer


def said_of(response: dict[str, Any]) -> str:
    text: str = response["output"][-1]["content"][0]["text"]
    return text


def delete(served: Served, path: str, headers: dict[str, str] | None = None) -> Reply:
    async def run() -> Reply:
        call = Call(served.app, "DELETE", path, [b""], headers)
        await call.finished
        return call.reply

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_response_goes_on_from_an_earlier_one(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    served = saying(serve, tokenizer, "Hello", "Bye")
    reply = ask(served, instructions="Not carried over.", stream=stream)
    first = events(reply)[-1]["response"] if stream else reply.json()
    second = ask(served, input="And?", previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    post(served.app, {"messages": turns}, path="/v1/chat/completions")
    _, carried, whole = prompts(served)
    assert carried == whole
    assert get(served.app, f"/v1/responses/{second['id']}").json() == second
    items = get(served.app, f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["And?"]
    assert delete(served, f"/v1/responses/{first['id']}").json()["deleted"] is True
    assert get(served.app, f"/v1/responses/{first['id']}").status == 404
    third = ask(served, previous_response_id=first["id"])
    assert (third.status, third.error["param"]) == (400, "previous_response_id")
    # What goes on from it has the conversation itself.
    assert ask(served, input="So?", previous_response_id=second["id"]).status == 200
    turns += [{"role": "assistant", "content": said_of(second)}, {"role": "user", "content": "So?"}]
    post(served.app, {"messages": turns}, path="/v1/chat/completions")
    *_, carried, whole = prompts(served)
    assert carried == whole


def test_input_items_come_in_pages(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    items = [{"role": "user", "content": str(i), "id": f"msg_{i}"} for i in range(25)]
    path = f"/v1/responses/{ask(served, input=items).json()['id']}/input_items"

    def page(query: str = "") -> tuple[list[int], bool]:
        reported = get(served.app, f"{path}?{query}").json()
        ids = [item["id"] for item in reported["data"]]
        assert (reported["first_id"], reported["last_id"]) == (
            (ids[0], ids[-1]) if ids else (None, None)
        )
        return [int(each.removeprefix("msg_")) for each in ids], reported["has_more"]

    assert page() == ([*range(24, 4, -1)], True)
    assert page("after=msg_5") == ([4, 3, 2, 1, 0], False)
    assert page("order=asc&limit=2") == ([0, 1], True)
    assert page("order=asc&limit=2&after=msg_1") == ([2, 3], True)
    assert page("order=asc&limit=2&after=msg_22") == ([23, 24], False)
    assert page("after=msg_0") == ([], False)
    assert page("limit=100") == ([*range(24, -1, -1)], False)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_25"):
        reply = get(served.app, f"{path}?{query}")
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])


def test_input_items_show_what_the_assistant_said_as_output(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = saying(serve, tokenizer, "Hello")
    parts = [{"type": "output_text", "text": "Yes."}, {"type": "refusal", "refusal": "No."}]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes."},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "And?"},
    ]
    path = f"/v1/responses/{ask(served, input=turns).json()['id']}/input_items?order=asc"
    reported = [item["content"] for item in get(served.app, path).json()["data"]]
    said = {"type": "output_text", "text": "Yes.", "annotations": []}
    assert reported == [
        [{"type": "input_text", "text": "Hi"}],
        [said],
        [said, parts[1]],
        [{"type": "input_text", "text": "And?"}],
    ]


def test_nothing_is_kept_that_was_not_to_be(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    answer = ask(served, store=False).json()
    assert answer["store"] is False
    assert get(served.app, f"/v1/responses/{answer['id']}").status == 404
    for settings in ({"response_store_bytes": 0}, {"api_workers": 2}):
        served = saying(serve, tokenizer, "Hello", **settings)
        answer = ask(served).json()
        assert answer["store"] is False
        error = ask(served, previous_response_id=answer["id"]).error
        assert "server.response_store_bytes" in error["message"]


def test_those_used_least_are_let_go_first(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello", response_store_bytes=8_000)
    kept = [ask(served).json()["id"] for _ in range(2)]
    assert ask(served, previous_response_id=kept[0], store=False).status == 200
    kept.append(ask(served, input="x" * 900).json()["id"])
    statuses = [get(served.app, f"/v1/responses/{each}").status for each in kept]
    assert statuses == [200, 404, 200]
    large = ask(served, user="x" * 10_000).json()
    assert get(served.app, f"/v1/responses/{large['id']}").status == 404
    assert get(served.app, f"/v1/responses/{kept[0]}").status == 200


def test_what_is_kept_takes_no_more_memory_than_is_allowed(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    most = 1_000_000
    served = saying(serve, tokenizer, "Hello", response_store_bytes=most)
    item = {"role": "user", "content": "Hi", "note": [{}] * 50_000}
    tracemalloc.start()
    try:
        served.client.submitted.clear()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            answer = ask(served, input=[item]).json()
        served.client.submitted.clear()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert get(served.app, f"/v1/responses/{answer['id']}").json() == answer
    assert after - before < 2 * most


def test_conversation_that_is_larger_than_a_body_may_be_does_not_go_on(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = saying(serve, tokenizer, "Hello", max_body_bytes=4096)
    items = [{"role": "user", "content": "Hi", "note": "x" * 3000}]
    first = ask(served, input=items).json()
    second = ask(served, input=items, previous_response_id=first["id"]).json()
    assert second["status"] == "completed"
    reply = ask(served, previous_response_id=second["id"])
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    assert "server.max_body_bytes" in reply.error["message"]


def test_conversation_goes_on_without_the_logprobs_that_were_returned(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = saying(serve, tokenizer, "Hello " * 50, max_body_bytes=4096)
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    first = ask(served, **logprobs).json()
    assert get(served.app, f"/v1/responses/{first['id']}").json() == first
    assert ask(served, previous_response_id=first["id"]).status == 200


def test_response_belongs_to_the_key_it_was_asked_with(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello", api_keys=("a", "b"))
    own, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    path = f"/v1/responses/{ask(served, own).json()['id']}"
    assert get(served.app, path, other).status == delete(served, path, other).status == 404
    response_id = path.rpartition("/")[2]
    assert ask(served, other, previous_response_id=response_id).status == 400
    assert get(served.app, path, own).status == 200
