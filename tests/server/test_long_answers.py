"""Answers with many logprobs, which take long to write."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from asgi import Reply, post
from message_parts import without_ids
from scripted_client import steps
from served import Served

from outrider.engine.api import NewRequest, RequestOutput, SamplingParams
from outrider.engine.processes.client import EngineUnavailableError, OutputStream
from outrider.server.api import answer, choices, responses
from outrider.server.api.generation import TURN_OUTPUTS, Delta, Generation, Sample, TextOptions
from outrider.server.api.protocol import APIResponse
from outrider.server.api.responses_protocol import ResponseObject
from outrider.server.observe.metrics import Metrics
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

PROMPTS = [[5 + i % 50 for i in range(n)] for n in (70, 80)]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
LONG: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt": PROMPTS, "max_tokens": 0, "prompt_logprobs": 2},
    "echo": {"prompt": PROMPTS, "max_tokens": 1, "echo": True, "logprobs": 2},
    "streamed echo": {
        "prompt": PROMPTS,
        "max_tokens": 9,
        "echo": True,
        "logprobs": 2,
        "stream": True,
    },
    "logprobs": {"prompt": "Hi", "max_tokens": 90, "logprobs": 0, "n": 2},
    "many choices": {"prompt": "Hi", "max_tokens": 2, "logprobs": 2, "n": 50},
    "best": {"prompt": "Hi", "max_tokens": 90, "logprobs": 2, "n": 1, "best_of": 2},
    "chat": CHAT | {"max_tokens": 90, "n": 2},
    "prompt logprobs of a chat": CHAT | {"max_tokens": 90, "prompt_logprobs": 1},
    "trace": {"prompt": "Hi", "max_tokens": 90, "speculation": {"trace": True}},
}


def counting(request: NewRequest) -> list[RequestOutput]:
    seed = request.params.seed or 0
    ids = [70 + (seed + i) % 30 for i in range(max(1, request.params.max_tokens))]
    return steps(request, ids, num_drafts=2)


def ask(serve: Serve, body: dict[str, Any]) -> Reply:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = post(serve(counting).app, {"seed": 1} | body, path=path)
    assert reply.status == 200
    return reply


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which choices are written, in their order."""
    found: list[int] = []
    write = choices.ChoicesAnswer._next_choices

    def noting(self: choices.ChoicesAnswer, delta: Delta) -> Sequence[APIResponse]:
        found.append(threading.get_ident())
        return write(self, delta)

    monkeypatch.setattr(choices.ChoicesAnswer, "_next_choices", noting)
    return found


@pytest.mark.parametrize("body", LONG.values(), ids=LONG.keys())
def test_many_logprobs_are_written_off_the_event_loop(
    serve: Serve, threads: list[int], body: dict[str, Any]
) -> None:
    ask(serve, body)
    num_long = 2 if "stream" in body else len(threads)  # of a stream, only the prompts
    assert threads.count(threading.get_ident()) == len(threads) - num_long


@pytest.mark.parametrize("body", [{"prompt": "Hi", "logprobs": 2}, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_few_logprobs_are_written_on_the_event_loop(
    serve: Serve, threads: list[int], body: dict[str, Any], stream: bool
) -> None:
    ask(serve, body | {"max_tokens": 9, "stream": stream})
    assert set(threads) == {threading.get_ident()}


def test_a_long_text_alone_is_written_on_the_event_loop(serve: Serve, threads: list[int]) -> None:
    ask(serve, {"prompt": "Hi", "max_tokens": 500})
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("body", LONG.values(), ids=LONG.keys())
def test_an_answer_is_the_same_wherever_it_is_written(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, threads: list[int], body: dict[str, Any]
) -> None:
    def answered() -> Any:
        reply = ask(serve, body)
        answers = reply.chunks if "stream" in body else [reply.json()]
        return [{k: v for k, v in each.items() if k not in ("id", "created")} for each in answers]

    off_the_loop = answered()
    assert set(threads) != {threading.get_ident()}
    threads.clear()
    monkeypatch.setattr(answer, "INLINE_LOGPROBS", 10**9)
    assert answered() == off_the_loop
    assert set(threads) == {threading.get_ident()}


# ---- responses

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
LONG_RESPONSES: dict[str, dict[str, Any]] = {
    "logprobs": LOGPROBS,
    "logprobs that are not kept": LOGPROBS | {"store": False},
    "trace": {"speculation": {"trace": True}},
}


def respond(serve: Serve, body: dict[str, Any], num_tokens: int = 90) -> Reply:
    body = {"input": "Hi", "seed": 1, "max_output_tokens": num_tokens} | body
    reply = post(serve(counting).app, body, path="/v1/responses")
    assert reply.status == 200
    return reply


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, bool]]:
    """What is written: the event's name, or None; and whether in this thread."""
    found: list[tuple[str | None, bool]] = []
    own = threading.get_ident()

    def note(owner: Any, name: str) -> None:
        write = getattr(owner, name)

        def noting(value: Any, event: str | None = None, **how: Any) -> Any:
            found.append((event, threading.get_ident() == own))
            return write(value, event, **how) if event else write(value, **how)

        monkeypatch.setattr(owner, name, noting)

    note(responses, "server_sent")
    note(ResponseObject, "to_json")
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", LONG_RESPONSES.values(), ids=LONG_RESPONSES.keys())
def test_long_responses_are_written_off_the_event_loop(
    serve: Serve, written: list[tuple[str | None, bool]], body: dict[str, Any], stream: bool
) -> None:
    respond(serve, body | {"stream": stream})
    growing = ("created", "in_progress", "added", "delta")
    assert written
    num_empty = 4 if stream else 0  # the first events have a response without output
    for event, on_the_loop in written[num_empty:]:
        assert on_the_loop == (event or "").endswith(growing), event


