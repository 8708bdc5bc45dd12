"""Answers that must call a tool, or a certain one."""

import json
from typing import Any

import pytest
from asgi import post
from message_parts import merged_calls
from pydantic import TypeAdapter
from scripted_client import steps
from served import Served
from tool_requests import (
    CALL_ADD,
    CALL_NEGATE,
    NEGATE,
    NUMBER,
    Allows,
    calls_of,
    chat,
    grammar_of,
    says,
    tool,
)

from outrider.server.grammar import tool_choice as choosing
from outrider.server.text.tokenizer import Tokenizer

NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "text", "allowed"),
    [
        ({"tool_choice": "required"}, f"[{CALL_ADD}]", True),
        ({"tool_choice": "required"}, f"[{CALL_NEGATE}, {CALL_ADD}]", True),
        ({"tool_choice": "required"}, "[]", False),
        ({"tool_choice": "required"}, "Hello", False),
        ({"tool_choice": "required"}, f"[{CALL_ADD}".replace("1", '"1"'), False),
        ({"tool_choice": "required"}, f"[{CALL_ADD.replace('add', 'sub')}]", False),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            f"[{CALL_ADD}, {CALL_ADD}]",
            False,
        ),
        ({"tool_choice": NAMED}, f"[{CALL_ADD}]", True),
        ({"tool_choice": NAMED}, f"[{CALL_ADD}, {CALL_ADD}]", False),
        ({"tool_choice": NAMED}, f"[{CALL_NEGATE}]", False),
    ],
)
def test_only_calls_can_be_said(
    served: Served, allows: Allows, fields: dict[str, Any], text: str, allowed: bool
) -> None:
    assert allows(grammar_of(served, **fields), text) == allowed


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [("required", ["add", "negate"], "tool_calls"), (NAMED, ["add"], "stop")],
)
def test_answer_is_made_of_calls_alone(
    served: Served, choice: Any, names: list[str], reason: str, stream: bool
) -> None:
    calls, last = calls_of(chat(served, tool_choice=choice, stream=stream))
    calls = merged_calls(calls) if stream else calls
    assert [call["function"]["name"] for call in calls] == names
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert last["finish_reason"] == reason


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", ["}", "[", ", "])
def test_stop_strings_do_not_act_on_the_json_of_required_calls(
    served: Served, stop: str, stream: bool
) -> None:
    calls, last = calls_of(chat(served, tool_choice="required", stop=stop, stream=stream))
    calls = merged_calls(calls) if stream else calls
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"a": 1, "b": 2}, {"a": 1}]
    assert (last["finish_reason"], last["stop_reason"]) == ("tool_calls", None)


@pytest.mark.parametrize("stream", [True, False])
def test_call_that_is_cut_off_is_no_content(served: Served, stream: bool) -> None:
    says(served, f"[{CALL_ADD}"[:12], finish="length")
    calls, last = calls_of(chat(served, tool_choice="required", stream=stream))
    assert (calls, last["finish_reason"]) == ([], "length")


@pytest.mark.parametrize("kind", ["$defs", "definitions"])
def test_each_tool_has_definitions_of_its_own(served: Served, allows: Allows, kind: str) -> None:
    reference = {"$ref": f"#/{kind}/Item"}
    add, negate = tool("add", a=reference, b=NUMBER), tool("negate", a=reference)
    add["function"]["parameters"][kind] = {"Item": {"type": "string"}}
    negate["function"]["parameters"][kind] = {"Item": NUMBER}
    grammar = grammar_of(served, tools=[negate, add], tool_choice="required")
    assert not allows(grammar, f"[{CALL_ADD}]")
    call = CALL_ADD.replace("1", '"1"')
    assert allows(grammar, f"[{CALL_NEGATE}, {call}]")


def test_references_start_at_the_parameters(served: Served, allows: Allows) -> None:
    tree = tool("add", a=NUMBER, below={"$ref": "#"}, other={"$ref": "#/properties/a"})
    tree["function"]["parameters"]["required"] = ["a"]
    grammar = grammar_of(served, tools=[tree], tool_choice="required")

    def allowed(**arguments: Any) -> bool:
        text = json.dumps([{"name": "add", "arguments": arguments}])
        return allows(grammar, text)

    assert allowed(a=1, below={"a": 2, "below": {"a": 3}}, other=4)
    assert not allowed(a=1, below=[{"name": "add", "arguments": {"a": 2}}])
    assert not allowed(a=1, other="4")


