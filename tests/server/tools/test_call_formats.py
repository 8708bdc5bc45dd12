"""The formats of tool calls and reasoning that families of models write, each read as it grows."""

import json
from typing import Any

import pytest
from message_parts import joined

from outrider.server.text.call_formats import CALL_FORMATS
from outrider.server.text.call_stream import CallArguments, CallStart
from outrider.server.text.message_format import MessageFormat
from outrider.server.text.message_parser import MessagePart, Text
from outrider.server.text.tool_calls import ToolCall, tools_by_name

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "array"},
        "where": {"type": "object"},
        "now": {"type": "boolean"},
    },
}
TOOLS = tools_by_name(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("weather", "get.time")
)
# Marks by which a family's chat template is known.
SHOWN = {
    "harmony": "<|start|>{{ role }}<|channel|>final<|message|>",
    "gemma4": "'<|tool_call>call:' '<|channel>thought\\n<channel|>'",
    "glm": "</think> <tool_call>{{ name }}<arg_key>",
    "qwen_xml": "</think> <tool_call>\n<function=",
    "dsml": "</think> <｜DSML｜function_calls>",
    "deepseek": "</think> '<｜tool▁calls▁begin｜>'",
    "kimi": "</think> <|tool_calls_section_begin|>",
    "granite": "<|tool_call|>",
    "hermes": "<think> <tool_call>",
    "mistral": "[THINK] [TOOL_CALLS]",
    "llama4": '<|python_start|> "parameters": ',
    "llama3_json": '"parameters": ',
}
ARGUMENTS = {
    "city": "São \"Paulo\"\n{, ]\\ 'x'",
    "days": -3,
    "units": ["°C", {"a": None}, []],
    "where": {"lat": 1.5, "of": {"x": "y"}},
    "now": True,
}
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
GEMMA = (
    'city:<|"|>São "Paulo"\n{, ]\\ \'x\'<|"|>,days:-3,now:true,units:[<|"|>°C<|"|>,{a:null},[]],'
    'where:{lat:1.5,of:{x:<|"|>y<|"|>}}'
)
PYTHON = (
    "city='São \"Paulo\"\\n{, ]\\\\ \\'x\\'', days=-3, units=[\"\\u00b0C\", {'a': None}, []], "
    "where={'lat': 1.5, \"of\": {'x': 'y'}}, now=True"
)


def tags_of(begin: str, middle: str, end: str, gap: str = "") -> str:
    return "".join(
        f"{begin}{key}{middle}{gap}"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{gap}{end}\n"
        for key, value in ARGUMENTS.items()
    )


GLM = tags_of("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
QWEN = tags_of("<parameter=", ">", "</parameter>", "\n")
DSML = "".join(
    f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
    f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
    "</｜DSML｜parameter>\n"
    for key, value in ARGUMENTS.items()
)
# Two calls in each format: with all kinds of arguments, and without any.
TWO_CALLS = {
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{AS_JSON}"
    "<|call|><|start|>assistant to=functions.get.time<|channel|>commentary<|message|><|call|>",
    "gemma4": f"<|tool_call>call:weather{{{GEMMA}}}<tool_call|>"
    "<|tool_call>call:get.time{}<tool_call|>",
    "glm": f"<tool_call>weather\n{GLM}</tool_call>\n<tool_call>get.time</tool_call>",
    "qwen_xml": "<tool_call>\n<function=weather>\n"
    f"{QWEN}</function>\n</tool_call>\n"
    "<tool_call>\n<function=get.time>\n</function>\n</tool_call>",
    "dsml": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n{DSML}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get.time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{AS_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>get.time<｜tool▁sep｜>{{}}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4"
    f"<|tool_call_argument_begin|>{AS_JSON}<|tool_call_end|><|tool_call_begin|>functions.get.time:5"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {AS_JSON}}}, '
    '{"name": "get.time", "arguments": {}}]',
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {AS_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get.time", "arguments": {}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{AS_JSON}"
    "[TOOL_CALLS]get.time[ARGS]{}",
    "llama4": f"<|python_start|>[weather({PYTHON}), get.time()]<|python_end|>",
    "llama3_json": f'{{"name": "weather", "parameters": {AS_JSON}}}; '
    '{"name": "get.time", "parameters": {}}',
}
BEFORE = {  # reasoning, and how it ends
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant",
    ),
    "gemma4": ("<|channel>thought\n", "<channel|>Let me see."),
    "mistral": ("[THINK]", "[/THINK]Let me see."),
}
NO_REASONING = ("granite", "llama4", "llama3_json")


