"""What a client predicts of an answer: taken in, drafted, and reported in the usage."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgi import post
from served import Served
from tiny_server import serving

from outrider.engine.api import RequestOutput
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
WORDS = " the lazy dog jumps over the quick brown fox"


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", CHAT), ("completions", {"prompt": "The fox"})]
)
def test_a_predicted_answer_takes_fewer_steps(
    pair: tuple[Path, Path], tokenizer: Tokenizer, path: str, prompt: dict[str, Any], in_parts: bool
) -> None:
    body = prompt | {
        "allowed_token_ids": tokenizer.encode(WORDS, add_special_tokens=False),
        "temperature": 0,
        "max_tokens": 32,
        "speculation": {"trace": True},
    }

    async def run() -> list[Any]:
        async with serving(pair, tokenizer, k=3) as (http, _):
            plain = (await http.post(f"/{path}", json=body)).json()
            text = text_of(plain)
            content = [{"type": "text", "text": text}] if in_parts else text
            predicting = body | {"prediction": {"type": "content", "content": content}}
            return [plain, (await http.post(f"/{path}", json=predicting)).json()]

    plain, predicted = asyncio.run(run())
    assert text_of(predicted) == text_of(plain)
    details = predicted["usage"]["completion_tokens_details"]
    steps = predicted["choices"][0]["trace"]
    mine = [step for step in steps if step["source"] == "prediction"]
    assert details["accepted_prediction_tokens"] == sum(step["num_accepted"] for step in mine) > 3
    assert details["rejected_prediction_tokens"] == sum(
        len(step["drafts"]) - step["num_accepted"] for step in mine
    )
    assert len(steps) < len(plain["choices"][0]["trace"])
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def asked(serve: Serve, prediction: object) -> tuple[list[int], Any]:
    """The tokens that the engine is given, and the answer."""
    received: list[int] = []

    def play(request: Any) -> list[RequestOutput]:
        received.extend(request.predicted_token_ids)
        return [RequestOutput(request_id=request.request_id, token_ids=[5], finish_reason="length")]

    body = CHAT | {"prediction": prediction}
    return received, post(serve(play).app, body, path="/v1/chat/completions")


def test_a_prediction_is_cut_to_the_context(serve: Serve) -> None:
    received, reply = asked(serve, {"type": "content", "content": "long " * 300_000})
    assert reply.status == 200
    assert len(received) == 1000  # all that fits into the scripted engine's context


@pytest.mark.parametrize(
    "prediction",
    [
        "Hello",
        {"content": "Hello"},
        {"type": "text", "content": "Hello"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image_url"}]},
    ],
)
def test_a_bad_prediction_is_refused(serve: Serve, prediction: object) -> None:
    received, reply = asked(serve, prediction)
    assert (reply.status, received) == (400, [])
    assert reply.json()["error"]["param"] == "prediction"


def test_null_predicts_nothing(serve: Serve) -> None:
    received, reply = asked(serve, None)
    assert (reply.status, received) == (200, [])
    assert reply.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