@pytest.mark.parametrize("definitions", [None, [], "x", 5])
def test_definitions_that_are_none_define_nothing(served: Served, definitions: Any) -> None:
    odd = tool("add", a=NUMBER)
    odd["function"]["parameters"]["$defs"] = definitions
    assert chat(served, tools=[odd], tool_choice="required").status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_required_call_follows_a_schema_that_refers_to_itself(
    served: Served, allows: Allows, path: str
) -> None:
    schema = {"type": "object", "properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}}
    messages = [{"role": "user", "content": "Hi"}]
    body: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "add", "parameters": schema}}],
            "tool_choice": "required",
        },
        "/v1/responses": {
            "input": messages,
            "tools": [{"type": "function", "name": "add", "parameters": schema}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            "messages": messages,
            "tools": [{"name": "add", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "max_tokens": 50,
        },
    }[path]
    assert post(served.app, body, path=path).status == 200
    grammar = served.client.submitted[-1][0].params.grammar
    assert allows(grammar, f"[{CALL_ADD}]")
    call = CALL_ADD.replace("2", '"2"')
    assert not allows(grammar, f"[{call}]")


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}]
)
def test_schema_that_is_only_a_reference_to_itself_is_refused(
    served: Served, tokenizer: Tokenizer, schema: Any
) -> None:
    circle = {"type": "function", "function": {"name": "add", "parameters": schema}}
    reply = chat(served, tools=[NEGATE, circle], tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "cannot be followed" in reply.error["message"]
    plain = Served(lambda request: steps(request, [70]), tokenizer)
    assert chat(plain, tools=[NEGATE, circle]).status == 200  # no grammar is made of it


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (f"[{CALL_ADD},{CALL_NEGATE}]".replace(" ", ""), True),
        (json.dumps(json.loads(f"[{CALL_ADD}, {CALL_NEGATE}]"), indent=2), True),
        ('[ {"name" : "negate" , "arguments" : { "a" : 1 } } ]', True),
        ('[{"arguments": {"a": 1}, "name": "negate"}]', False),
        (f"[{' ' * 20}{CALL_ADD}]", True),
        (f"[{' ' * 21}{CALL_ADD}]", False),
        (f"[\n{' ' * 20}{CALL_ADD}\r\n\t\t]", True),
        (f"[\n{' ' * 21}{CALL_ADD}]", False),
        (f"[\n\n{CALL_ADD}]", False),
        (f"[ \n{CALL_ADD}]", False),
        (f"[\n \n{CALL_ADD}]", False),
        (f"[{CALL_ADD}\n\n]", False),
        (f"[{CALL_ADD.replace(' ', chr(10), 1)}]", True),
        (f"[{CALL_ADD.replace(' ', chr(10) * 2, 1)}]", False),
        (f" [{CALL_ADD}]", False),
        (f"[{CALL_ADD}] ", False),
    ],
)
def test_white_space_is_allowed_within_calls_but_not_without_end(
    served: Served, allows: Allows, text: str, allowed: bool
) -> None:
    grammar = grammar_of(served, tool_choice="required")
    assert allows(grammar, text) == allowed


def test_name_of_a_tool_may_be_any_text(served: Served, allows: Allows) -> None:
    odd = 'é"\\\n🙂'
    grammar = grammar_of(served, tools=[tool(odd, a=NUMBER)], tool_choice="required")
    call = json.dumps([{"name": odd, "arguments": {"a": 1}}], ensure_ascii=False)
    assert allows(grammar, call)


def test_parameters_that_a_tool_does_not_declare_are_not_invented(
    served: Served, allows: Allows
) -> None:
    loose = tool("add", a=NUMBER, b=NUMBER)
    del loose["function"]["parameters"]["additionalProperties"]
    more = f"[{CALL_ADD}]".replace('"b": 2', '"b": 2, "c": 3')
    grammar = grammar_of(served, tools=[loose], tool_choice="required")
    assert not allows(grammar, more)
    loose["function"]["parameters"]["additionalProperties"] = True
    grammar = grammar_of(served, tools=[loose], tool_choice="required")
    assert allows(grammar, more)


