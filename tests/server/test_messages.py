"""Anthropic's API: the same answers in its shapes, as its own client reads them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from asgi import Reply, get, post
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.api.messages_protocol import MessagesRequest
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
}
CALL_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"model": "test-model", "max_tokens": 400, "messages": HI} | fields
    return post(served.app, body, headers, path="/v1/messages")


def saying(serve: Serve, tokenizer: Tokenizer, text: str, **settings: Any) -> Served:
    """A model that says this and ends by itself."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    served = serve(tool_call_format="hermes", reasoning_content=True, **settings)
    served.client.play = lambda request: steps(
        request, ids[: request.params.max_tokens], sizes=(3, 1, 7), finish="stop", cached_tokens=2
    )
    return served


def prompt_of(served: Served, tokenizer: Tokenizer) -> str:
    request = served.client.submitted[-1][0]
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def test_answer_has_the_shape_of_anthropic(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    answer = ask(served).json()
    assert answer.pop("id").startswith("msg_")
    prompt_tokens = len(served.client.submitted[0][0].prompt_token_ids)
    output_tokens = answer["usage"].pop("output_tokens")
    assert output_tokens == len(tokenizer.encode("Hello", add_special_tokens=False)) + 1
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "test-model",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
        },
    }


SAID = f"<think>Hm.</think>Let me see. {CALL_ROME}\n{CALL_ROME}"


@pytest.mark.parametrize("thinking", [True, False])
def test_stream_returns_what_the_whole_answer_has(
    serve: Serve, tokenizer: Tokenizer, thinking: bool
) -> None:
    served = saying(serve, tokenizer, SAID)
    fields: dict[str, Any] = {"tools": [WEATHER]}
    if thinking:
        fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = ask(served, **fields).json()
    start, *rest = ask(served, stream=True, **fields).named_events
    assert start["type"] == "message_start"
    message = start["message"]
    *blocks, end, stop = rest
    assert stop == {"type": "message_stop"}
    for event in blocks:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"] | {"pieces": []})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            (name,) = delta.keys() - {"type"}
            message["content"][index]["pieces"].append((delta["type"], delta[name]))
    for block in message["content"]:
        kinds, texts = zip(*block.pop("pieces"), strict=True)
        if block["type"] == "tool_use":
            assert set(kinds) == {"input_json_delta"}
            assert len(texts) > 1  # as it was written
            block["input"] = json.loads("".join(texts))
        else:
            assert set(kinds) == {f"{block['type']}_delta"}
            block[block["type"]] = "".join(texts)
    for each in (message, whole):
        del each["id"]
        for block in each["content"]:
            assert block.pop("id", "toolu_x").startswith("toolu_")
    message |= end["delta"] | {"usage": end["usage"]}
    assert message == whole
    types = [block["type"] for block in whole["content"]]
    assert types == ["thinking"] * thinking + ["text", "tool_use", "tool_use"]
    assert whole["content"][-1] == {
        "type": "tool_use",
        "name": "weather",
        "input": {"city": "Rome"},
    }
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 1}, "max_tokens", None),
        ({"stop_sequences": [" see"]}, "stop_sequence", " see"),
        ({"tools": [WEATHER], "stop_sequences": ["Rome"]}, "stop_sequence", "Rome"),
    ],
)
def test_stop_reason_says_why(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    served = saying(serve, tokenizer, f"Let me see. {CALL_ROME}")
    served.client.play = lambda request: steps(
        request,
        tokenizer.encode(f"Let me see. {CALL_ROME}", add_special_tokens=False)[
            : request.params.max_tokens
        ],
    )
    answer = ask(served, **fields).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_arguments_that_are_cut_off_show_what_there_is(serve: Serve, tokenizer: Tokenizer) -> None:
    text = CALL_ROME[: CALL_ROME.index("city")]
    served = saying(serve, tokenizer, text)
    (block,) = ask(served, tools=[WEATHER]).json()["content"]
    assert block["input"] == {}
    text = CALL_ROME[: CALL_ROME.index("Rome") + 2]
    (block,) = ask(saying(serve, tokenizer, text), tools=[WEATHER]).json()["content"]
    assert block["input"] == {"city": "Ro"}


def test_conversation_reaches_the_model_as_a_chat(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "3"}],
    }
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c"},
                use,
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
    ]
    system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    reply = ask(served, messages=turns, system=system, tools=[WEATHER])
    assert reply.status == 200
    assert "x-unknown-fields" not in reply.headers
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "d"},
    ]
    function = {
        "name": "weather",
        "parameters": WEATHER["input_schema"],
        "description": WEATHER["description"],
    }
    tools = [{"type": "function", "function": function}]
    body = {"messages": chat, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    post(served.app, body, path="/v1/chat/completions")
    first, second = (requests[0] for requests in served.client.submitted)
    assert first.prompt_token_ids == second.prompt_token_ids
    count = post(
        served.app,
        {"messages": turns, "system": system, "tools": [WEATHER]},
        path="/v1/messages/count_tokens",
    )
    assert count.json() == {"input_tokens": len(first.prompt_token_ids)}


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "It rains."},
        {"type": "content", "content": "It rains."},
        {"type": "content", "content": [{"type": "text", "text": "It rains."}]},
    ],
)
def test_documents_of_text_are_text(serve: Serve, tokenizer: Tokenizer, source: Any) -> None:
    served = saying(serve, tokenizer, "Hello", unknown_fields="refuse")
    document = {"type": "document", "source": source, "title": "Weather", "context": "Rome"}
    document |= {"citations": {"enabled": True}, "cache_control": {"type": "ephemeral"}}
    question = {"type": "text", "text": "And?"}
    assert ask(served, messages=[{"role": "user", "content": [document, question]}]).status == 200
    assert "<user>Weather\nRome\nIt rains.\nAnd?<eos>" in prompt_of(served, tokenizer)
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    result |= {"content": [{"type": "document", "source": source}]}
    turns = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert ask(served, messages=turns).status == 200
    assert "<tool>It rains.<eos>" in prompt_of(served, tokenizer)


