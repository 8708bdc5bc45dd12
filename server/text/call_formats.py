"""The formats in which families of models write tool calls and reasoning, as data."""

import re
from dataclasses import dataclass

CALL, END_CALL = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"

Pattern = re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Arguments as tags, one for each parameter."""

    # What a value begins with (groups: key, and perhaps string, "true" or "false"), or how the call
    # ends (no key).
    value: Pattern
    end_value: str
    on_lines: bool = False  # a line break after the tag and before its end is no part of the value
    bare: Pattern | None = None  # a call without arguments, up to its closing marker


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """Arguments as `key: value` or `key=value`, with strings and names that JSON has not."""

    quotes: tuple[str, ...]  # each begins a string, and ends it
    escapes: bool  # whether a backslash in a string has its meaning of Python's
    key: Pattern  # text without quotes that may be a key
    value: Pattern  # the same for a value


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls, starting with one of the markers `open`."""

    shown_by: tuple[str, ...] = ()  # a chat template with all of these uses this format
    model_types: tuple[str, ...] = ()  # models that use it, if their template shows no format
    open: tuple[str, ...] = ()
    close: str | None = None  # None: calls go on to the end
    within: tuple[str, ...] = ()  # markers between the two
    # What a call begins with, up to its arguments. Groups: name, and perhaps id; `object`, if the
    # arguments are within a larger object.
    heads: tuple[Pattern, ...] = ()
    tags: Tags | None = None
    literals: Literals | None = None
    at_start: bool = False  # the whole answer is calls, or none of it
    short_ids: bool = False  # ids of calls must have nine letters and digits
    is_bindable: bool = False  # a grammar can hold calls to schemas, and leave text free

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        marks = (*self.open, *self.within, *((self.close,) if self.close else ()))
        return tuple(mark for mark in marks if len(mark) > 1)

    def is_bare(self, text: str) -> bool:
        """Whether no marker begins this text: only its form makes it a call."""
        return text.lstrip()[:1] in {mark for mark in self.open if len(mark) == 1}


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a family marks the text in which its models think."""

    open: str
    close: str
    shown_by: tuple[str, ...]  # a chat template with one of these uses these markers

    @property
    def tokens(self) -> tuple[str, str]:
        """The markers that are tokens; a text may follow the first."""
        return self.open[: self.open.index(self.close[-1]) + 1], self.close


def _json_head(*open: str) -> Pattern:
    """`{"name": "…", "arguments": {`, maybe after a marker and within a list."""
    markers = "|".join(map(re.escape, open))
    return re.compile(
        rf"[\s,;]*+(?:{markers})?+[\s\[,;]*+"
        r'(?P<object>\{)\s*+"name"\s*+:\s*+"(?P<name>[^"\\]++)"\s*+,'
        r'\s*+"(?:arguments|parameters)"\s*+:\s*+\{'
    )


_NAME = r"(?P<name>[\w.-]++)"
_MISTRAL_HEAD = (
    rf"\s*+(?:\[TOOL_CALLS\])?+\s*+{_NAME}(?:\[CALL_ID\](?P<id>\w++))?+(?:\[ARGS\])?+\s*+\{{"
)
_KIMI_HEAD = (
    r"\s*+(?:<\|tool_calls_section_begin\|>)?+\s*+(?:<\|tool_call_end\|>)?+\s*+<\|tool_call_begin\|>"
    rf"\s*+(?P<id>(?:functions\.)?+{_NAME}(?::\d++)?+)\s*+<\|tool_call_argument_begin\|>\s*+\{{"
)
_DEEPSEEK_HEAD = (
    r"\s*+(?:```)?+\s*+(?:<｜tool▁call▁end｜>)?+\s*+(?:<｜tool▁calls▁begin｜>)?+\s*+"
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    rf"{_NAME}(?:<｜tool▁sep｜>|\s*+```json)\s*+\{{"
)
_QWEN_TAGS = Tags(
    value=re.compile(r"<parameter=(?P<key>[^<>\n]+)>(?:\n|(?=[^\n]))|</function>"),
    end_value="</parameter>",
    on_lines=True,
)
_GLM_TAGS = Tags(
    value=re.compile(r"<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>"),
    end_value="</arg_value>",
    bare=re.compile(r"\s*+(?:<tool_call>)?+\s*+(?P<name>[^\s<>{}\"]++)\s*+"),
)
_DSML_TAGS = Tags(
    value=re.compile(
        r'<｜DSML｜parameter name="(?P<key>[^"\n]+)"(?: string="(?P<string>true|false)")?>'
        r"|</｜DSML｜invoke>"
    ),
    end_value="</｜DSML｜parameter>",
)

ANSWER = CallFormat(at_start=True)  # no calls
LIST = CallFormat(open=("[",), heads=(_json_head(),), at_start=True)
# In this order: the first one that a chat template shows is used.
CALL_FORMATS: dict[str, CallFormat] = {
    "harmony": CallFormat(
        shown_by=("<|channel|>", "<|message|>"),
        model_types=("gpt_oss",),
        within=(
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
    ),
    "gemma4": CallFormat(
        shown_by=("<|tool_call>",),
        model_types=("gemma4", "gemma4_text"),
        open=("<|tool_call>",),
        close="<tool_call|>",
        within=('<|"|>',),
        heads=(re.compile(rf"\s*+(?:<\|tool_call>)?+\s*+call:{_NAME}\s*+(?P<bracket>\{{)"),),
        literals=Literals(
            quotes=('<|"|>',),
            escapes=False,
            key=re.compile(r"[^\[\]{},:<]++|<"),
            value=re.compile(r"[^\[\]{},<]++|<"),
        ),
    ),
    "glm": CallFormat(
        shown_by=(CALL, "<arg_key>"),
        model_types=("glm4_moe", "glm4_moe_lite"),
        open=(CALL,),
        close=END_CALL,
        heads=(
            re.compile(
                r"\s*+(?:<tool_call>)?+\s*+(?P<name>[^\s<>{}\"]++)\s*+(?=<arg_key>|</tool_call>)"
            ),
        ),
        tags=_GLM_TAGS,
    ),
    "qwen_xml": CallFormat(
        shown_by=(CALL, "<function="),
        open=(CALL,),
        close=END_CALL,
        heads=(re.compile(r"\s*+(?:<tool_call>)?+\s*+<function=(?P<name>[^>\n]++)>"),),
        tags=_QWEN_TAGS,
    ),
    "dsml": CallFormat(
        shown_by=("｜DSML｜",),
        model_types=("deepseek_v32",),
        open=("<｜DSML｜function_calls>",),
        close="</｜DSML｜function_calls>",
        heads=(
            re.compile(
                r'\s*+(?:<｜DSML｜function_calls>)?+\s*+<｜DSML｜invoke name="(?P<name>[^"\n]++)">'
            ),
        ),
        tags=_DSML_TAGS,
    ),
    "deepseek": CallFormat(
        shown_by=("<｜tool▁calls▁begin｜>",),
        model_types=("deepseek_v3",),
        open=("<｜tool▁calls▁begin｜>",),
        close="<｜tool▁calls▁end｜>",
        within=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        heads=(re.compile(_DEEPSEEK_HEAD),),
    ),
    "kimi": CallFormat(
        shown_by=("<|tool_calls_section_begin|>",),
        model_types=("kimi_k2",),
        open=("<|tool_calls_section_begin|>",),
        close="<|tool_calls_section_end|>",
        within=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        heads=(re.compile(_KIMI_HEAD),),
    ),
    "granite": CallFormat(
        shown_by=("<|tool_call|>",),
        open=("<|tool_call|>",),
        heads=(_json_head("<|tool_call|>"),),
    ),
    "hermes": CallFormat(
        shown_by=(CALL,),
        open=(CALL,),
        close=END_CALL,
        heads=(_json_head(CALL),),
        is_bindable=True,
    ),
    "mistral": CallFormat(
        shown_by=("[TOOL_CALLS]",),
        open=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        heads=(_json_head("[TOOL_CALLS]"), re.compile(_MISTRAL_HEAD)),
        short_ids=True,
    ),
    "llama4": CallFormat(
        shown_by=("<|python_start|>",),
        model_types=("llama4", "llama4_text"),
        open=("<|python_start|>", "[", "{"),
        close="<|python_end|>",
        heads=(
            _json_head("<|python_start|>"),
            re.compile(
                r"[\s,]*+(?:<\|python_start\|>)?+[\s\[,]*+(?P<name>[A-Za-z_][\w.]*+)\s*+(?P<bracket>\()"
            ),
        ),
        literals=Literals(
            quotes=('"', "'"),
            escapes=True,
            key=re.compile(r"[^\[\](){},:='\"]++"),
            value=re.compile(r"[^\[\](){},'\"]++"),
        ),
        at_start=True,
    ),
    "llama3_json": CallFormat(
        shown_by=('"parameters": ',),
        open=("<|python_tag|>", "{"),
        heads=(_json_head("<|python_tag|>"),),
        at_start=True,
    ),
}
# The first is used if the settings say that the model reasons, and no template shows how.
THOUGHTS = (
    Thoughts(THINK, END_THINK, (THINK, END_THINK)),
    Thoughts("[THINK]", "[/THINK]", ("[THINK]",)),
    Thoughts("<|channel>thought\n", "<channel|>", ("<channel|>",)),
)


def shown_format(chat_template: str, model_type: str) -> str | None:
    """The name of the first format whose marks are all in the template; else that of the model's
    type.
    """
    shown = [n for n, f in CALL_FORMATS.items() if all(m in chat_template for m in f.shown_by)]
    typed = [name for name, f in CALL_FORMATS.items() if model_type in f.model_types]
    return next(iter(shown + typed), None)


def shown_thoughts(chat_template: str) -> Thoughts | None:
    return next((t for t in THOUGHTS if any(mark in chat_template for mark in t.shown_by)), None)
