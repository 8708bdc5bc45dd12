"""The default pair behind a real socket, used as clients use it. In the end it is stopped."""

import asyncio
import json
import re
import signal
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from running_server import RunningServer, events_of, text_of

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(default_server: RunningServer) -> RunningServer:
    return default_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def model_of(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def test_openai_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=model_of(client), prompt=PROMPT, max_tokens=8, temperature=0
    )
    assert " Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_openai_client_streams_the_same_text(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> object:
        return client.completions.create(
            model=model_of(client),
            prompt=[PROMPT, "Once upon a time"],
            n=2,
            max_tokens=6,
            temperature=0.8,
            seed=7,
            stream=stream,
        )

    whole = ask(False)
    assert isinstance(whole, openai.types.Completion)
    texts = [""] * 4
    stream = ask(True)
    assert isinstance(stream, openai.Stream)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_openai_client_chats(client: openai.OpenAI, server: RunningServer) -> None:
    model = model_of(client)
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}
    ]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=12, temperature=0, logprobs=True
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert (
        b"".join(bytes(token.bytes or []) for token in tokens)
        .decode()
        .startswith(choice.message.content or "")
    )
    # The same as a completion of what the chat template makes of the messages.
    prompt = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    completion = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    assert completion.choices[0].text == choice.message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


def test_openai_client_streams_the_same_chat(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> object:
        return client.chat.completions.create(
            model=model_of(client),
            messages=[
                {"role": "system", "content": "You write poems."},
                {"role": "user", "content": "Write one about the sea 🌊."},
            ],
            n=2,
            max_tokens=8,
            temperature=0.8,
            seed=7,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
        )

    whole = ask(False)
    assert isinstance(whole, ChatCompletion)
    texts, reasons, usage = ["", ""], ["", ""], None
    stream = ask(True)
    assert isinstance(stream, openai.Stream)
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[0-9]{1,2}\.[0-9] million"}, r"[0-9]{1,2}\.[0-9] million"),
        ({"choice": ["large", "small"]}, "large|small"),
        ({"grammar": 'root ::= "about " [0-9] [0-9]'}, "about [0-9]{2}"),
    ],
)
def test_completion_follows_what_is_asked(
    server: RunningServer, asked: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "The population of Paris is", "temperature": 1.5, "structured_outputs": asked}
    answer = server.http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"])


def test_tokens_travel_both_ways(server: RunningServer) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "naïve 🙂"}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "naïve 🙂"
    assert server.http.get("/ready").status_code == 200
    assert "<|im_start|>" in server.http.get("/tokenizer_info").json()["chat_template"]


def test_greedy_choice_is_the_most_likely_of_its_alternatives(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=model_of(client), prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own == max(top.values())
    assert "".join(logprobs.tokens or []) == answer.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_client_frees_its_pages(server: RunningServer, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "stream": stream, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(headers=server.http.headers) as http:
            request = http.build_request("POST", f"{server.url}/v1/completions", json=body)
            sending = asyncio.create_task(http.send(request, stream=True))
            await asyncio.to_thread(server.wait_for, "outrider_requests_running 1")
            if stream:
                await (await sending).aclose()
            else:
                sending.cancel()

    asyncio.run(leave())
    server.wait_for("outrider_requests_running 0")
    assert server.metric("outrider_pages_used") == 0


def test_flood_is_served_as_far_as_the_queue_goes(server: RunningServer) -> None:
    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = server.http.headers
        async with httpx.AsyncClient(limits=limits, timeout=120, headers=headers) as http:
            body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
            posts = [http.post(f"{server.url}/v1/completions", json=body) for _ in range(200)]
            return await asyncio.gather(*posts)

    replies = asyncio.run(flood())
    served = [reply for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(served) + len(refused) == 200
    assert len(served) >= 8  # as many as may wait
    assert refused
    assert all("retry-after" in reply.headers for reply in refused)
    assert len({reply.json()["choices"][0]["text"] for reply in served}) == 1
    server.wait_for("outrider_requests_running 0")


@pytest.mark.deep  # on tiny models in test_workers.py
def test_killed_engine_ends_its_streams_and_comes_back(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        events = events_of(response)
        next(events)
        server.engine.kill()
        *_, last = events
        assert "signal 9" in json.loads(last)["error"]["message"]
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    assert "signal 9" in health.json()["reason"]  # shown to a key alone
    assert httpx.get(server.http.base_url.join("/health")).json() == {"status": "restarting"}
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    server.wait_for("outrider_engine_ready 1", timeout_s=120)
    answer = server.http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 2})
    assert answer.status_code == 200


def test_sigterm_lets_a_request_finish_and_leaves_nothing(server: RunningServer) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    body = {"prompt": PROMPT, "max_tokens": 12, "stream": True, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        events = events_of(response)
        first = next(events)
        server.process.send_signal(signal.SIGTERM)
        *rest, done = events
        assert done == "[DONE]"
        assert " Paris" in text_of([first, *rest])
    assert server.stop() == 0
    assert not [process for process in processes if process.is_running()]
