"""OpenAI's responses: items and events, conversations that go on, as its own clients read them."""

import asyncio
import json
from typing import Any

import openai
import pytest
from asgi import get, post
from message_parts import without_ids
from openai.types.responses import response_create_params
from response_requests import Serve, ask, events, prompts, saying
from scripted_client import steps
from socket_server import on_a_socket

from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.base.unknown_fields import IGNORED, NEUTRAL_VALUES
from outrider.server.text.tokenizer import Tokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
NOTE = {"type": "custom", "name": "note", "description": "Takes a note."}
CALL_ITEM = {"type": "function_call", "call_id": "call_0", "name": "weather"}
CALL_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL_NOTE = r'<tool_call>{"name": "note", "arguments": {"input": "a\n\"b\" é😀"}}</tool_call>'
SAID = f"<think>Hm.</think>Let me see. {CALL_ROME}\n{CALL_NOTE}"


def test_every_field_of_an_openai_client_is_known() -> None:
    params = response_create_params.ResponseCreateParamsBase
    known = ResponsesRequest.model_fields.keys() | IGNORED | NEUTRAL_VALUES.keys()
    known |= ResponsesRequest.refused_fields.keys() | ResponsesRequest.ignored_fields
    assert params.__annotations__.keys() <= known


def test_answer_has_the_shape_of_openai(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    answer = ask(served, instructions="Be kind.", metadata={"a": "b"}).json()
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["instructions"] == "Be kind."
    assert answer["metadata"] == {"a": "b"}
    (item,) = answer["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    usage = answer["usage"]
    assert usage["input_tokens"] == len(prompts(served)[0])
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_whose_arguments_are_no_json_is_answered_and_taken_back(
    serve: Serve, tokenizer: Tokenizer, stream: bool
) -> None:
    served = saying(serve, tokenizer, CALL_ROME.replace('"Rome"', "NaN"))
    reply = ask(served, tools=[WEATHER], stream=stream)
    answer = events(reply)[-1]["response"] if stream else reply.json()
    (call,) = answer["output"]
    assert (answer["status"], call["arguments"]) == ("completed", '{"city": NaN}')
    # The conversation can go on.
    assert ask(served, previous_response_id=answer["id"]).status == 200
    assert ask(served, input=[{"role": "user", "content": "Hi"}, call]).status == 200


def test_tokens_of_the_prompt_are_counted(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    body = {"input": "Hi", "instructions": "Be kind.", "tools": [WEATHER]}
    path = "/v1/responses/input_tokens"
    counted = post(served.app, body, path=path)
    assert not served.client.submitted
    usage = ask(served, **body).json()["usage"]
    expected = {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert counted.json() == expected
    assert post(served.app, {"input": []}, path=path).error["param"] == "input"


@pytest.mark.parametrize("tools", [[], [WEATHER, NOTE]])
def test_stream_returns_what_the_whole_answer_has(
    serve: Serve, tokenizer: Tokenizer, tools: list[Any]
) -> None:
    served = saying(serve, tokenizer, SAID)
    whole = ask(served, tools=tools, store=False).json()
    first, second, *rest, last = events(ask(served, tools=tools, store=False, stream=True))
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert last["type"] == "response.completed"
    assert without_ids(last["response"]) == without_ids(whole)
    items: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {}
    for event in rest:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif name == "output_item.done":
            done = items[event["output_index"]] = event["item"]
            said = done.get("arguments", done.get("input"))
            if said is None:
                said = done["content"][0]["text"]
            assert "".join(texts[done["id"]]) == said
        elif name.endswith(".delta"):
            texts.setdefault(event["item_id"], []).append(event["delta"])
    assert items == last["response"]["output"]
    types = [item["type"] for item in items]
    if not tools:
        assert types == ["reasoning", "message"]
        return
    assert types == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert items[2]["arguments"] == '{"city": "Rome"}'
    assert all(len(texts[item["id"]]) > 1 for item in items[2:])  # as they were written
    assert items[3]["input"] == 'a\n"b" é😀'
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_answer_that_is_cut_off_is_incomplete(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello world, how are you?")
    answer = ask(served, max_output_tokens=2).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(ask(served, max_output_tokens=2, stream=True))[-1]["type"] == (
        "response.incomplete"
    )


def test_logprobs_come_with_the_text(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello you")
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = ask(served, **fields).json()["output"]
    entries = item["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"Hello you"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    streamed = events(ask(served, stream=True, **fields))
    reported = [e["logprobs"] for e in streamed if e["type"] == "response.output_text.delta"]
    assert [entry for each in reported for entry in each] == entries[: sum(map(len, reported))]
    assert streamed[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 7), (2,), (1000,)])
def test_logprobs_are_those_of_their_text(
    serve: Serve, tokenizer: Tokenizer, sizes: tuple[int, ...]
) -> None:
    text = f"<think>Hm.</think>Let \n\n<me> 🙂 see.\n\n{CALL_ROME}\n\nDone <tool"
    served = serve(tool_call_format="hermes", reasoning_content=True)
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    served.client.play = lambda request: steps(request, ids, sizes=sizes, finish="stop")
    fields = {"include": ["message.output_text.logprobs"], "tools": [WEATHER], "store": False}
    whole = ask(served, **fields).json()["output"]
    said = [item["content"][0] for item in whole if item["type"] == "message"]
    assert [part["text"] for part in said] == ["Let \n\n<me> 🙂 see.", "\n\nDone <tool"]
    for part in said:
        assert (
            b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"]
        )
    streamed = events(ask(served, stream=True, **fields))
    assert without_ids(streamed[-1]["response"]["output"]) == without_ids(whole)
    reported = [e["logprobs"] for e in streamed if e["type"] == "response.output_text.delta"]
    assert [e for each in reported for e in each] == [e for part in said for e in part["logprobs"]]


def test_items_reach_the_model_as_a_chat(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, "Hello")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
        | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        | {"content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "x"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "n"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "custom_tool_call_output", "call_id": "c2"}
        | {"output": [{"type": "input_text", "text": "4"}]},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    reply = ask(served, input=items, instructions="s", tools=[WEATHER])
    assert reply.status == 200
    assert "x-unknown-fields" not in reply.headers
    calls = [
        {"id": "c1", "type": "function"}
        | {"function": {"name": "weather", "arguments": {"city": "x"}}},
        {"id": "c2", "type": "function"}
        | {"function": {"name": "note", "arguments": {"input": "n"}}},
    ]
    chat = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    post(served.app, {"messages": chat, "tools": [tool]}, path="/v1/chat/completions")
    first, second = prompts(served)
    assert first == second


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "expected a string or a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "expected an item of type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "images"),
        (
            {"input": [{"role": "user", "content": "Hi", "id": 5}]},
            "input",
            "[0].id: Input should be",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, or -1"),
        ({"max_output_tokens": 5000}, "input", "maximum context length"),
        ({"background": True, "stream": True}, "stream", "not streamed"),
        ({"background": True, "store": False}, "background", "needs store: true"),
        ({"conversation": "x"}, "conversation", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        (
            {"input": [{**CALL_ITEM, "arguments": {"city": "Rome"}}]},
            "input",
            "input[0].arguments: Input should be a valid string",
        ),
        ({"tools": [{"type": "function"}]}, "tools", '"custom", "name": …, "format": {…}}'),
        (
            {"tools": [{**WEATHER, "parameters": []}]},
            "tools",
            'expected {"type": "function", "name": …',
        ),
        ({"tools": [{**NOTE, "format": "text"}]}, "tools", 'expected {"type": "function", "name"'),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "expected"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "not run"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "not among the tools",
        ),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "not kept"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "text is not supported"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "at most 64 characters"),
        (
            {"metadata": {"key": "x" * 513}},
            "metadata",
            "metadata.key: String should have at most 512",
        ),
        ({"metadata": {"key": [{}]}}, "metadata", "metadata.key: Input should be a valid string"),
    ],
)
def test_unusable_field_is_named(
    serve: Serve, fields: dict[str, Any], param: str, words: str
) -> None:
    served = serve()
    reply = ask(served, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]
    assert not served.client.submitted


def test_tools_of_openai_are_not_offered_and_named(serve: Serve) -> None:
    reply = ask(serve(), tools=[{"type": "web_search"}, WEATHER])
    assert (reply.status, reply.headers["x-unknown-fields"]) == (200, "tools[0].type")


@pytest.mark.parametrize("verbosity", ["low", "medium", None])
def test_verbosity_is_a_hint_and_no_error(serve: Serve, verbosity: str | None) -> None:
    served = serve(unknown_fields="refuse")
    reply = ask(served, text={"verbosity": verbosity, "format": {"type": "text"}})
    assert reply.status == 200
    assert "x-unknown-fields" not in reply.headers


def test_obfuscated_deltas_do_not_show_how_many_tokens_a_step_brought(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = saying(serve, tokenizer, "Hello there, how are you?")
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    reply = ask(served, **options)
    deltas = [event for event in reply.events if '"delta"' in event]
    assert len(deltas) > 1
    assert len({len(event) % 256 for event in deltas}) == 1
    for event in events(reply):
        assert ("obfuscation" in event) == event["type"].endswith(".delta")
    assert "obfuscation" not in str(events(ask(served, stream=True)))


def test_failure_in_mid_stream_is_a_failed_response(serve: Serve) -> None:
    served = serve(
        lambda request: [*steps(request, [70, 71])[:1], EngineUnavailableError("it died")]
    )
    *_, last = events(ask(served, stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it died"}
    (item,) = last["response"]["output"]  # what had come stays
    assert (item["status"], len(item["content"][0]["text"])) == ("incomplete", 1)
    assert get(served.app, f"/v1/responses/{last['response']['id']}").status == 404


# ---- its own clients


def test_openai_client_reads_all_of_it(serve: Serve, tokenizer: Tokenizer) -> None:
    served = saying(serve, tokenizer, SAID)
    with on_a_socket(served) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request: Any = {"model": "test-model", "input": "Hi", "tools": [WEATHER, NOTE]}
        whole = client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            assert response.output_text == "Let me see."
            _, _, function, custom = response.output
            assert isinstance(function, openai.types.responses.ResponseFunctionToolCall)
            assert json.loads(function.arguments) == {"city": "Rome"}
            assert isinstance(custom, openai.types.responses.ResponseCustomToolCall)
            assert custom.input == 'a\n"b" é😀'
        assert "".join(deltas) == "Let me see."
        # What it said is sent back as it came.
        again: Any = [*whole.output, {"role": "user", "content": "And?"}]
        assert client.responses.create(**request | {"input": again}).status == "completed"
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
        (item,) = client.responses.input_items.list(whole.id).data
        assert item.type == "message"
        many = client.responses.create(**request | {"input": again})
        pages = client.responses.input_items.list(many.id, limit=2, order="asc")
        types = [item.type for item in pages]
        assert types == ["reasoning", "message", "function_call", "custom_tool_call", "message"]
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)


@pytest.mark.parametrize("stream", [True, False])
def test_agents_client_runs_tools(serve: Serve, tokenizer: Tokenizer, stream: bool) -> None:
    import agents  # takes seconds, which no other worker need spend

    served = saying(serve, tokenizer, f"<think>Hm.</think>{CALL_ROME}", "It is sunny in Rome.")
    asked = []

    def weather(city: str) -> str:
        asked.append(city)
        return "sunny"

    async def run(url: str) -> str:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            agent = agents.Agent(
                name="Guide",
                instructions="Answer by the weather.",
                tools=[agents.function_tool(weather)],
                model=agents.OpenAIResponsesModel(model="test-model", openai_client=client),
            )
            if not stream:
                return str((await agents.Runner.run(agent, "How is Rome?")).final_output)
            result = agents.Runner.run_streamed(agent, "How is Rome?")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    with on_a_socket(served) as url:
        assert asyncio.run(run(url)) == "It is sunny in Rome."
    assert asked == ["Rome"]
    assert len(served.client.submitted) == 2