@pytest.mark.parametrize(
    "more",
    [
        {"allOf": [{"properties": {"b": NUMBER}}]},
        {"anyOf": [{"properties": {"b": NUMBER}, "required": ["b"]}]},
        {"oneOf": [{"properties": {"b": NUMBER}, "required": ["b"]}]},
        {"$ref": "#/$defs/more", "$defs": {"more": {"properties": {"b": NUMBER}}}},
        {"patternProperties": {"^b": NUMBER}},
    ],
)
def test_parameters_may_be_declared_beside_the_properties(
    served: Served, allows: Allows, more: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": NUMBER}, **more}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    grammar = grammar_of(served, tools=tools, tool_choice="required")
    other_order = CALL_ADD.replace('"a": 1, "b": 2', '"b": 2, "a": 1')
    calls = (f"[{CALL_ADD}]", f"[{other_order}]")  # llguidance takes one of them
    assert any(allows(grammar, call) for call in calls)


def test_tool_without_parameters_takes_any_object(served: Served, allows: Allows) -> None:
    for bare in ({"name": "add"}, {"name": "add", "parameters": None}):
        tools = [{"type": "function", "function": bare}]
        grammar = grammar_of(served, tools=tools, tool_choice="required")
        assert allows(grammar, f"[{CALL_ADD}]")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": NUMBER, "b": NUMBER}},
        {"anyOf": [{"required": ["b"]}, {"required": ["a"]}]},
        {"$ref": "#/$defs/both", "$defs": {"both": {"properties": {"a": NUMBER, "b": NUMBER}}}},
        {"type": ["object", "null"]},
    ],
)
def test_arguments_are_an_object_whatever_type_the_schema_has(
    served: Served, allows: Allows, schema: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    grammar = grammar_of(served, tools=tools, tool_choice="required")
    assert allows(grammar, f"[{CALL_ADD}]")
    for value in ("null", '"1"', "[1, 2]"):
        call = f'{{"name": "add", "arguments": {value}}}'
        assert not allows(grammar, f"[{call}]")


def test_required_call_goes_before_a_format_of_the_answer(served: Served) -> None:
    # Clients send both: the format is for what follows the calls.
    fields = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    (choice,) = chat(served, **fields).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_what_cannot_be_required_is_refused(served: Served, tokenizer: Tokenizer) -> None:
    wrong = tool("add", a={"type": "nothing"})
    assert chat(served, tools=[wrong], tool_choice="required").error["param"] == "tool_choice"
    # Where no grammar can be followed, calls can still be made, but not required.
    plain = Served(lambda request: steps(request, [70]), tokenizer)
    assert chat(plain).status == 200
    assert chat(plain, tool_choice="required").error["code"] == "unsupported_parameter"


# ---- some tools of many, and tools that take a text

ALLOWED = {"type": "function", "function": {"name": "negate"}}


def allowed_tools(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_only_allowed_tools_can_be_called(served: Served, allows: Allows) -> None:
    grammar = grammar_of(served, tool_choice=allowed_tools("required", ALLOWED))
    assert allows(grammar, f"[{CALL_NEGATE}]")
    assert allows(grammar, f"[{CALL_NEGATE}, {CALL_NEGATE}]")
    assert not allows(grammar, f"[{CALL_ADD}]")
    wrong = {"type": "function", "function": {"name": "sub"}}
    reply = chat(served, tool_choice=allowed_tools("auto", wrong))
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


def test_a_choice_among_tools_looks_at_each_of_them_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_of, looks = choosing._name, 0

    def counting(tool: dict[str, Any]) -> str:
        nonlocal looks
        looks += 1
        return name_of(tool)

    monkeypatch.setattr(choosing, "_name", counting)
    tools = [tool(f"f{i}") for i in range(300)]
    names = [{"type": "function", "function": {"name": f"f{i}"}} for i in reversed(range(300))]
    choice = TypeAdapter(choosing.AllowedTools).validate_python(allowed_tools("auto", *names))
    assert len(choosing.choose(choice, tools, parallel=True).tools) == 300
    assert looks < 5 * 300


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_allowed_tools_have_a_maximum(serve: Any, path: str) -> None:
    name = {"type": "function", "name": "f"}
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [name] * 1025}
    body = {"input": "Hi", "tools": [name | {"parameters": {}}], "tool_choice": choice}
    if path == "/v1/chat/completions":
        choice = allowed_tools("auto", *[{"type": "function", "function": {"name": "f"}}] * 1025)
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool("f")]}
        body["tool_choice"] = choice
    reply = post(serve().app, body, path=path)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "1024" in reply.error["message"]


def test_only_allowed_tools_are_shown_to_the_model(serve: Any, tokenizer: Tokenizer) -> None:
    served = serve()

    def prompt(**fields: Any) -> str:
        assert chat(served, **fields).status == 200
        ids = served.client.submitted[-1][0].prompt_token_ids
        return tokenizer.decode(ids, skip_special_tokens=False)

    assert '"add"' in prompt()
    assert '"add"' not in prompt(tool_choice=allowed_tools("auto", ALLOWED))
    assert '"negate"' in prompt(tool_choice=allowed_tools("auto", ALLOWED))
