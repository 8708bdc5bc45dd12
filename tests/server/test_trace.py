"""A trace shows for each step of an answer what was drafted, and what became of it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgi import post
from scripted_client import steps
from served import Served
from tiny_server import serving

from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
COMPLETION = {"prompt": "Hi", "speculation": {"trace": True}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "speculation": {"trace": True}}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)


def play(request: Any) -> Any:
    return steps(request, [70, 71, 72, 73, 74, 75, 76, 77, 78], sizes=(3, 1, 5), num_drafts=4)


def ids(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["token_id"] for entry in entries]


def trace_of(served: Served, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
    return list(post(served.app, body, path=path).json()["choices"][0]["trace"])


@BOTH
def test_each_step_returns_its_drafts_and_the_kind_of_each_token(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    first, second, third = trace_of(serve(play), body, path)
    assert [first["step"], second["step"], third["step"]] == [1, 2, 3]
    assert first["source"] == "draft_model"
    assert ids(first["drafts"]) == [70, 71, 73, 73]
    assert first["num_accepted"] == 2
    assert ids(first["tokens"]) == [70, 71, 72]
    assert [t["kind"] for t in first["tokens"]] == ["accepted", "accepted", "recovered"]
    assert [t["kind"] for t in second["tokens"]] == ["recovered"]
    assert [t["kind"] for t in third["tokens"]] == ["accepted"] * 4 + ["bonus"]


@BOTH
def test_a_stream_returns_the_same_step_by_step(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    served = serve(play)
    chunks = post(served.app, body | {"stream": True}, path=path).chunks
    streamed = [step for chunk in chunks for step in chunk["choices"][0].get("trace", ())]
    assert streamed == trace_of(served, body, path)
    if path == "/v1/completions":
        assert [len(chunk["choices"][0]["trace"]) for chunk in chunks] == [1, 1, 1]


RESPONSE = {"input": "Hi", "speculation": {"trace": True, "metrics": True}}
MESSAGE = CHAT | {"max_tokens": 9, "speculation": {"trace": True, "metrics": True}}


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_responses_and_messages_return_what_chats_return(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    served = serve(play)
    chat = CHAT | {"speculation": {"trace": True, "metrics": True}, "seed": 1}
    expected = post(served.app, chat, path="/v1/chat/completions").json()
    whole = post(served.app, body, path=path).json()
    assert whole["trace"] == expected["choices"][0]["trace"]
    assert whole["metrics"] == expected["metrics"]
    reply = post(served.app, body | {"stream": True}, path=path)
    events = [json.loads(event.rpartition("data: ")[2]) for event in reply.events]
    traces = [event["trace"] for event in events if "trace" in event]
    assert [step for trace in traces for step in trace] == whole["trace"]
    assert len(traces) > 2  # as the steps came, not all at the end
    reported = [event.get("response", event).get("metrics") for event in events]
    assert [metrics for metrics in reported if metrics is not None] == [whole["metrics"]]
    unasked = body | {"speculation": {}}
    assert not {"trace", "metrics"} & post(served.app, unasked, path=path).json().keys()
    assert '"trace"' not in post(served.app, unasked | {"stream": True}, path=path).body.decode()


def test_tokens_have_their_texts(serve: Serve, tokenizer: Tokenizer) -> None:
    given = tokenizer.encode(" 🙂", add_special_tokens=False)
    served = serve(lambda request: steps(request, given))
    trace = trace_of(served, COMPLETION, "/v1/completions")
    tokens = [token for step in trace for token in step["tokens"]]
    assert "".join(token["text"] for token in tokens) == " 🙂"
    assert any(token["text"] == "" for token in tokens)  # part of a character
    assert any("\N{REPLACEMENT CHARACTER}" in token["token"] for token in tokens)
    as_ids = trace_of(served, COMPLETION | {"return_tokens_as_token_ids": True}, "/v1/completions")
    assert as_ids[0]["tokens"][0]["token"] == f"token_id:{given[0]}"


def test_without_drafts_tokens_are_plain_and_have_no_source(serve: Serve) -> None:
    trace = trace_of(serve(), COMPLETION, "/v1/completions")
    assert {step["source"] for step in trace} == {None}
    assert {token["kind"] for step in trace for token in step["tokens"]} == {"plain"}


def test_tokens_behind_a_stop_string_are_left_out(serve: Serve, tokenizer: Tokenizer) -> None:
    given = tokenizer.encode("abcdefg", add_special_tokens=False)
    served = serve(lambda request: steps(request, given, sizes=(len(given),), num_drafts=8))
    body = COMPLETION | {"stop": "b", "max_tokens": 20}
    (step,) = trace_of(served, body, "/v1/completions")
    assert "".join(token["token"] for token in step["tokens"]).endswith("b")
    assert step["num_accepted"] == len(given) - 1
    assert {token["kind"] for token in step["tokens"]} == {"accepted"}


def test_nothing_is_returned_unasked(serve: Serve) -> None:
    served = serve(play)
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        choice = post(served.app, body | {"speculation": {}}, path=path).json()["choices"][0]
        assert "trace" not in choice
    assert not any(new.returns_drafts for each in served.client.submitted for new in each)


def test_each_of_several_samples_has_its_own(serve: Serve) -> None:
    def by_index(request: Any) -> Any:
        first = 70 + int(request.request_id[-1])
        return steps(request, [first] * 3, sizes=(3,), num_drafts=3)

    choices = post(serve(by_index).app, COMPLETION | {"n": 2}).json()["choices"]
    assert [ids(choice["trace"][0]["drafts"]) for choice in choices] == [[70, 70, 71], [71, 71, 72]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_traces_of_a_real_engine_add_up(
    pair: tuple[Path, Path], tokenizer: Tokenizer, temperature: float
) -> None:
    body = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": temperature}
    body |= {"seed": 3, "speculation": {"trace": True, "metrics": True}}

    async def run() -> Any:
        async with serving((pair[0], pair[0]), tokenizer, k=3) as (http, _):
            return (await http.post("/completions", json=body)).json()

    answer = asyncio.run(run())
    trace = answer["choices"][0]["trace"]
    metrics = answer["metrics"]["speculative_decoding"]
    assert sum(len(step["drafts"]) for step in trace) == metrics["num_draft_tokens"]
    assert sum(step["num_accepted"] for step in trace) == metrics["num_accepted_draft_tokens"] > 0
    assert sum(len(step["tokens"]) for step in trace) == answer["usage"]["completion_tokens"]
    for step in trace:
        accepted = step["num_accepted"]
        assert ids(step["drafts"])[:accepted] == ids(step["tokens"])[:accepted]


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, None), ([], ()), (["ngram", "head"], ("suffix", "draft_model")), (["x"], ("x",))],
)
def test_sources_of_drafts_reach_the_engine_which_knows_what_is_there(
    serve: Serve, given: list[str] | None, named: tuple[str, ...] | None
) -> None:
    served = serve()
    assert post(served.app, {"prompt": "Hi", "speculation": {"sources": given}}).status == 200
    [[request]] = served.client.submitted
    assert request.sources == named
