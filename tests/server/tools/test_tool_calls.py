"""Calls of tools and reasoning in answers, whole and streamed."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from asgi import post
from message_parts import merged_calls
from scripted_client import saying
from served import Served
from socket_server import on_a_socket
from tokenizers_for_tests import byte_level_wrapper, tokenizer_of
from tool_requests import WEATHER

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.api.chat_protocol import Message
from outrider.server.text.message_format import MessageFormat, shows_reasoning
from outrider.server.text.message_parser import MarkerParser
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]


CALL_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


# ---- over HTTP


def chat(served: Served, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]} | fields
    return post(served.app, body, path="/v1/chat/completions")


def stopping(served: Served, tokenizer: Tokenizer, text: str) -> Served:
    """Its model says this, and ends by itself."""
    served.client.play = saying(tokenizer, text, sizes=(3, 1, 7), finish="stop")
    return served


def test_answer_has_calls_in_the_shape_of_openai(serve: Serve, tokenizer: Tokenizer) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, f"{CALL_ROME}\n{CALL_ROME}")
    (choice,) = chat(served).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", None)
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert (
        message["tool_calls"]
        == [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
        * 2
    )


def test_stream_returns_calls_while_they_are_written(serve: Serve, tokenizer: Tokenizer) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, f"Hm. {CALL_ROME}{CALL_ROME}")
    choices = [chunk["choices"][0] for chunk in chat(served, stream=True).chunks]
    chunks = [
        choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]
    ]
    assert all(len(each) == 1 for each in chunks)
    assert len(chunks) > 6
    calls = merged_calls(chunk for (chunk,) in chunks)
    assert len(calls) == len({call["id"] for call in calls}) == 2
    for call in calls:
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hm."
    assert choices[0]["delta"]["role"] == "assistant"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["tool_calls"]
    # Nothing is sent that says nothing.
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices)


def test_one_call_at_a_time_if_so_asked(serve: Serve, tokenizer: Tokenizer) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, f"{CALL_ROME}\n{CALL_ROME}")
    (choice,) = chat(served, parallel_tool_calls=False).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_answer_that_is_cut_off_has_its_length_as_reason(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = serve(saying(tokenizer, CALL_ROME), tool_call_format="hermes")
    assert chat(served).json()["choices"][0]["finish_reason"] == "length"


def test_answer_that_a_stop_string_ends_is_not_ended_by_its_calls(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, CALL_ROME)
    (choice,) = chat(served, stop="Ro").json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Ro")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("<think>Hm.</think>\nYes.", "k>\n", "Hm.", None),
        ("<think>Hm.</think>\nYes.", ">\nYes", "Hm.", None),
        ("<think>Hm.</think>Yes.", "/think", "Hm.", None),
        ("<think>a </b c</think>Yes.", "b", "a </", None),
        ("<think>a <", "b", "a <", None),
        ("Well. <think>Hm.</think>", "ink>Hm", None, "Well. "),
        ("Hi <tool_call>{}</tool_call>", "call>{}", None, "Hi "),
        ("a </th", "th", None, "a </"),  # no marker, outside reasoning
        ("a < b", "b", None, "a < "),
    ],
)
def test_a_stop_that_begins_within_a_marker_leaves_no_piece_of_it(
    text: str, stop: str, reasoning: str | None, content: str | None, stream: bool
) -> None:
    tokenizer = reasoning_tokenizer()
    served = Served(lambda request: [], tokenizer, tool_call_format="hermes")
    reply = chat(stopping(served, tokenizer, text), stop=stop, stream=stream)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in reply.chunks]
        message = {
            name: "".join(delta.get(name) or "" for delta in deltas) or None
            for name in ("reasoning", "content")
        }
    else:
        message = reply.json()["choices"][0]["message"]
    assert (message.get("reasoning") or None, message["content"] or None) == (reasoning, content)


def test_a_stop_token_that_ends_a_marker_leaves_no_piece_of_it() -> None:
    tokenizer = reasoning_tokenizer()
    ids = tokenizer.encode("<think>Hm.</think>", add_special_tokens=False)
    assert tokenizer.token_text(ids[-1]) in "ink>"

    def play(request: NewRequest) -> list[RequestOutput]:
        name, last = request.request_id, ids[-1]
        return [
            RequestOutput(request_id=name, token_ids=ids, finish_reason="stop", stop_token_id=last)
        ]

    message = chat(Served(play, tokenizer), stop_token_ids=ids[-1:]).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm."


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_calls_are_text(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, CALL_ROME)
    (choice,) = chat(served, **fields).json()["choices"]
    assert choice["message"]["content"] == CALL_ROME
    assert choice["finish_reason"] == "stop"


REASONS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


def reasoning_tokenizer() -> Tokenizer:
    wrapper = byte_level_wrapper()
    wrapper.chat_template = REASONS
    return tokenizer_of(wrapper)


@pytest.mark.parametrize("stated", ["by its template", "by a setting"])
def test_reasoning_is_a_field_of_its_own_if_the_model_reasons(
    tokenizer: Tokenizer, stated: str
) -> None:
    text = "<think>Hm.</think>Yes."
    if stated == "by its template":
        served = stopping(Served(lambda request: [], reasoning_tokenizer()), tokenizer, text)
    else:
        scripted = Served(lambda request: [], tokenizer, reasoning_content=True)
        served = stopping(scripted, tokenizer, text)
    message = chat(served, tools=None).json()["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    deltas = [c["choices"][0]["delta"] for c in chat(served, tools=None, stream=True).chunks]
    for name, expected in (("reasoning", "Hm."), ("reasoning_content", "Hm."), ("content", "Yes.")):
        assert "".join(delta.get(name) or "" for delta in deltas) == expected
    message = chat(served, tools=None, include_reasoning=False).json()["choices"][0]["message"]
    assert message.keys().isdisjoint({"reasoning", "reasoning_content"})
    assert message["content"] == "Yes."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("continued", "thought", "said"),
    [
        ("<think>four", "teen", "Yes."),
        ("<think>a</think>b<think>", "teen", "Yes."),
        ("<think>four</think>", "", "teen</think>Yes."),
        ("four", "", "teen</think>Yes."),
    ],
)
def test_a_thought_that_the_last_message_leaves_open_goes_on(
    tokenizer: Tokenizer, path: str, continued: str, thought: str, said: str
) -> None:
    served = Served(lambda request: [], tokenizer, reasoning_content=True)
    served = stopping(served, tokenizer, "teen</think>Yes.")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": continued}]
    if path == "/v1/messages":
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body: dict[str, Any] = {"messages": turns, "max_tokens": 50, "thinking": thinking}
        blocks = post(served.app, body, path=path).json()["content"]
        stated = {block["type"]: block.get("text") or block.get("thinking") for block in blocks}
        assert stated == ({"thinking": thought} if thought else {}) | {"text": said}
    else:
        body = {"messages": turns, "continue_final_message": True}
        message = post(served.app, body, path=path).json()["choices"][0]["message"]
        assert (message.get("reasoning", ""), message["content"]) == (thought, said)


def test_reasoning_stays_in_the_text_if_the_server_says_so(tokenizer: Tokenizer) -> None:
    text = "<think>Hm.</think>Yes."
    served = Served(lambda request: [], reasoning_tokenizer(), reasoning_content=False)
    message = chat(stopping(served, tokenizer, text), tools=None).json()["choices"][0]["message"]
    assert message["content"] == text


def test_an_answer_that_follows_a_grammar_is_content_behind_an_open_think() -> None:
    form = MessageFormat("<think>")
    assert isinstance(form.parser("…<think>\n", {}), MarkerParser)
    assert form.parser("…<think>\n", {}, follows_grammar=True) is None


@pytest.mark.parametrize(
    ("chat_template", "fields", "expected"),
    [
        ("{{ '<think>' }}", None, True),
        ("a.split('</think>')", None, True),
        ("{{ messages }}", None, False),
        ("{{ messages }}", {"thinking": {}, "content": {}}, True),
        ("{{ '<think>' }}", {"content": {}}, False),
    ],
)
def test_templates_show_whether_a_model_reasons(
    chat_template: str, fields: dict[str, Any] | None, expected: bool
) -> None:
    template = None if fields is None else {"fields": fields}
    assert shows_reasoning(chat_template, template) is expected


def test_reasoning_that_is_sent_back_reaches_the_template() -> None:
    message = Message.model_validate({"role": "assistant", "content": "Yes.", "reasoning": "Hm."})
    assert message.for_template()["reasoning_content"] == "Hm."


def test_markers_that_are_special_tokens_are_seen(byte_fallback: Tokenizer) -> None:
    assert byte_fallback.special_ids_of(("<eos>", "[TOOL_CALLS]")) == {0}
    assert byte_fallback.special_ids_of(None) == byte_fallback.special_ids


def test_openai_client_puts_streamed_calls_together(serve: Serve, tokenizer: Tokenizer) -> None:
    served = stopping(serve(tool_call_format="hermes"), tokenizer, f"Hm. {CALL_ROME}{CALL_ROME}")
    with on_a_socket(served) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request: Any = {
            "model": "test-model",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [WEATHER],
        }
        with client.chat.completions.stream(**request) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            streamed = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**request).choices[0]
    assert [(call.name, call.parsed_arguments) for call in done] == [("weather", None)] * 2
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome"}] * 2
    assert streamed.message.content == "Hm."