def test_the_model_learns_that_a_tool_failed(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello", unknown_fields="refuse")
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "no answer"}
    for is_error, shown in ((True, "Error: no answer"), (False, "no answer"), (None, "no answer")):
        failed = {"role": "user", "content": [result | {"is_error": is_error}]}
        turns = [*HI, {"role": "assistant", "content": [use]}, failed]
        assert ask(served, messages=turns).status == 200
        assert f"<tool>{shown}<eos>" in prompt_of(served, tokenizer)


def test_last_turn_of_the_assistant_is_gone_on_with(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    begun = {"role": "assistant", "content": "The answer is ("}
    assert ask(served, messages=[*HI, begun]).status == 200
    assert prompt_of(served, tokenizer).endswith("The answer is (")


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_turn_of_reasoning_that_only_its_author_can_read_is_empty(
    serve: Serve, tokenizer: Tokenizer, role: str
) -> None:
    served = saying(serve, tokenizer, "Hello")
    hidden = {"role": role, "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert ask(served, messages=[hidden]).status == 200
    redacted = prompt_of(served, tokenizer)
    assert ask(served, messages=[{"role": role, "content": []}]).status == 200
    assert prompt_of(served, tokenizer) == redacted
    count = post(served.app, {"messages": [hidden]}, path="/v1/messages/count_tokens")
    assert count.json() == {"input_tokens": len(served.client.submitted[-1][0].prompt_token_ids)}


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_template_learns_whether_to_think(
    serve: Serve, tokenizer: Tokenizer, thinking: Any, thinks: bool
) -> None:
    served = saying(serve, tokenizer, "<think>Hm.</think>Hello")
    template = served.tokenizer.chat_template
    assert template is not None
    seen: list[Any] = []
    render = type(template).render

    def noting(self: Any, messages: Any, **kw: Any) -> str:
        variables = kw["variables"]
        seen.append((variables["enable_thinking"], variables.get("thinking_budget")))
        return render(self, messages, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(template), "render", noting)
        answer = ask(served, thinking=thinking).json()
    assert seen == [(thinks, (thinking or {}).get("budget_tokens"))]
    assert [block["type"] for block in answer["content"]] == ["thinking"] * thinks + ["text"]


def test_what_is_said_to_the_template_itself_goes_before() -> None:
    fields = {"max_tokens": 1, "messages": HI, "chat_template_kwargs": {"enable_thinking": True}}
    chat = MessagesRequest.model_validate(fields).as_chat()
    assert chat.template_variables == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images are not"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "other documents are not supported"),
        ({"messages": [{"role": "nurse", "content": "Hi"}]}, "messages[0].role"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config is not supported",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "not among the tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice: a choice of type"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"stop_sequences": ["x"] * 17}, "max_stop_strings"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_have_the_shape_of_anthropic(serve: Serve, fields: Any, words: str) -> None:
    served = serve()
    reply = ask(served, **fields)
    assert reply.status == 400
    assert reply.json()["type"] == "error"
    assert reply.error.keys() == {"type", "message"}
    assert reply.error["type"] == "invalid_request_error"
    assert words in reply.error["message"]
    assert not served.client.submitted


def test_every_kind_of_error_has_a_type(serve: Serve) -> None:
    served = serve(api_keys=("right",), max_body_bytes=2000)
    assert ask(served).error["type"] == "authentication_error"
    key = {"x-api-key": "right"}
    assert ask(served, key).status == 200
    assert ask(served, {"x-api-key": "wrong"}).status == 401
    assert ask(served, {"authorization": "Bearer right"}).status == 200
    assert ask(served, key, model="claude").error["type"] == "not_found_error"
    assert ask(served, key, system="x" * 3000).error["type"] == "request_too_large"
    served.client.refusal = EngineUnavailableError("restarting")
    assert ask(served, key).error["type"] == "overloaded_error"
    served.gate.open = False
    assert ask(served, key).error["type"] == "overloaded_error"


def test_agents_find_the_numbers_of_a_conversation_that_is_too_long(serve: Serve) -> None:
    message = ask(serve(), max_tokens=5000).error["message"]
    assert "input length and `max_tokens` exceed context limit: " in message
    assert message.partition(": ")[2].split(",")[0].endswith(" + 5000 > 1000")
    long = [{"role": "user", "content": "word " * 3000}]
    assert ask(serve(), messages=long).error["message"].startswith("prompt is too long: ")


def test_failure_in_mid_stream_is_an_error_event(serve: Serve) -> None:
    served = serve(
        lambda request: [*steps(request, [70, 71])[:1], EngineUnavailableError("it died")]
    )
    *_, last = ask(served, stream=True).named_events
    assert last["type"] == "error"
    assert last["error"] == {"type": "overloaded_error", "message": "it died"}


def test_a_strict_tool_is_strict_in_the_chat() -> None:
    fields = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    fields |= {"tools": [{**WEATHER, "strict": True}]}
    (tool,) = MessagesRequest.model_validate(fields).as_chat().tools
    assert tool["function"]["strict"] is True


def test_tools_of_the_service_are_not_offered_and_named(serve: Serve) -> None:
    tools = [
        WEATHER,
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "foo", "input_schema": {}},
    ]
    reply = ask(serve(), tools=tools)
    assert reply.status == 200
    assert reply.headers["x-unknown-fields"] == "tools[1].type, tools[2].type"


# ---- its own client


def test_anthropic_client_reads_all_of_it(serve: Serve, tokenizer: Tokenizer) -> None:
    import anthropic  # takes seconds, which no other worker need spend

    served = saying(serve, tokenizer, SAID, api_keys=("right",))
    with on_a_socket(served) as url:
        client = anthropic.Anthropic(base_url=url, api_key="right", max_retries=0)
        request: Any = {
            "model": "test-model",
            "max_tokens": 400,
            "messages": HI,
            "tools": [WEATHER],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        assert text == "Let me see."
        kinds = ["thinking", "text", "tool_use", "tool_use"]
        for message in (whole, streamed):
            assert [block.type for block in message.content] == kinds
            assert message.stop_reason == "tool_use"
            call = message.content[2]
            assert isinstance(call, anthropic.types.ToolUseBlock)
            assert (call.name, call.input) == ("weather", {"city": "Rome"})
        assert whole.usage.output_tokens == streamed.usage.output_tokens
        count = client.messages.count_tokens(model="test-model", messages=HI)  # type: ignore[arg-type]
        assert count.input_tokens > 0
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**request | {"model": "claude"})
        wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**request)


def test_document_has_both_kinds_of_error(serve: Serve) -> None:
    document = get(serve().app, "/openapi.json").json()
    for path, name in (("/v1/messages", "AnthropicError"), ("/v1/completions", "ErrorResponse")):
        schema = document["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]
        assert schema["schema"]["$ref"].endswith(name)