def parts_of(
    name: str, text: str, size: int = 10**9, prompt: str = "", **kw: Any
) -> list[MessagePart]:
    parser = MessageFormat(SHOWN[name], **kw).parser(prompt, TOOLS)
    assert parser is not None
    parts: list[MessagePart] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    return parts + parser.flush()


def calls_in(parts: list[MessagePart]) -> list[tuple[str, Any]]:
    calls = joined(parts)
    assert all(isinstance(call, ToolCall) for call in calls), calls
    return [(c.name, json.loads(c.arguments)) for c in calls if isinstance(c, ToolCall)]


def test_there_is_a_case_for_each_format() -> None:
    assert set(TWO_CALLS) == set(SHOWN) == set(CALL_FORMATS)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_chat_template_shows_its_format(name: str) -> None:
    assert MessageFormat(SHOWN[name]).name == name


@pytest.mark.parametrize(
    ("model_type", "name"), [("gpt_oss", "harmony"), ("kimi_k2", "kimi"), ("llama", "none")]
)
def test_the_type_of_a_model_decides_if_its_template_shows_nothing(
    model_type: str, name: str
) -> None:
    assert MessageFormat("{{ messages }}", model_type=model_type).name == name
    assert MessageFormat(SHOWN["hermes"], model_type=model_type).name == "hermes"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_parallel_calls_are_read_however_their_text_is_cut(name: str, size: int) -> None:
    expected = [("weather", ARGUMENTS), ("get.time", {})]
    assert calls_in(parts_of(name, TWO_CALLS[name], size)) == expected


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_one_cut_anywhere_makes_no_difference(name: str) -> None:
    text = TWO_CALLS[name]
    whole = joined(parts_of(name, text))
    form = MessageFormat(SHOWN[name])
    for cut in range(1, len(text)):
        parser = form.parser("", TOOLS)
        assert parser is not None
        assert (
            joined([*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.flush()]) == whole
        )


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_arguments_are_reported_while_they_are_written(name: str) -> None:
    """Once a value of text has begun, no piece of it is held back for longer than a marker."""
    text = TWO_CALLS[name]
    parser = MessageFormat(SHOWN[name]).parser("", TOOLS)
    assert parser is not None
    written = parser.push(text[: text.index("Paulo")])
    (start,) = [part for part in written if isinstance(part, CallStart)]
    assert start.name == "weather"
    assert "São" in "".join(part.text for part in written if isinstance(part, CallArguments))


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_call_that_is_cut_off_has_the_arguments_up_to_there(name: str) -> None:
    """As max_tokens cuts: whatever is reported is the beginning of the whole, and no marker."""
    text = TWO_CALLS[name]
    whole = [call for call in joined(parts_of(name, text)) if isinstance(call, ToolCall)]
    begun = False
    for cut in range(len(text)):
        calls = joined(parts_of(name, text[:cut], 5))
        if begun := begun or (bool(calls) and isinstance(calls[0], ToolCall)):
            assert all(isinstance(call, ToolCall) for call in calls), text[:cut]
        for call, complete in zip(calls, whole, strict=False):
            if isinstance(call, ToolCall):
                assert call.name == complete.name
                assert complete.arguments.startswith(call.arguments), text[:cut]
    assert begun


@pytest.mark.parametrize("size", [1, 4, 10**9])
@pytest.mark.parametrize("name", [name for name in CALL_FORMATS if name not in NO_REASONING])
def test_reasoning_and_text_come_before_calls(name: str, size: int) -> None:
    begin, end = BEFORE.get(name, ("<think>", "</think>Let me see."))
    parts = parts_of(name, f"{begin}Hm. 1 < 2{end}{TWO_CALLS[name]}", size)
    reasoning, content, *calls = joined(parts)
    assert reasoning == Text("Hm. 1 < 2", reasoning=True)
    assert content == Text("Let me see.")
    assert [call.name for call in calls if isinstance(call, ToolCall)] == ["weather", "get.time"]


@pytest.mark.parametrize("name", [name for name in CALL_FORMATS if name not in NO_REASONING])
def test_a_prompt_may_have_begun_the_reasoning(name: str) -> None:
    begin, _ = BEFORE.get(name, ("<think>\n", ""))
    end = "<|end|><|start|>assistant<|channel|>final<|message|>"
    end = end if name == "harmony" else BEFORE.get(name, ("", "</think>x"))[1].split(">")[0] + ">"
    end = "[/THINK]" if name == "mistral" else end
    prompt = f"<|start|>user<|message|>Hi<|end|><|start|>assistant{begin}"
    for size in (1, 10**9):
        parts = joined(parts_of(name, f"Hm.{end}Yes.", size, prompt))
        assert parts == [Text("Hm.", reasoning=True), Text("Yes.")]


