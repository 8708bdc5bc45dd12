"""What one request may need: no product of its fields is without a bound."""

import asyncio
import gc
import re
import time
import tracemalloc
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
from asgi import post, start_post
from scripted_client import steps
from served import Served

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.api import service
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
MB = 2**20
LONG = [70] * 900
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": LONG, "n": 16, "prompt_logprobs": 20}, ["n", "prompt_logprobs"]),
        ({"prompt": [LONG] * 16, "prompt_logprobs": 20}, ["prompt_logprobs"]),
        ({"prompt": LONG, "n": 4, "best_of": 16, "prompt_logprobs": 20}, ["best_of"]),
        ({"prompt": [LONG] * 16, "echo": True, "logprobs": 20}, ["logprobs"]),
        ({"prompt": "Hi", "n": 16, "max_tokens": 900, "logprobs": 20}, ["logprobs", "max_tokens"]),
        ({"prompt": [LONG] * 100, "echo": True, "n": 1}, ["prompt"]),
        ({"prompt": "Hi", "n": 100, "max_tokens": 900}, ["n", "max_tokens"]),
        ({"prompt": "Hi", "n": 100, "allowed_token_ids": [5] * 5000}, ["allowed_token_ids"]),
        ({"prompt": "Hi", "n": 100, "logit_bias": {str(i): 1 for i in range(9)}}, []),
        (
            {
                "prompt": "Hi",
                "n": 100,
                "logits_processors": [{"name": "any", "args": {"x": [[]] * 2000}}],
            },
            ["logits_processors"],
        ),
        (CHAT | {"n": 2, "logprobs": True, "top_logprobs": 20}, ["max_completion_tokens"]),
        (CHAT | {"n": 2, "logprobs": True, "top_logprobs": 20}, ["top_logprobs"]),
        (CHAT | {"n": 100}, ["n", "max_completion_tokens"]),
        (CHAT | {"n": 8, "speculation": {"trace": True}}, ["speculation.trace"]),
        (
            {"messages": [{"role": "user", "content": "x" * 900}]}
            | {"n": 16, "prompt_logprobs": 20, "max_tokens": 1},
            ["prompt_logprobs"],
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_could_fill_the_memory_is_refused_before_it_runs(
    serve: Serve, body: dict[str, Any], named: list[str], stream: bool
) -> None:
    if stream and {"prompt_logprobs", "best_of"} & body.keys():
        return  # neither is streamed at all
    served = serve(max_answer_bytes=10 * MB)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = post(served.app, body | {"stream": stream}, path=path)
    if not named:
        assert reply.status == 200
        return
    assert reply.status == 400
    assert "server.max_answer_bytes" in reply.error["message"]
    lower = reply.error["message"].partition(" Lower ")[2].rstrip(".").split(", ")
    assert set(named) <= set(lower)
    assert reply.error["param"] == lower[0]
    known = {"messages", "max_completion_tokens", "prompt", "speculation.trace", *body}
    assert {"messages", *lower} <= known
    assert not served.client.submitted


def test_the_largest_request_of_the_defaults_is_refused(serve: Serve) -> None:
    served = serve()
    body = {"prompt": LONG, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}
    assert post(served.app, body).error["param"] == "n"
    assert post(served.app, body | {"n": 1}).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG, "max_tokens": 1, "n": 2, "prompt_logprobs": 0},
        {"prompt": LONG[:300], "max_tokens": 1, "n": 2, "prompt_logprobs": 20},
        {"prompt": LONG, "max_tokens": 1, "n": 2, "echo": True, "logprobs": 0},
        {"prompt": LONG[:300], "max_tokens": 1, "echo": True, "logprobs": 20}
        | {"prompt_logprobs": 20},
        {"prompt": "Hi", "max_tokens": 300, "n": 16, "return_token_ids": True},
        {"prompt": "Hi", "max_tokens": 300, "n": 2, "logprobs": 20},
        CHAT | {"max_tokens": 300, "n": 2, "logprobs": True, "top_logprobs": 20},
        CHAT | {"max_tokens": 300, "n": 4, "logprobs": True},
        {"prompt": "Hi", "max_tokens": 300, "n": 4, "speculation": {"trace": True}},
    ],
)
def test_an_answer_takes_no_more_than_it_was_estimated_to_take(
    tokenizer: Tokenizer, body: dict[str, Any]
) -> None:
    def play(request: NewRequest) -> list[RequestOutput]:
        ids = [70 + i % 50 for i in range(request.params.max_tokens)]
        size = 1 if request.returns_drafts else 4  # whichever takes more
        return steps(request, ids, sizes=repeat(size), num_drafts=4)

    def ask(served: Served) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return post(served.app, body, path=path).json()

    refusing = Served(play, tokenizer, max_answer_bytes=MB)
    found = re.search(r"may need ([\d,]+) bytes", ask(refusing)["error"]["message"])
    assert found
    served = Served(play, tokenizer)
    ask(served)  # what is kept for all requests is there now
    gc.collect()
    tracemalloc.start()
    try:
        assert "choices" in ask(served)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < int(found[1].replace(",", ""))


