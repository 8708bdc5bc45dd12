"""Ollama's API: the same answers as lines of JSON, for clients that speak only this."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from asgi import Reply, get, post
from scripted_client import steps
from served import Served

from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def chat(served: Served, **fields: Any) -> Reply:
    return post(served.app, {"model": "test-model", "messages": HI} | fields, path="/api/chat")


def generate(served: Served, **fields: Any) -> Reply:
    return post(served.app, {"model": "test-model", "prompt": "Hi"} | fields, path="/api/generate")


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.body.decode().splitlines()]


def saying(serve: Serve, tokenizer: Tokenizer, text: str, **settings: Any) -> Served:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    served = serve(tool_call_format="hermes", reasoning_content=True, **settings)
    served.client.play = lambda request: steps(
        request, ids[: request.params.max_tokens], sizes=(3, 1, 7), finish="stop"
    )
    return served


def prompt_of(served: Served, tokenizer: Tokenizer) -> str:
    request = served.client.submitted[-1][0]
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def test_a_chat_streams_lines_unless_asked_otherwise(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello you")
    *said, last = lines(chat(served))
    assert "".join(line["message"]["content"] for line in said) == "Hello you"
    assert {line["done"] for line in said} == {False}
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["prompt_eval_count"] == len(served.client.submitted[0][0].prompt_token_ids)
    assert last["eval_count"] == len(tokenizer.encode("Hello you", add_special_tokens=False)) + 1
    assert {line["model"] for line in said} == {"test-model"}


def test_a_whole_answer_is_one_object(serve: Serve, tokenizer: Tokenizer) -> None:
    answer = chat(saying(serve, tokenizer, "Hello"), stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "Hello"}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    answered = generate(saying(serve, tokenizer, "Hello"), stream=False).json()
    assert (answered["response"], answered["done"]) == ("Hello", True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"think": 3}, "think: expected true, false, 'low', 'medium' or 'high'"),
        ({"think": "a lot"}, "think: Input should be 'low', 'medium' or 'high'"),
        ({"format": 3}, "format: expected 'json' or a JSON schema"),
        ({"format": "xml"}, "format: Input should be '' or 'json'"),
    ],
)
def test_a_wrong_field_is_named_once_and_by_its_name_alone(
    serve: Serve, fields: dict[str, Any], says: str
) -> None:
    reply = chat(serve(), **fields)
    assert reply.status == 400
    assert reply.json()["error"].startswith(says)
    assert reply.json()["error"].count("given: ") == 1


def test_reasoning_is_thinking(serve: Serve, tokenizer: Tokenizer) -> None:
    text = "<think>so</think>Hello"
    answer = chat(saying(serve, tokenizer, text), stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "Hello", "thinking": "so"}
    *said, _ = lines(generate(saying(serve, tokenizer, text)))
    assert "".join(line.get("thinking", "") for line in said) == "so"
    assert "".join(line["response"] for line in said) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_whole_and_their_arguments_objects(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    served = saying(serve, tokenizer, f"{CALL_ROME}\n{CALL_ROME}")
    reply = chat(served, tools=[WEATHER], stream=stream)
    said = lines(reply) if stream else [reply.json()]
    calls = [call for line in said for call in line["message"].get("tool_calls", ())]
    assert calls == 2 * [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]


def test_calls_and_results_of_the_history_reach_the_prompt(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = saying(serve, tokenizer, "Fine")
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "11 degrees"},
    ]
    assert chat(served, messages=history, tools=[WEATHER], stream=False).status == 200
    assert "11 degrees" in prompt_of(served, tokenizer)


def test_options_are_sampling_parameters(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "num_predict": 4,
        "repeat_penalty": 1.25,
        "stop": ["x"],
        "num_ctx": 4096,
        "num_gpu": 1,
    }
    assert chat(served, options=options, stream=False).status == 200
    params = served.client.submitted[-1][0].params
    assert (params.temperature, params.top_k, params.seed) == (0.5, 7, 3)
    assert (params.max_tokens, params.repetition_penalty) == (4, 1.25)
    for unlimited in (-1, -2):
        assert chat(served, options={"num_predict": unlimited}, stream=False).status == 200
        assert served.client.submitted[-1][0].params.max_tokens > 4


def test_a_prompt_gets_the_chat_template_unless_raw(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    generate(served, system="Be kind", stream=False)
    templated = prompt_of(served, tokenizer)
    generate(served, raw=True, stream=False)
    assert "Be kind" in templated
    assert prompt_of(served, tokenizer).endswith("Hi")
    assert len(templated) > len("Be kindHi")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"n": 2}}, "n is no option"),  # the texts of both would be one
        ({"options": {"messages": []}}, "messages is no option"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "images"),
        ({"messages": {}}, "messages"),
        ({"model": "other"}, "'other' does not exist"),
        ({"format": 3}, "format"),
    ],
)
def test_a_bad_request_gets_an_error_as_ollama_writes_it(
    serve: Serve, fields: dict[str, Any], reason: str
) -> None:
    reply = chat(serve(), **fields)
    assert reply.status in (400, 404)
    assert list(reply.json()) == ["error"]
    assert reason in reply.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "fields", "said"),
    [
        (chat, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        (generate, {"prompt": ""}, {"response": ""}),
        (generate, {"prompt": "", "raw": True, "keep_alive": 0}, {"response": ""}),
    ],
)
def test_a_request_without_a_prompt_loads_the_model_which_is_there(
    serve: Serve,
    ask: Callable[..., Reply],
    fields: dict[str, Any],
    said: dict[str, Any],
    stream: bool,
) -> None:
    served = serve()
    answer = ask(served, stream=stream, **fields).json()
    created_at = answer.pop("created_at")
    assert created_at.endswith("Z")
    assert answer == said | {"model": "test-model", "done": True, "done_reason": "load"}
    assert not served.client.submitted
    assert ask(served, model="other", **fields).status == 404


def test_an_error_in_a_stream_is_its_last_line(serve: Serve, tokenizer: Tokenizer) -> None:
    served = serve()
    served.client.play = lambda request: steps(request, [5, 6, 7], finish="error")
    *_, last = lines(chat(served))
    assert list(last) == ["error"]


def test_what_clients_ask_before_a_chat(serve: Serve) -> None:
    served = serve()
    (model,) = get(served.app, "/api/tags").json()["models"]
    assert model["name"] == model["model"] == "test-model"
    assert get(served.app, "/api/ps").json()["models"][0]["name"] == "test-model"
    assert get(served.app, "/api/version").json()["version"]
    shown = post(served.app, {"model": "test-model:latest"}, path="/api/show").json()
    assert "completion" in shown["capabilities"]
    assert shown["model_info"]["outrider.context_length"] > 0
    assert chat(served, model="test-model:latest", stream=False).status == 200
    refused = post(served.app, {"model": "x"}, path="/api/pull")
    assert refused.status == 404
    assert "chosen when the server starts" in refused.json()["error"]


@pytest.mark.parametrize(("form", "calls"), [("hermes", True), ("auto", False)])
def test_tools_are_a_capability_where_calls_are_read(serve: Serve, form: str, calls: bool) -> None:
    shown = post(serve(tool_call_format=form).app, {"model": "test-model"}, path="/api/show").json()
    assert ("tools" in shown["capabilities"]) == calls


def test_a_key_is_needed_here_too(serve: Serve) -> None:
    reply = chat(serve(api_keys=("one",)))
    assert reply.status == 401
    assert list(reply.json()) == ["error"]