@pytest.mark.parametrize("name", [name for name in CALL_FORMATS if name != "harmony"])
def test_text_that_only_looks_like_a_call_is_content(name: str) -> None:
    form = CALL_FORMATS[name]
    text = f"{form.open[0]} and no call{form.close or ''} so"
    if form.at_start:
        text = form.open[-1] + text
    for size in (1, 10**9):
        parts = joined(parts_of(name, text, size))
        assert all(isinstance(part, Text) for part in parts)
        assert "".join(part.text for part in parts if isinstance(part, Text)) == text


def test_ids_that_a_model_writes_are_kept() -> None:
    starts = [p for p in parts_of("kimi", TWO_CALLS["kimi"], 3) if isinstance(p, CallStart)]
    form = MessageFormat(SHOWN["kimi"])
    assert [form.call_id(start) for start in starts] == [
        "functions.weather:4",
        "functions.get.time:5",
    ]
    starts = [p for p in parts_of("mistral", TWO_CALLS["mistral"]) if isinstance(p, CallStart)]
    assert [start.id for start in starts] == ["abcdefghi", None]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("f(a=1, b=None)", {"a": 1, "b": None}),
        ("f(t='12:30 a=b')", {"t": "12:30 a=b"}),
        ("f(a=(1, 2))", {"a": [1, 2]}),
        (r"f(a='\x41\u00e9\U0001F600\d\ud800')", {"a": "Aé😀\\d\ufffd"}),
        ("f(a=b + c)", {"a": "b + c"}),
        ("f(a=nan, b=1e999)", {"a": "nan", "b": "1e999"}),
        ("f(a={})", {"a": {}}),
    ],
)
def test_literals_of_python_become_json(written: str, expected: Any) -> None:
    tools = tools_by_name([{"type": "function", "function": {"name": "f"}}])
    for size in (1, 10**9):
        parser = MessageFormat(SHOWN["llama4"]).parser("", tools)
        assert parser is not None
        text = f"[{written}]"
        parts = [p for i in range(0, len(text), size) for p in parser.push(text[i : i + size])]
        assert calls_in(parts + parser.flush()) == [("f", expected)]


def test_bare_words_of_gemma_are_texts() -> None:
    text = "<|tool_call>call:weather{city:New York,days:12:30 <5,now:false}<tool_call|>"
    for size in (1, 10**9):
        assert calls_in(parts_of("gemma4", text, size)) == [
            ("weather", {"city": "New York", "days": "12:30 <5", "now": False})
        ]


# ---- gpt-oss


def test_text_without_a_header_is_content() -> None:
    for text in ("Hello.", "1 < 2", "to be"):
        for size in (1, 10**9):
            assert joined(parts_of("harmony", text, size)) == [Text(text)]


def test_channels_may_change_within_a_step_and_without_an_end() -> None:
    text = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>"
    for size in (1, 5, 10**9):
        assert joined(parts_of("harmony", text, size)) == [Text("a", reasoning=True), Text("b")]


def test_messages_to_tools_of_the_model_itself_are_reasoning() -> None:
    text = '<|channel|>commentary to=browser.search<|message|>{"query": "x"}<|call|>'
    assert joined(parts_of("harmony", text)) == [Text('{"query": "x"}', reasoning=True)]


def test_a_header_that_is_cut_off_is_no_content() -> None:
    assert parts_of("harmony", "<|channel|>comment") == []
    assert parts_of("harmony", "<|channel|>final<|message|>") == []


def test_channels_are_taken_apart_without_tools_and_known_by_their_tokens() -> None:
    form = MessageFormat(SHOWN["harmony"])
    assert form.has_reasoning
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= set(form.delimiters or ())
    parser = form.parser("<|start|>assistant", {})
    assert parser is not None
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    assert joined([*parser.push(said), *parser.flush()]) == [Text("Hm.", True), Text("Hi")]
    ((begin, end),) = parser.reasoning
    assert said[begin : int(end)].startswith("<|channel|>analysis")
    assert said[begin : int(end)].endswith("<|end|>")


def test_our_format_goes_before_a_response_template_that_reads_the_same_calls() -> None:
    calls = {"open_pattern": r"\s*<\|tool_call>", "close": "<tool_call|>", "content": "json"}
    own = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": calls}}
    assert MessageFormat(SHOWN["gemma4"], own).name == "gemma4"
    other = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": {"open": "<c>"}}}
    assert MessageFormat(SHOWN["gemma4"], other).name == "as the model's response template says"