def test_a_long_response_that_failed_is_written_off_the_event_loop(
    serve: Serve, tokenizer: Tokenizer, written: list[tuple[str | None, bool]]
) -> None:
    # The call completes the text before it: a failed response has complete items alone.
    said = "word " * 90 + '<tool_call>{"name": "f", "arguments": {'

    def play(request: NewRequest) -> list[Any]:
        ids = tokenizer.encode(said, add_special_tokens=False)
        return [*steps(request, ids)[:-1], EngineUnavailableError("it died")]

    tool = {"type": "function", "name": "f", "parameters": {}}
    body = LOGPROBS | {"input": "Hi", "tools": [tool], "stream": True}
    post(serve(play, tool_call_format="hermes").app, body, path="/v1/responses")
    assert written[-2:] == [(None, False), ("response.failed", False)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "num_tokens"), [(LOGPROBS, 9), ({}, 500)])
def test_other_responses_are_written_on_the_event_loop(
    serve: Serve,
    written: list[tuple[str | None, bool]],
    body: dict[str, Any],
    num_tokens: int,
    stream: bool,
) -> None:
    respond(serve, body | {"stream": stream}, num_tokens)
    assert {on_the_loop for _, on_the_loop in written} == {True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", LONG_RESPONSES.values(), ids=LONG_RESPONSES.keys())
def test_a_response_is_the_same_wherever_it_is_written(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    written: list[tuple[str | None, bool]],
    body: dict[str, Any],
    stream: bool,
) -> None:
    def answered() -> Any:
        reply = respond(serve, body | {"stream": stream})
        return without_ids(reply.named_events if stream else reply.json())

    off_the_loop = answered()
    assert not all(on_the_loop for _, on_the_loop in written)
    written.clear()
    monkeypatch.setattr(answer, "INLINE_LOGPROBS", 10**9)
    assert answered() == off_the_loop
    assert all(on_the_loop for _, on_the_loop in written)


def test_reading_what_has_come_already_gives_others_a_turn(serve: Serve) -> None:
    served = serve()

    async def turns() -> int:
        outputs = OutputStream(lambda _: None, ["a"])
        for _ in range(640):
            outputs.put(RequestOutput(request_id="a", token_ids=[70]))
        outputs.put(RequestOutput(request_id="a", token_ids=[70], finish_reason="length"))
        params = SamplingParams(max_tokens=641)
        request = NewRequest(request_id="a", prompt_token_ids=[5], params=params)
        sample = Sample(0, request, served.tokenizer, TextOptions())
        client: Any = served.client
        metrics = Metrics(client, "test")
        generation = Generation(client, outputs, [sample], metrics, start_s=0, timeout_s=0)
        num_turns, loop = 0, asyncio.get_running_loop()

        def turn() -> None:
            nonlocal num_turns
            num_turns += 1
            loop.call_soon(turn)

        turn()
        async for _ in generation:
            pass
        return num_turns

    assert asyncio.run(turns()) > 640 / TURN_OUTPUTS / 2
