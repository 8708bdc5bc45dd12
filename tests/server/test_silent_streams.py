"""No stream is silent while its prompt waits or is computed."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from asgi import start_post
from scripted_client import saying, steps
from served import Served
from socket_server import on_a_socket

from outrider.server.base import streaming
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

HI = [{"role": "user", "content": "Hi"}]
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
APIS: list[tuple[str, dict[str, Any], bytes]] = [
    ("/v1/completions", {"prompt": "Hi"}, streaming.COMMENT.encode()),
    ("/v1/chat/completions", {"messages": HI}, streaming.COMMENT.encode()),
    ("/v1/responses", {"input": "Hi"}, streaming.COMMENT.encode()),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}, PING),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert streaming.SILENCE_S <= 10  # as agents and proxies need it
    monkeypatch.setattr(streaming, "SILENCE_S", 0.01)


def while_waiting(served: Served, path: str, body: Any, sign: bytes) -> tuple[bytes, bytes]:
    """What a stream sends up to its third sign, with no token yet, and what it sends after that."""

    async def run() -> tuple[bytes, bytes]:
        computed = asyncio.Event()
        served.client.play = lambda request: [computed, *steps(request, [70, 71, 72])]
        call = start_post(served.app, body | {"stream": True}, path=path)
        async with asyncio.timeout(5):
            while call.reply.body.count(sign) < 3:
                await asyncio.sleep(0.005)
            before = call.reply.body
            computed.set()
            await call.finished
        return before, call.reply.body.removeprefix(before)

    return asyncio.run(run())


@pytest.mark.parametrize(("path", "body", "sign"), APIS)
def test_every_api_has_its_sign_of_life(
    serve: Serve, path: str, body: dict[str, Any], sign: bytes
) -> None:
    before, after = while_waiting(serve(), path, body, sign)
    assert before.endswith(sign)
    assert after.startswith((b"data: ", b"event: ", b":"))
    assert b'"error":{' not in after


def test_ollamas_sign_is_a_line_that_adds_nothing(serve: Serve) -> None:
    before, after = while_waiting(serve(), "/api/chat", {"messages": HI}, b"\n")
    signs = [json.loads(line) for line in before.splitlines()]
    assert [sign["message"]["content"] for sign in signs] == [""] * len(signs)
    assert not any(sign["done"] for sign in signs)
    assert json.loads(after.splitlines()[-1])["done"]


def events(sent: bytes) -> Iterator[dict[str, Any]]:
    for line in sent.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_message_starts_at_once_with_the_tokens_of_its_prompt(serve: Serve) -> None:
    served = serve()
    before, after = while_waiting(served, *APIS[3])
    start, *pings = events(before)
    assert start["type"] == "message_start"
    assert {ping["type"] for ping in pings} == {"ping"}
    prompt = served.client.submitted[0][0].prompt_token_ids
    assert start["message"]["usage"]["input_tokens"] == len(prompt)
    assert "message_start" not in [event["type"] for event in events(after)]


def test_every_choice_of_a_chat_has_its_role_at_once(serve: Serve) -> None:
    path, body, sign = APIS[1]
    before, after = while_waiting(serve(), path, body | {"n": 2}, sign)
    choices = [choice for chunk in events(before) for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (i, {"role": "assistant", "content": ""}) for i in range(2)
    ]
    later = [choice["delta"] for chunk in events(after) for choice in chunk["choices"]]
    assert not any("role" in delta for delta in later)


def test_clients_pass_over_the_signs(serve: Serve, tokenizer: Tokenizer) -> None:
    import anthropic  # takes seconds, which no other worker need spend

    served = serve()
    hello = saying(tokenizer, " Hello", finish="stop")

    def play(request: Any) -> Any:
        slow = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, slow.set)
        return [slow, *hello(request)]

    served.client.play = play
    with on_a_socket(served) as url:
        ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chat: Any = {"model": "test-model", "messages": HI}
        with ours.chat.completions.stream(**chat) as stream:
            assert stream.get_final_completion().choices[0].message.content == " Hello"
        with ours.responses.stream(model="test-model", input="Hi") as answer:
            assert answer.get_final_response().output_text == " Hello"
        theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with theirs.messages.stream(**chat, max_tokens=9) as message:
            assert message.get_final_text() == " Hello"