def test_a_long_answer_is_put_together_without_copying_it_at_each_step(
    tokenizer: Tokenizer,
) -> None:
    num_tokens = 900
    copied = 0

    class Counting(list[Any]):
        def __add__(self, other: Any) -> Any:
            nonlocal copied
            copied += len(self)
            return Counting([*self, *other])

    def play(request: NewRequest) -> list[RequestOutput]:
        return steps(request, [70] * num_tokens)

    import outrider.server.api.generation as generation

    taken = generation.Sample._delta

    def delta(self: Any, *args: Any) -> Any:
        made = taken(self, *args)
        if made is not None:
            object.__setattr__(made, "tokens", Counting(made.tokens))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation.Sample, "_delta", delta)
        reply = post(
            Served(play, tokenizer).app,
            {"prompt": "Hi", "max_tokens": num_tokens, "return_token_ids": True},
        )
    assert len(reply.json()["choices"][0]["token_ids"]) == num_tokens
    assert copied < 4 * num_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": [1] * 1000}},
        {"logit_bias": {f"x{i}": 1 for i in range(1000)}},
        {"logit_bias": {str(i): "" for i in range(1000)}},
        {"speculation": {f"x{i}": 1 for i in range(1000)}},
        {"structured_outputs": {f"x{i}": 1 for i in range(1000)}},
        {"logits_processors": [{"name": "x"} | {f"x{i}": 1 for i in range(1000)}]},
    ],
)
def test_a_thousand_wrong_items_are_one_error(serve: Serve, body: dict[str, Any]) -> None:
    reply = post(serve().app, {"prompt": "Hi"} | body)
    assert reply.status == 400
    assert reply.error["param"] in body
    assert "more problems" not in reply.error["message"]
    assert ";" not in reply.error["message"].replace("_type; given", "")


def test_messages_beyond_the_context_are_refused_before_the_template_runs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    rendered = []
    monkeypatch.setattr(
        type(served.tokenizer.chat_template), "render", lambda *_, **__: rendered.append(1)
    )
    body = {"messages": [{"role": "user", "content": ""}] * 1001}
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = post(served.app, body, path=path)
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "1001 messages" in reply.error["message"]
    assert not rendered


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, param: str
) -> None:
    served = serve()
    longest = max(map(len, served.tokenizer.backend.get_vocab()))
    text = "x" * (1001 * longest)
    body: dict[str, Any] = {"prompt": text}
    if param == "messages":
        body = {"messages": [{"role": "user", "content": text}]}
    path = "/v1/completions" if param == "prompt" else "/v1/chat/completions"
    encoded: list[str] = []
    encode = served.tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(served.tokenizer, "encode", counting)
    reply = post(served.app, body, path=path)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == param
    assert "However, you requested at least 100" in reply.error["message"]
    assert not encoded
    # Unless only its end is wanted.
    assert post(served.app, body | {"truncate_prompt_tokens": 9}, path=path).status == 200


def test_tools_have_a_most(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    reply = post(serve().app, CHAT | {"tools": [tool] * 1025}, path="/v1/chat/completions")
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_large_texts_are_tokenized_one_after_the_other(serve: Serve) -> None:
    served = serve()
    at_once, most = 0, 0
    encode = served.tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            time.sleep(0.02)  # long enough for the others to come, if they may
            return encode(text[:100], **options)
        finally:
            at_once -= 1

    async def run() -> None:
        body = {"prompt": "x" * 300_000}
        calls = [start_post(served.app, body, path="/tokenize") for _ in range(4)]
        await asyncio.gather(*(call.finished for call in calls))
        assert [call.reply.status for call in calls] == [200] * 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.tokenizer, "encode", counting)
        asyncio.run(run())
    assert most == 1


def test_memory_that_a_large_text_took_is_given_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(service, "give_memory_back", lambda: given_back.append(1))
    for num_chars, times in ((100, 0), (10_000, 0), (300_000, 1), (300_000, 2)):
        assert post(serve().app, {"prompt": "x" * num_chars}, path="/tokenize").status == 200
        assert len(given_back) == times
