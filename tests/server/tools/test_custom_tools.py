"""Tools that take a text, perhaps one of a grammar."""

import json
from typing import Any

import pytest
from served import Served
from tool_requests import ADD, Allows, calls_of, chat, says


def test_stop_strings_act_on_an_input_that_is_the_whole_answer(served: Served) -> None:
    named = {"type": "custom", "custom": {"name": "date"}}
    says(served, "2026-11")
    (choice,) = chat(served, tools=[DATE], tool_choice=named, stop="-").json()["choices"]
    assert choice["message"]["tool_calls"][0]["custom"]["input"] == "2026"
    assert choice["stop_reason"] == "-"


NOTE = {"type": "custom", "custom": {"name": "note", "description": "Takes a note."}}
DATE = {
    "type": "custom",
    "custom": {
        "name": "date",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"},
        },
    },
}


@pytest.mark.parametrize("stream", [True, False])
def test_custom_tool_is_called_with_a_text(served: Served, stream: bool) -> None:
    call = json.dumps({"name": "note", "arguments": {"input": 'a\n"b" \\ é🙂'}})
    says(served, f"[{call}]", sizes=(4, 1, 9))
    calls, last = calls_of(chat(served, tools=[ADD, NOTE], tool_choice="required", stream=stream))
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "note")
    assert (len(calls) > 1) == stream
    assert "".join(call["custom"]["input"] for call in calls) == 'a\n"b" \\ é🙂'
    assert last["finish_reason"] == "tool_calls"


def test_blanks_that_the_grammar_allows_are_no_part_of_the_input(
    served: Served, allows: Allows
) -> None:
    blanks = "\n  "
    arguments = f'{{{blanks}"input"{blanks}:{blanks}"a"{blanks}}}'
    text = f'[{{"name": "note", "arguments": {arguments}}}]'
    says(served, text, sizes=(1,))
    (choice,) = chat(served, tools=[NOTE], tool_choice="required").json()["choices"]
    assert choice["message"]["tool_calls"][0]["custom"]["input"] == "a"
    assert allows(served.client.submitted[-1][0].params.grammar, text)


def test_arguments_of_another_form_are_the_text_itself(served: Served) -> None:
    says(served, '[{"name": "note", "arguments": {"x": 1}}]')
    (choice,) = chat(served, tools=[NOTE], tool_choice="required").json()["choices"]
    assert choice["message"]["tool_calls"][0]["custom"]["input"] == '{"x": 1}'


def test_input_follows_the_grammar_of_its_tool(served: Served, allows: Allows) -> None:
    named = {"type": "custom", "custom": {"name": "date"}}
    says(served, "2026-11")
    (choice,) = chat(served, tools=[ADD, DATE], tool_choice=named).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["custom"] == {"name": "date", "input": "2026-11"}
    grammar = served.client.submitted[-1][0].params.grammar
    assert allows(grammar, "2026-11")
    assert not allows(grammar, "November")
    # Where other things may be written, it cannot be followed.
    for tool_choice in ("auto", "required"):
        reply = chat(served, tools=[ADD, DATE], tool_choice=tool_choice)
        assert (reply.status, reply.error["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("function", ADD | {"custom": {"format": {"grammar": {"syntax": 5, "definition": 5}}}}),
        (
            "custom",
            {
                "type": "custom",
                "custom": {
                    "name": "add",
                    "format": {"type": "text", "grammar": {"syntax": 5, "definition": 5}},
                },
            },
        ),
    ],
)
def test_a_grammar_that_is_no_format_of_a_custom_tool_has_no_effect(
    served: Served, kind: str, tool: dict[str, Any]
) -> None:
    choice = {"type": kind, kind: {"name": "add"}}
    assert chat(served, tools=[tool], tool_choice=choice).status == 200


def test_call_of_a_custom_tool_is_repeated_to_the_model(served: Served) -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "note", "input": "x"}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noted"},
    ]
    assert chat(served, tools=[NOTE], messages=turns, tool_choice="required").status == 200
    call = {"id": "1", "type": "custom", "custom": {"name": "note"}}
    reply = chat(served, messages=[turns[0], {"role": "assistant", "tool_calls": [call]}])
    assert (reply.status, reply.error["param"]) == (400, "messages")
