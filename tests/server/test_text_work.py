"""Whatever a model writes or a client sends, the work for its text grows no faster than the text.

Work is counted, not timed: characters that are examined or copied, and tokens that are decoded.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from message_parts import joined

from outrider.server.api import input_items
from outrider.server.api.input_items import CustomCallItem, Item, MessageItem, ReasoningItem
from outrider.server.api.messages_protocol import (
    AnthropicMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
)
from outrider.server.base.content import TextPart, text_of
from outrider.server.text import (
    call_formats,
    call_stream,
    message_parser,
    response_template,
    tool_calls,
)
from outrider.server.text.detokenizer import Detokenizer, StopStrings
from outrider.server.text.message_format import MessageFormat
from outrider.server.text.message_parser import Text
from outrider.server.text.tokenizer import Tokenizer
from outrider.server.text.tool_calls import ToolCall, tools_by_name

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
FORMATS = ["hermes", "qwen_xml", "mistral", "llama3_json"]
OPENED = {
    "hermes": '<tool_call>{"name": "',
    "qwen_xml": "<tool_call><function=weather>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": "{",
}
ARGUMENTS = {  # a call that has begun
    "hermes": '<tool_call>{"name": "weather", "arguments": {',
    "qwen_xml": "<tool_call><function=weather><parameter=a>",
    "mistral": "[TOOL_CALLS]weather{",
    "llama3_json": '{"name": "weather", "parameters": {',
}
CLOSED = {"hermes": "</tool_call>", "qwen_xml": "</function></tool_call>"}
LOOPS = [
    "\n",
    " x",
    "<",
    "<think>",
    "</think>",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<parameter=",
    "<parameter=a>",
    "<parameter=\n",
    "<parameter=a></parameter>",
    "</function>",
    "[TOOL_CALLS]",
    "[",
    "{}",
    '{"name": "weather", "arguments": {}},',
    '{"a":',
    '{"name": "weather"};',
    '"',
]


class Work:
    """Counts characters."""

    def __init__(self) -> None:
        self.num_chars = 0

    def text(self, value: Any) -> Any:
        """The same, counting what is done to it and to all that is made of it."""
        if isinstance(value, str):
            counted = Counted(value)
            counted.work = self
            return counted
        if isinstance(value, list | tuple):
            return type(value)(map(self.text, value))
        return value


class Counted(str):
    work: Work


def _counting(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def counted(self: Counted, *args: Any) -> Any:
        result = method(self, *args)
        of_result = name in ("__getitem__", "startswith", "endswith", "find")
        if name == "find":
            end = len(self) if result < 0 else result
            self.work.num_chars += 1 + end - (args[1] if len(args) > 1 else 0)
        elif of_result:
            self.work.num_chars += len(result) if isinstance(result, str) else 1
        else:
            self.work.num_chars += len(self) + sum(len(arg) for arg in args if arg)
        return self.work.text(result)

    return counted


for _name in (
    *("__add__", "__getitem__", "find", "isspace", "lstrip", "rstrip", "strip", "split"),
    *("partition", "removeprefix", "removesuffix", "startswith", "endswith"),
):
    setattr(Counted, _name, _counting(_name))
setattr(Counted, "__radd__", lambda self, other: self.work.text(other) + self)  # noqa: B010


class CountedPattern:
    """A pattern, or what stands for one, that counts the characters it is given."""

    def __init__(self, pattern: Any, work: Work, also: Callable[[], int] = lambda: 0) -> None:
        self._pattern, self._work, self._also = pattern, work, also

    @property
    def pattern(self) -> str:
        return str(self._pattern.pattern)

    def finditer(self, text: str) -> Iterable[Any]:
        self._work.num_chars += len(text)
        return self._pattern.finditer(text)  # type: ignore[no-any-return]

    def match(self, text: str, at: int, *end: int) -> Any:
        found = self._pattern.match(text, at, *end)
        self._work.num_chars += 1 + (found.end() if found else min([len(text), *end])) - at
        return found

    def search(self, text: str, at: int, *end: int, **kw: Any) -> Any:
        found = self._pattern.search(text, at, *end, **kw)
        if kw:
            self._work.num_chars += len(text) + self._also()  # the whole of it has been copied
        else:
            self._work.num_chars += 1 + (found.end() if found else min([len(text), *end])) - at
        return found


def grows_with(work_of: Callable[[int], int], size: int) -> None:
    """Twice the input is twice the work; cubes and squares are far beyond that."""
    once, twice = work_of(size), work_of(2 * size)
    assert once >= min(size, 1000) / 2  # it was counted
    assert twice <= 2.5 * once, (once, twice)


def pieces_of(text: str, size: int) -> Iterable[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 10**9], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", FORMATS)
def test_taking_an_answer_apart(monkeypatch: pytest.MonkeyPatch, name: Any, size: int) -> None:
    def work_of(text: str) -> int:
        work = Work()
        with monkeypatch.context() as patch:
            form = call_formats.CALL_FORMATS[name]
            counted = CountedPattern(tool_calls.between(form), work)
            patch.setattr(tool_calls, "between", lambda form: counted)
            for pattern in ("_OUTSIDE", "_IN_STRING"):
                patch.setattr(
                    call_stream, pattern, CountedPattern(getattr(call_stream, pattern), work)
                )
            heads: Any = tuple(CountedPattern(head, work) for head in form.heads)
            tags = form.tags
            if tags is not None:
                tags = replace(tags, value=CountedPattern(tags.value, work))  # type: ignore[arg-type]
            patch.setitem(call_formats.CALL_FORMATS, name, replace(form, heads=heads, tags=tags))
            patch.setattr(call_stream, "MAX_HEAD_CHARS", 64)  # so much is read again and again
            parser: Any = MessageFormat("", name=name, reasoning=True).parser(
                "", tools_by_name([WEATHER])
            )
            parser._pattern = CountedPattern(parser._pattern, work)
            patch.setattr(
                message_parser,
                "json_calls",
                lambda form, text, tools: tool_calls.json_calls(form, work.text(text), tools),
            )
            for piece in pieces_of(text, size):
                parser.push(work.text(piece))
            parser.flush()
        return work.num_chars

    for loop in LOOPS:
        for begun in ("", OPENED[name], ARGUMENTS[name]):
            ended = CLOSED.get(name, "") if begun else ""
            grows_with(lambda n, b=begun, x=loop, e=ended: work_of(b + x * (n // len(x)) + e), 120)


OWN: dict[str, Any] = {
    "start_anchor": "<a>",
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


class CountedSchema(dict[str, Any]):
    """Counts how often it is looked at."""

    looks = 0

    def get(self, *args: Any) -> Any:
        type(self).looks += 1
        return super().get(*args)


@pytest.mark.parametrize("kinds", ["anyOf", "oneOf", "allOf", "type"])
@pytest.mark.parametrize("form", [MessageFormat("", name="qwen_xml"), MessageFormat("", OWN)])
def test_the_schema_of_a_parameter_is_read_once_and_not_to_its_end(
    form: MessageFormat, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountedSchema, "looks", 0)
    many: list[Any] = [CountedSchema(type="integer")] * 10_000
    schema = CountedSchema({kinds: ["integer"] * 10_000 if kinds == "type" else many})
    function = {"name": "weather", "parameters": {"properties": {"a": schema}}}
    tools = tools_by_name([{"type": "function", "function": function}])
    call = (
        f"<tool_call><function=weather>{'<parameter=a>5</parameter>' * 30}</function></tool_call>"
    )
    for _ in range(3):
        parser = form.parser("<a>", tools)
        assert parser is not None
        (said,) = joined([*parser.push(call), *parser.flush()])
        assert isinstance(said, ToolCall)
        assert '"a": 5' in said.arguments
    assert CountedSchema.looks < 10 * tool_calls.MAX_SCHEMAS


@pytest.mark.parametrize("size", [16, 10**9], ids=["streamed", "whole"])
def test_taking_an_answer_apart_by_a_template_of_the_model(size: int) -> None:
    def work_of(text: str) -> int:
        work = Work()
        parser: Any = MessageFormat("", OWN, reasoning=True).parser("<a>", tools_by_name([WEATHER]))
        inner = parser._parser
        for field in inner._spec.fields.values():
            for name in ("open_re", "close_re"):
                if getattr(field, name) is not None:
                    counted = CountedPattern(
                        getattr(field, name), work, also=lambda: len(inner._body)
                    )
                    setattr(field, name, counted)
        for piece in pieces_of(text, size):
            parser.push(piece)
        parser.flush()
        return work.num_chars

    for loop in ("\n", "x", "<", "<tool_call>", "<tool_call><function=a></tool_call>"):
        for begun in ("", "<think>", "<tool_call><function=weather>"):
            grows_with(lambda n, b=begun, x=loop: work_of(b + x * (n // len(x))), 40_000)


def parts_of(form: MessageFormat, text: str, size: int = 5) -> list[Any]:
    parser = form.parser("<a>", tools_by_name([WEATHER]))
    assert parser is not None
    parts = [part for piece in pieces_of(text, size) for part in parser.push(piece)]
    return parts + parser.flush()


def said(parts: list[Any]) -> str:
    assert all(isinstance(part, Text) for part in parts)
    return "".join(part.text for part in parts)


def test_pattern_of_a_template_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would take seconds, and minutes for an answer ten times as long.
    monkeypatch.setattr(response_template, "MAX_TAGS_S", 0.01)
    body = "<parameter=a>" * 8000
    assert said(parts_of(MessageFormat("", OWN), f"<tool_call><function=weather>{body}", 999)) == (
        body
    )


def test_strings_with_delimiters_of_their_own_are_read_once() -> None:
    args = {"string_delims": [["<|", "|>"]], "unquoted_keys": True}
    work = Work()
    text = work.text("[" + ",".join(["{a:<|b:c|>}"] * 500) + "]")
    assert response_template._json(text, args) == [{"a": "b:c"}] * 500
    assert work.num_chars < 4 * len(text)
    with pytest.raises(ValueError, match="Expecting"):
        response_template._json("<|" * 500, args)
    assert response_template._json(" a ", args | {"allow_non_json": True}) == "a"


DEEP = '{"a":' * 5000


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_a_call_that_is_nested_too_deeply_is_content(name: Any) -> None:
    text = OPENED[name] + '"a":' * (name == "llama3_json") + DEEP
    assert said(parts_of(MessageFormat("", name=name), text)) == text


@pytest.mark.parametrize("written", [DEEP, "3", "[1]", "null", '{"function": 3}', "a\nlog line"])
def test_what_a_template_cannot_read_is_content_and_not_logged(
    caplog: pytest.LogCaptureFixture, written: str
) -> None:
    calls = {"open": "<c>", "close": ["</c>", "</d>"], "repeats": True, "content": "json"}
    own = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": calls}}
    assert said(parts_of(MessageFormat("", own), f"<c>{written}</c>")) == written + "</c>"
    assert written[:9] not in caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_make_no_difference_and_nothing_is_lost(name: Any) -> None:
    rng = random.Random(name)
    form = MessageFormat("", name=name, reasoning=True)
    pieces = [*LOOPS, "é", "{", "}", "]", "</tool_call>", "</parameter>", "<|python_tag|>", "3;"]
    for _ in range(150):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 9)))
        whole = joined(parts_of(form, text, 10**9))
        assert joined(parts_of(form, text, rng.randint(1, 9))) == whole
        if "<think>" not in text and all(isinstance(part, Text) for part in whole):
            assert said(whole) == text


@pytest.mark.parametrize("size", [1, 3, 10**9])
def test_stop_strings(size: int) -> None:
    def work_of(num_chars: int) -> int:
        work = Work()
        matcher = StopStrings([work.text("a" * 20 + end) for end in "bcd"], include=False)
        text = "a" * num_chars
        pieces = map(work.text, pieces_of(text, size))
        assert "".join(map(matcher.push, pieces)) + matcher.flush() == text
        return work.num_chars

    grows_with(work_of, 500)


# ---- conversations as clients send them


def num_chars_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(num_chars_in, value.values()))
    return sum(map(num_chars_in, value)) if isinstance(value, list) else len(value)


ITEMS: dict[str, Item] = {
    "text": MessageItem(role="assistant", content="ab"),
    "no text": MessageItem(role="assistant", content=""),
    "thought": ReasoningItem(
        type="reasoning", content=[TextPart(type="reasoning_text", text="ab")]
    ),
    "call": CustomCallItem(type="custom_tool_call", call_id="1", name="note", input="ab"),
}


@pytest.mark.parametrize(
    "kinds",
    [["text"], ["thought"], ["no text", "thought"], ["thought", "text"], ["text", "call"]],
    ids=", ".join,
)
def test_joining_items_of_a_conversation(monkeypatch: pytest.MonkeyPatch, kinds: list[str]) -> None:
    def work_of(num_items: int) -> int:
        work = Work()
        with monkeypatch.context() as patch:
            patch.setattr(input_items, "text_of", lambda content: work.text(text_of(content)))
            messages = input_items.chat_messages([ITEMS[kind] for kind in kinds] * num_items)
        return num_chars_in(messages) + work.num_chars

    grows_with(work_of, 300)


BLOCKS: dict[str, Callable[[str], Any]] = {
    "text": lambda text: TextBlock.model_construct(type="text", text=text),
    "thought": lambda text: ThinkingBlock.model_construct(type="thinking", thinking=text),
    "result": lambda text: ToolResultBlock.model_construct(tool_use_id="1", content=text),
}


@pytest.mark.parametrize(
    "kinds", [["text"], ["thought"], ["thought", "text", "result"]], ids=", ".join
)
def test_joining_blocks_of_a_message(kinds: list[str]) -> None:
    def work_of(num_blocks: int) -> int:
        work = Work()
        blocks = [BLOCKS[kind](work.text("ab")) for _ in range(num_blocks) for kind in kinds]
        message = AnthropicMessage.model_construct(role="assistant", content=blocks)
        return num_chars_in(list(message.turns())) + work.num_chars

    grows_with(work_of, 300)


# ---- tokens to text

RUNS = [b"\xc3", b"\xe0\xa0", b"\xf0\x9f\x99", b"\xef\xbf\xbd", b"\x80", b"\xff", "é".encode()]


def ids_of(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """One token a byte."""
    byte_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.backend.get_vocab_size())}
    return [byte_of[bytes([byte])] for byte in text]


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, [], skipped_ids=frozenset())
    return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["tokenizer", "byte_fallback"])
def test_decoding(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kind: str, run: bytes
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    decode = tokenizer.decode

    def work_of(num_tokens: int) -> int:
        counts: list[int] = []

        def counting(token_ids: list[int], **kw: Any) -> str:
            counts.append(len(token_ids))
            return decode(token_ids, **kw)

        ids = ids_of(tokenizer, run * (num_tokens // len(run)))
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "decode", counting)
            text = decoded(tokenizer, ids)
        assert text == decode(ids, skip_special_tokens=False)
        return sum(counts)

    grows_with(work_of, 300)


def test_any_bytes_have_the_text_of_all_at_once(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    vocab_size = tokenizer.backend.get_vocab_size()
    for _ in range(200):
        runs = (rng.choice(RUNS) * rng.choice([1, 2, 30]) for _ in range(rng.randint(1, 4)))
        ids = ids_of(tokenizer, b"".join(runs))
        for _ in range(rng.randrange(3)):
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(vocab_size))
        assert decoded(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_calls_keep_their_arguments() -> None:
    # What was changed to be linear still reads what models write.
    xml = (
        "<tool_call>\n<function=weather>\n<parameter=a>\nx > y\n<b>\n</parameter>\n"
        "<parameter=\n<parameter=b>\n\n1\n</parameter></function>\n</tool_call>"
    )
    (call,) = joined(parts_of(MessageFormat("", name="qwen_xml"), xml))
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": "x > y\n<b>", "b": "\n1"}
    mistral = '[TOOL_CALLS] weather[CALL_ID]x1[ARGS]{"a": "{"}[TOOL_CALLS][{"name": "f"}]'
    calls = joined(parts_of(MessageFormat("", name="mistral"), mistral))
    assert calls == [ToolCall("weather", '{"a": "{"}'), ToolCall("f", "{}")]
