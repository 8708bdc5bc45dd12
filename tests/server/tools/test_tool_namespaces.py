"""Tools in namespaces, as agents send those of MCP servers, of OpenAI's responses."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from asgi import Reply, post
from scripted_client import saying
from served import Served

from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.base.fields import MAX_TOOLS
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
NOTE = {"type": "custom", "name": "note", "description": "Takes a note."}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "A server.", "tools": list(tools)}


NAMESPACES = [namespace("mcp__earth", WEATHER, NOTE), namespace("mcp__mars", WEATHER)]
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SAID = "\n".join(
    CALL % (name, arguments)
    for name, arguments in (
        ("mcp__mars__weather", '{"city": "Rome"}'),
        ("mcp__earth__note", '{"input": "cold"}'),
        ("weather", "{}"),
    )
)


@pytest.fixture
def served(serve: Serve, tokenizer: Tokenizer) -> Served:
    return serve(saying(tokenizer, SAID, finish="stop"), tool_call_format="hermes")


def ask(served: Served, **fields: Any) -> Reply:
    return post(served.app, {"input": "Hi"} | fields, path="/v1/responses")


def prompt(served: Served) -> str:
    ids = served.client.submitted[-1][0].prompt_token_ids
    return served.tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_the_model_sees_them_by_both_names(served: Served) -> None:
    reply = ask(served, tools=[*NAMESPACES, WEATHER])
    assert (reply.status, reply.headers.get("x-unknown-fields")) == (200, None)
    tools = [json.loads(line) for line in prompt(served).splitlines() if line.startswith('{"type"')]
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["mcp__earth__weather", "mcp__earth__note", "mcp__mars__weather", "weather"]
    assert tools[2]["function"]["parameters"] == PARAMETERS


@pytest.mark.parametrize("stream", [False, True])
def test_calls_name_tool_and_namespace(served: Served, stream: bool) -> None:
    reply = ask(served, tools=[*NAMESPACES, WEATHER], stream=stream)
    if stream:
        output = reply.named_events[-1]["response"]["output"]
        added = [each["item"] for each in reply.named_events if each["type"].endswith("item.added")]
        named = [(each["name"], each.get("namespace")) for each in added if "name" in each]
        assert named == [("weather", "mcp__mars"), ("note", "mcp__earth"), ("weather", None)]
    else:
        output = reply.json()["output"]
    of_mars, of_earth, plain = output
    assert (of_mars["name"], of_mars["namespace"]) == ("weather", "mcp__mars")
    assert of_mars["arguments"] == '{"city": "Rome"}'
    assert (of_earth["name"], of_earth["namespace"]) == ("note", "mcp__earth")
    assert (of_earth["type"], of_earth["input"]) == ("custom_tool_call", "cold")
    assert plain["name"] == "weather"
    assert "namespace" not in plain


def test_calls_that_come_back_have_the_name_that_the_model_wrote() -> None:
    call = {"type": "function_call", "call_id": "call_0", "name": "weather", "arguments": "{}"}
    note = {"type": "custom_tool_call", "call_id": "call_1", "name": "note", "input": "cold"}
    items = [{**call, "namespace": "mcp__mars"}, {**note, "namespace": "mcp__earth"}, call]
    chat = ResponsesRequest.model_validate({"input": items, "tools": NAMESPACES}).as_chat([])
    calls = chat.messages[0].tool_calls
    names = [each["function"]["name"] for each in calls or []]
    assert names == ["mcp__mars__weather", "mcp__earth__note", "weather"]


def test_one_of_them_can_be_chosen(served: Served) -> None:
    choice = {"type": "function", "name": "weather", "namespace": "mcp__venus"}
    reply = ask(served, tools=NAMESPACES, tool_choice=choice)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "'mcp__venus__weather', which is not among the tools" in reply.error["message"]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "namespace", "name": "mcp"},
        {"type": "namespace", "tools": [WEATHER]},
        namespace("mcp", {"type": "web_search", "name": "web"}),
        namespace("mcp", namespace("mcp", WEATHER)),
        namespace("mcp", {**WEATHER, "name": ""}),
        namespace("mcp", {**WEATHER, "parameters": []}),
        namespace("mcp", *[WEATHER] * (MAX_TOOLS + 1)),
    ],
)
def test_unusable_namespace_is_refused(served: Served, tool: dict[str, Any]) -> None:
    reply = ask(served, tools=[tool])
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert '"namespace", "name": …, "tools": […]' in reply.error["message"]


def test_all_tools_of_all_namespaces_are_counted(served: Served) -> None:
    reply = ask(served, tools=[namespace(f"mcp{i}", *[WEATHER] * 600) for i in range(2)])
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert str(MAX_TOOLS) in reply.error["message"]
