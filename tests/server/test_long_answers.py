"""Answers with many logprobs, which take long to write."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from asgi import Reply, post
from scripted_client import steps
from served import Served

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.api import choices
from outrider.server.api.generation import Delta
from outrider.server.api.protocol import APIResponse

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
    serve: Serve, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    def told() -> Any:
        reply = ask(serve, body)
        answers = reply.chunks if "stream" in body else [reply.json()]
        return [{k: v for k, v in each.items() if k not in ("id", "created")} for each in answers]

    off_the_loop = told()
    monkeypatch.setattr(choices, "INLINE_LOGPROBS", 10**9)
    assert told() == off_the_loop
