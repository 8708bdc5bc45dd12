"""What of a chat reaches the template of its model: messages, tools and variables."""

import json
from typing import Any

import pytest
from asgi import post
from chat_requests import HI, PROMPT, TOOL, Serve, chat
from scripted_client import steps
from served import Served
from tokenizers_for_tests import byte_level_wrapper, tokenizer_of

from outrider.server.api.chat_protocol import ChatCompletionRequest
from outrider.server.api.responses_protocol import ResponsesRequest


def prompt_of(served: Served, **fields: Any) -> str:
    """The text that the engine was given."""
    reply = chat(served, **fields)
    assert reply.status == 200, reply.body
    ids = served.client.submitted[-1][0].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special_tokens=False)


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
    served = Served(lambda request: steps(request, [70]), tokenizer_of(wrapper))
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
    served = Served(lambda request: steps(request, [70]), tokenizer_of(wrapper))
    assert prompt_of(served, messages=messages) == json.dumps(arguments)
    # A template that needs an object refuses them.
    wrapper.chat_template = LISTS_ARGUMENTS
    served = Served(lambda request: steps(request, [70]), tokenizer_of(wrapper))
    refused = chat(served, messages=messages)
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert "chat template refuses" in refused.error["message"]
