"""POST /v1/chat/completions, whole and streamed."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from asgi import Reply, post
from scripted_client import saying, steps
from served import Served
from tokenizers_for_tests import byte_level_wrapper

from outrider.server.api.chat_protocol import ChatCompletionRequest
from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "<user>Hi<eos>\n<assistant>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(served: Served, **fields: Any) -> Reply:
    return post(served.app, {"messages": HI} | fields, path="/v1/chat/completions")


def prompt_of(served: Served, **fields: Any) -> str:
    """The text that the engine was given."""
    reply = chat(served, **fields)
    assert reply.status == 200, reply.body
    ids = served.client.submitted[-1][0].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special_tokens=False)


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


# ---- prompts


def test_prompt_is_made_by_the_template_of_the_model(serve: Serve) -> None:
    served = serve()
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who are you?"},
    ]
    assert prompt_of(served, messages=messages) == (
        "<system>Be kind.<eos>\n<user>Hi<eos>\n<assistant>Hello<eos>\n<user>Who are you?<eos>\n"
        "<assistant>"
    )


def test_special_tokens_of_the_template_are_tokens(serve: Serve) -> None:
    served = serve()
    chat(served)
    eos = served.tokenizer.backend.token_to_id("<eos>")
    assert served.client.submitted[0][0].prompt_token_ids.count(eos) == 1


def test_text_parts_are_lines(serve: Serve) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = prompt_of(serve(), messages=[{"role": "user", "content": parts}])
    assert prompt == "<user>one\ntwo<eos>\n<assistant>"


@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_text_parts_may_have_the_names_that_responses_give_them(serve: Serve, kind: str) -> None:
    part = {"type": kind, "text": "one", "annotations": [], "logprobs": []}
    served = serve(unknown_fields="refuse")
    prompt = prompt_of(served, messages=[{"role": "user", "content": [part]}])
    assert prompt == "<user>one<eos>\n<assistant>"


def test_refusal_that_is_sent_back_is_what_the_assistant_said(serve: Serve) -> None:
    parts = [{"type": "text", "text": "Well,"}, {"type": "refusal", "refusal": "no."}]
    turn = {"role": "assistant", "content": parts}
    prompt = prompt_of(serve(), messages=[*HI, turn, *HI])
    assert "<assistant>Well,\nno.<eos>" in prompt


def test_developer_is_the_system_to_a_template_that_knows_no_developer(serve: Serve) -> None:
    messages = [{"role": "developer", "content": "Be kind."}]
    assert prompt_of(serve(), messages=messages).startswith("<system>Be kind.")


def test_last_message_can_be_continued(serve: Serve) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hel"}]
    served = serve()
    for fields in ({}, {"add_generation_prompt": False}):
        prompt = prompt_of(served, messages=messages, continue_final_message=True, **fields)
        assert prompt == "<user>Hi<eos>\n<assistant>Hel"
    prompt = prompt_of(served, messages=messages, add_generation_prompt=False)
    assert prompt == "<user>Hi<eos>\n<assistant>Hel<eos>\n"
    echoing = {"messages": messages, "continue_final_message": True, "echo": True}
    assert chat(served, **echoing).json()["choices"][0]["message"]["content"] == "Hel Hello world"
    chunks = chat(served, stream=True, **echoing).chunks
    texts = [choice["delta"].get("content", "") for c in chunks for choice in c["choices"]]
    assert "".join(texts) == "Hel Hello world"


def test_variables_reach_the_template(serve: Serve) -> None:
    served = serve(unknown_fields="refuse")
    glad = {"chat_template_kwargs": {"mood": "glad"}}
    assert prompt_of(served, **glad) == PROMPT + "glad"
    for path, body in (
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ):
        assert post(served.app, body | glad, path=path).status == 200
    first, *others = (requests[0].prompt_token_ids for requests in served.client.submitted)
    assert others == [first] * 2
    counted = post(served.app, {"messages": HI} | glad, path="/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": len(first)}


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        (None, {}),
        ("low", {"reasoning_effort": "low"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
    ],
)
def test_effort_of_reasoning_reaches_the_template(
    effort: str | None, expected: dict[str, Any]
) -> None:
    fields = {"messages": HI, "reasoning_effort": effort}
    assert ChatCompletionRequest.model_validate(fields).template_variables == expected
    response = ResponsesRequest.model_validate({"input": "Hi", "reasoning": {"effort": effort}})
    assert response.as_chat([]).template_variables == expected
    # What is said to the template itself goes before.
    thinks = {"enable_thinking": True}
    chat = ChatCompletionRequest.model_validate(fields | {"chat_template_kwargs": thinks})
    assert chat.template_variables == expected | thinks | {"thinking": True}


def test_tools_are_shown_to_the_template_as_they_came(serve: Serve) -> None:
    shown = (
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
    )
    assert prompt_of(serve(), tools=[TOOL]) == f"{shown}\n{PROMPT}"
    assert prompt_of(serve(), tools=[TOOL], tool_choice="auto") == f"{shown}\n{PROMPT}"
    assert prompt_of(serve(), tools=[TOOL], tool_choice="none") == PROMPT


def test_null_in_a_tool_means_left_out(serve: Serve) -> None:
    nulls = {"parameters": None, "description": None, "strict": None}
    tool = {"type": "function", "function": {"name": "weather"} | nulls}
    shown = '{"type": "function", "function": {"name": "weather"}}'
    assert prompt_of(serve(), tools=[tool]) == f"{shown}\n{PROMPT}"


# The last two are of answers that were cut off by their length.
@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Rome"}', {"city": "Rome"}, '{"city": "Rome', '{"city": "Rome", "days":'],
)
def test_arguments_of_earlier_calls_are_objects_to_the_template(
    serve: Serve, arguments: object
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    prompt = prompt_of(serve(), messages=messages)
    assert prompt == "<user>Hi<eos>\n<assistant>Rome<eos>\n<tool>sunny<eos>\n<assistant>"


@pytest.mark.parametrize("arguments", ["", None])
def test_call_without_arguments_is_one(serve: Serve, arguments: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = prompt_of(serve(), messages=messages)
    assert prompt == "<user>Hi<eos>\n<assistant><eos>\n<assistant>"


@pytest.mark.parametrize("kind", [{}, {"type": None}])
def test_a_call_or_a_tool_without_a_type_is_of_a_function(
    serve: Serve, kind: dict[str, Any]
) -> None:
    served = serve()
    function = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turn = {"role": "assistant", "content": None}
    typed = {"tool_calls": [function | {"type": "function"}]}
    untyped = {"tool_calls": [function | kind]}
    prompt = prompt_of(served, messages=[*HI, turn | typed])
    assert prompt_of(served, messages=[*HI, turn | untyped]) == prompt
    tool = {**kind, "function": TOOL["function"]}
    assert prompt_of(served, tools=[tool]) == prompt_of(served, tools=[TOOL])
    named = {**kind, "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert chat(served, tools=[tool], tool_choice=allowed).status == 200


def test_an_answer_of_no_content_and_no_calls_is_empty(serve: Serve) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": []}
    prompt = prompt_of(serve(), messages=[*HI, turn, *HI])
    assert prompt == "<user>Hi<eos>\n<assistant><eos>\n" + PROMPT


def test_no_calls_are_no_list_of_calls_to_the_template() -> None:
    wrapper = byte_level_wrapper()
    wrapper.chat_template = "{{ messages[-1].content }}{{ 'tool_calls' in messages[-1] }}"
    served = Served(lambda request: steps(request, [70]), Tokenizer.of(wrapper))
    messages = [*HI, {"role": "assistant", "content": "Yes.", "tool_calls": []}]
    assert prompt_of(served, messages=messages) == "Yes.False"


TELLS_CALLS = (
    "{% for c in messages[-1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
)
LISTS_ARGUMENTS = TELLS_CALLS.replace("tojson", "items | list")


@pytest.mark.parametrize("arguments", ["Rome", '{"city": NaN}', "{'a': 1}", "[1]", "5"])
def test_arguments_that_are_no_json_reach_the_template_as_text(arguments: str) -> None:
    call = {"function": {"name": "weather", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    wrapper = byte_level_wrapper()
    wrapper.chat_template = TELLS_CALLS
    served = Served(lambda request: steps(request, [70]), Tokenizer.of(wrapper))
    assert prompt_of(served, messages=messages) == json.dumps(arguments)
    # A template that needs an object refuses them.
    wrapper.chat_template = LISTS_ARGUMENTS
    served = Served(lambda request: steps(request, [70]), Tokenizer.of(wrapper))
    refused = chat(served, messages=messages)
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert "chat template refuses" in refused.error["message"]


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
        (
            {"messages": [{"role": "nurse", "content": "Hi"}]},
            "messages",
            "nobody is called nurse",
        ),
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
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "news"}},
            },
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
