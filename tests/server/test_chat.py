"""POST /v1/chat/completions, whole and streamed."""

from typing import Any
from unittest.mock import ANY

import pytest
from asgi import post
from chat_requests import HI, PROMPT, TOOL, Serve, chat
from scripted_client import saying, steps
from served import Served

from outrider.server.text.tokenizer import Tokenizer

# ---- answers


def test_answer_has_the_shape_of_openai(serve: Serve) -> None:
    served = serve()
    answer = chat(served, model="test-model").json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    prompt_tokens = len(served.tokenizer.encode(PROMPT, add_special_tokens=False))
    completion_tokens = len(served.tokenizer.encode(" Hello world", add_special_tokens=False))
    assert answer == {
        "object": "chat.completion",
        "model": "test-model",
        "system_fingerprint": ANY,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_stream_begins_with_the_role_and_ends_with_the_reason(serve: Serve) -> None:
    served = serve()
    chunks = chat(served, stream=True).chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    roles = [choice["delta"].get("role") for choice in choices]
    assert roles == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == " Hello world"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_every_choice_of_a_stream_has_its_role(serve: Serve) -> None:
    roles = {}
    for chunk in chat(serve(), stream=True, n=3).chunks:
        for choice in chunk["choices"]:
            roles.setdefault(choice["index"], choice["delta"].get("role"))
    assert roles == dict.fromkeys(range(3), "assistant")


def test_stream_usage_comes_last_and_only_when_asked(serve: Serve) -> None:
    *chunks, last = chat(serve(), stream=True, stream_options={"include_usage": True}).chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == chat(serve()).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(serve(), stream=True, stream_options=options).chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:3] == [0, 1, 2]  # the first chunk is the role
    assert counts[-1] == counts[-2] == last["usage"]["completion_tokens"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_a_server_can_end_every_stream_with_its_usage(serve: Serve, options: Any) -> None:
    served = serve(include_usage=True)
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "Hi"}),
    ):
        whole = post(served.app, body, path=path).json()
        *chunks, last = post(served.app, body | options | {"stream": True}, path=path).chunks
        assert all(chunk["usage"] is None for chunk in chunks)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_answer_of_nothing_has_a_role_and_no_text(serve: Serve) -> None:
    served = serve(lambda request: steps(request, [0], finish="stop"))
    (choice,) = chat(served).json()["choices"]
    assert choice["message"]["content"] == ""
    role, end = (chunk["choices"][0] for chunk in chat(served, stream=True).chunks)
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert (end["delta"], end["finish_reason"]) == ({}, "stop")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
def test_both_names_limit_the_tokens(serve: Serve, fields: dict[str, int], expected: int) -> None:
    served = serve()
    assert chat(served, **fields).status == 200
    assert served.client.submitted[0][0].params.max_tokens == expected


def test_unlimited_message_may_fill_the_context(serve: Serve) -> None:
    served = serve()
    assert chat(served).status == 200
    (request,) = served.client.submitted[0]
    assert request.params.max_tokens == 1000 - len(request.prompt_token_ids)


# ---- logprobs


def test_logprobs_have_the_shape_of_openai(serve: Serve, tokenizer: Tokenizer) -> None:
    served = serve(saying(tokenizer, "one 🙂"))
    ids = tokenizer.encode("one 🙂", add_special_tokens=False)
    (choice,) = chat(served, logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [tokenizer.token_text(i) for i in ids]
    # Tokens that are part of a character have the bytes of their part.
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "one 🙂"
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    (choice,) = chat(served, logprobs=True).json()["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_come_along_when_asked_for(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    reply = chat(serve(), return_token_ids=True, stream=stream)
    parts = reply.chunks if stream else [reply.json()]
    ids = [i for part in parts for choice in part["choices"] for i in choice.get("token_ids", ())]
    assert ids == tokenizer.encode(" Hello world", add_special_tokens=False)
    prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
    assert prompts == [tokenizer.encode(PROMPT, add_special_tokens=False)]


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "messages: Field required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": ["Hi"]}, "messages", "messages[0]"),
        ({"messages": [*HI, {"content": "Hi"}]}, "messages", "messages[1].role: Field required"),
        ({"messages": [{"role": "user"}]}, "messages", "needs content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "messages[0].content[0]: expected a part with text; images, audio and files",
        ),
        ({"messages": [{"role": "nurse", "content": "Hi"}]}, "messages", "nobody is called nurse"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "weather", "arguments": 5}}],
                    }
                ]
            },
            "messages",
            "tool_calls[0]: expected arguments",
        ),
        ({"tools": [{"type": "function"}]}, "tools", '"name"'),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", "'required'"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice", "Field required"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "news"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"chat_template": "{{ messages }}"}, "chat_template", "not supported"),
        (
            {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
            "chat_template_kwargs",
            "cannot set chat_template",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": None}]},
            "messages",
            "messages[1]: a message of role 'assistant' needs content or tool_calls",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1, or -1"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"n": 1000}, "n", "at most 128"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ],
)
def test_unusable_field_is_named(
    serve: Serve, fields: dict[str, Any], param: str, words: str
) -> None:
    served = serve()
    reply = chat(served, **fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert not served.client.submitted


def test_model_without_a_template_takes_no_messages(byte_fallback: Tokenizer) -> None:
    served = Served(lambda request: steps(request, [70]), byte_fallback)
    reply = chat(served)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "no chat template" in reply.error["message"]


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ({"role": "assistant", "content": None}, 400),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, 200),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            200,
        ),
        ({"role": "assistant", "tool_calls": [{"type": 5, "function": {"name": "f"}}]}, 400),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, 400),
    ],
)
def test_turn_of_the_assistant_says_something(
    serve: Serve, turn: dict[str, Any], status: int
) -> None:
    reply = chat(serve(), messages=[*HI, turn, *HI])
    assert reply.status == status
    if status == 400:
        assert reply.error["param"] == "messages"
        assert "messages[1]" in reply.error["message"]
