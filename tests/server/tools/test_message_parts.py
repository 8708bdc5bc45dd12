"""The text of a model becomes content, reasoning and calls, in whatever pieces it comes."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from message_parts import joined
from tool_requests import WEATHER

from outrider.server.text.message_format import MessageFormat
from outrider.server.text.message_parser import Text
from outrider.server.text.tool_calls import ToolCall, tools_by_name

TEMPLATES = {
    "hermes": "{{ '<tool_call>' }}",
    "qwen_xml": "<tool_call><function=",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": '{"name": ..., "parameters": ...}',
}
ROME = ToolCall("weather", '{"city": "Rome"}')
BARE = ToolCall("weather", "{}")
OSLO = ToolCall("weather", '{"city": "Oslo", "days": 3}')


def parse(
    format_name: str, text: str, *, sizes: Sequence[int] = (10**6,), prompt: str = "", **kw: Any
) -> list[Text | ToolCall]:
    """The parts of a text that comes in pieces of these sizes, over and over, joined."""
    form = MessageFormat(TEMPLATES.get(format_name, ""), **kw)
    parser = form.parser(prompt, tools_by_name([WEATHER]))
    assert parser is not None
    parts, start, turn = [], 0, 0
    while start < len(text):
        parts += parser.push(text[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    return joined(parts + parser.flush())


CALL_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CASES = [
    ("hermes", CALL_ROME, [ROME]),
    ("hermes", f"Let me see.\n\n{CALL_ROME}\n", [Text("Let me see."), ROME]),
    ("hermes", f"{CALL_ROME}\n{CALL_ROME}", [ROME, ROME]),
    ("hermes", f"{CALL_ROME}\nDone.", [ROME, Text("\nDone.")]),
    ("hermes", CALL_ROME.removesuffix("</tool_call>"), [ROME]),
    ("hermes", "3 < 4 <tool", [Text("3 < 4 <tool")]),
    ("hermes", "a <tool_call>b</tool_call> c", [Text("a <tool_call>b</tool_call> c")]),
    ("hermes", CALL_ROME[:30], [Text(CALL_ROME[:30])]),
    ("hermes", CALL_ROME[:-4], [ROME]),
    # A call that has begun stays one.
    ("hermes", CALL_ROME[:-25], [ToolCall("weather", '{"cit')]),
    ("hermes", CALL_ROME.replace('"}}', '"} so }'), [ROME, Text("so }\n")]),
    # Keys after the arguments say nothing.
    ("hermes", CALL_ROME.replace('"}}', '"}, "id": "}1\\\\", "a": {"b": {}}}'), [ROME]),
    ("hermes", CALL_ROME.replace('"}}', '"}, "id": "1\\').removesuffix("\n</tool_call>"), [ROME]),
    # No arguments, written as null.
    ("hermes", CALL_ROME.replace('{"city": "Rome"}', "null"), [BARE]),
    ("llama3_json", '{"name": "weather", "parameters": "null"}', [BARE]),
    ("llama3_json", '{"name": "weather"}', [BARE]),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', [Text('<tool_call>{"name": 1}</tool_call>')]),
    (
        "qwen_xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [OSLO],
    ),
    ("qwen_xml", CALL_ROME, [ROME]),
    ("qwen_xml", "<tool_call>weather</tool_call>", [Text("<tool_call>weather</tool_call>")]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', [ROME]),
    # Cut off within the first call, and within the second.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"cit',
        [ToolCall("weather", '{"cit')],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {"ci',
        [ROME, ToolCall("weather", '{"ci')],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "a1"}, '
        '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}, "id": "a2"}]',
        [ROME, OSLO],
    ),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', [ROME]),
    (
        "mistral",
        'Hm.[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]weather{"city": "Oslo", "days": 3}',
        [Text("Hm."), ROME, OSLO],
    ),
    ("mistral", "[TOOL_CALLS] weather", [Text("[TOOL_CALLS] weather")]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Rome"}}; '
        '{"name": "weather", "parameters": "{\\"city\\": \\"Oslo\\", \\"days\\": 3}"}',
        [ROME, OSLO],
    ),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Rome"}, "id": 1}; '
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}, "id": 2}',
        [ROME, OSLO],
    ),
    ("llama3_json", '{"name": "Ada", "born": 1815}', [Text('{"name": "Ada", "born": 1815}')]),
    ("llama3_json", '{"a": {', [Text('{"a": {')]),
    ("llama3_json", "It is {}.", [Text("It is {}.")]),
    (
        "llama3_json",
        r'{"parameters": {"city": "\ud800"}, "name": "weather"}',
        [Text(r'{"parameters": {"city": "\ud800"}, "name": "weather"}')],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_separated_from_content(name: str, text: str, expected: list[Any]) -> None:
    assert parse(name, text) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_pieces_make_no_difference(name: str, text: str, expected: list[Any]) -> None:
    rng = random.Random(text)
    for sizes in ([1], *(rng.choices(range(1, 9), k=7) for _ in range(10))):
        assert parse(name, text, sizes=sizes) == expected, sizes


@pytest.mark.parametrize("sizes", [[1], [1000]])
@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1e999", "1e999"),  # JSON has no infinity
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"oneOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/P"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/elsewhere"}, "5", 5),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, '{"a": 1}', {"a": 1}),
        # Templates show models what Python writes.
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "\nNone\n", None),
        ({"type": "object"}, "{'a': [True, \"it's\", None]}", {"a": [True, "it's", None]}),
        ({"type": "array"}, r"['\d']", ["\\d"]),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "array"}, r"['\ud800']", r"['\ud800']"),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, f"[{'9, ' * 3000}'']", f"[{'9, ' * 3000}'']"),
        # What may be a text is one, unless it may also be nothing, and is.
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "\nnull\n", None),
        ({"type": ["string", "null"]}, "nul", "nul"),
        ({"type": ["string", "null"]}, "null.", "null."),
        ({"type": ["string", "null"]}, "Nonesuch", "Nonesuch"),
        ({"type": ["string", "null"]}, "", ""),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "True", "True"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/Colour"}]}, "12", "12"),
        ({"description": "Any."}, "12", "12"),
        (True, "12", "12"),
        (None, "12", "12"),
    ],
)
def test_a_value_in_a_tag_has_the_type_of_its_schema(
    schema: Any, written: str, expected: Any, sizes: list[int]
) -> None:
    definitions = {
        "P": {"type": "object"},
        "Colour": {"enum": ["12"], "type": "string"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    }
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    parser = MessageFormat(TEMPLATES["qwen_xml"]).parser("", tools_by_name([tool]))
    assert parser is not None
    text = f"<tool_call><function=f><parameter=a>{written}</parameter></function></tool_call>"
    parts = [
        part
        for start in range(0, len(text), sizes[0])
        for part in parser.push(text[start : start + sizes[0]])
    ]
    (call,) = joined(parts + parser.flush())
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": expected}


@pytest.mark.parametrize(
    ("written", "expected"), [("Ro", '{"a": "Ro'), ("null", '{"a": '), ("N", '{"a": ')]
)
def test_a_text_is_streamed_while_it_is_written_once_it_is_not_null(
    written: str, expected: str
) -> None:
    parameters = {"properties": {"a": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    parser = MessageFormat(TEMPLATES["qwen_xml"]).parser("", tools_by_name([tool]))
    assert parser is not None
    parts = parser.push(f"<tool_call><function=f><parameter=a>{written}")
    assert joined(parts) == joined(parts + parser.flush()) == [ToolCall("f", expected)]


@pytest.mark.parametrize("sizes", [[1], [3, 5], [1000]])
def test_reasoning_is_separated_from_content(sizes: list[int]) -> None:
    think = [Text("Rome?\n", reasoning=True)]
    said = parse("hermes", f"<think>Rome?\n</think>{CALL_ROME}", sizes=sizes, reasoning=True)
    assert said == [*think, ROME]
    # A prompt may have opened it.
    said = parse("hermes", "Rome?\n</think>Yes", sizes=sizes, prompt="<a><think>", reasoning=True)
    assert said == [*think, Text("Yes")]
    prompt = "<think>before</think>"
    assert parse("hermes", "Yes", sizes=sizes, prompt=prompt, reasoning=True) == [Text("Yes")]
    # Unless asked for, it is content.
    assert parse("hermes", "<think>a</think>", sizes=sizes) == [Text("<think>a</think>")]


OWN = {
    "start_anchor": "<a>",
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_response_template_of_a_model_goes_before_its_chat_template() -> None:
    call = '<c>{"name": "weather", "arguments": {"city": "Rome"}}</c>'
    parts = parse("hermes", f"<think>hm</think>Wait{call}", prompt="x<a>", response_template=OWN)
    assert parts == [Text("hm", reasoning=True), Text("Wait"), ROME]
    # What it cannot read is content.
    for sizes in ([1], [99]):
        parts = parse("hermes", "Wait<c>{</c>!", sizes=sizes, prompt="<a>", response_template=OWN)
        assert "".join(part.text for part in parts).replace("<c>", "") == "Wait{</c>!"


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *((MessageFormat(TEMPLATES["hermes"], reasoning=True), size) for size in (1, 3, 1000)),
        (MessageFormat("", OWN), 1),  # which shows only what a piece ends with
    ],
)
def test_a_text_shows_where_it_ends(form: MessageFormat, size: int) -> None:
    text = f"<think>Hm. </think>\n\nLet <a>\n\n see. \n{CALL_ROME}\n\nDone.\n"
    parser = form.parser("x<a>", tools_by_name([WEATHER]))
    assert parser is not None
    parts: list[Any] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    texts = [part for part in [*parts, *parser.flush()] if isinstance(part, Text)]
    assert len(texts) > 2
    assert all(text[each.end - len(each.text) : each.end] == each.text for each in texts)


def test_model_that_shows_no_format_calls_nothing() -> None:
    assert MessageFormat("{{ messages }}").parser("", tools_by_name([WEATHER])) is None
    assert (
        MessageFormat(TEMPLATES["hermes"], name="none").parser("", tools_by_name([WEATHER])) is None
    )
    assert MessageFormat(TEMPLATES["hermes"]).parser("", {}) is None
    assert (
        MessageFormat("{{ messages }}", name="hermes").parser("", tools_by_name([WEATHER]))
        is not None
    )
