"""`tool_choice`: whether an answer may, must or must not call tools, and which."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag

from ..base.content import type_of
from ..base.errors import cut, invalid_value, unsupported
from ..base.fields import MAX_TOOLS, APIRequest
from ..text.call_formats import CALL, END_CALL, END_THINK, THINK
from .structured_outputs import WHITESPACE, GrammarText, json_of_schema
from .thoughts import text_without

INPUT = "input"  # the name of a custom tool's text in a call


class NamedFunction(APIRequest):
    name: str = Field(min_length=1)


class NamedTool(APIRequest):
    """One tool by name; a subclass for each kind."""

    @property
    @abstractmethod
    def name(self) -> str: ...


class NamedFunctionTool(NamedTool):
    type: Literal["function"] = "function"
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(NamedTool):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


NamedToolOfAKind = Annotated[
    Annotated[NamedFunctionTool, Tag("<function>")] | Annotated[NamedCustomTool, Tag("<custom>")],
    Discriminator(lambda value: "<custom>" if type_of(value) == "custom" else "<function>"),
]


class ToolsToChooseFrom(APIRequest):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolOfAKind], FailFast(), Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(APIRequest):
    type: Literal["allowed_tools"]
    allowed_tools: ToolsToChooseFrom


def _kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "<mode>"
    return "<allowed>" if type_of(value) == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedToolOfAKind, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Which tools an answer may call.

    `tools` are functions. A tool that takes a text is a function with this text as only argument.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)  # tools shown in the prompt
    required: bool = False
    most: int | None = None
    free_text: frozenset[str] = frozenset()  # names of tools that take a text
    input_grammar: GrammarText | None = None  # of the text, which is then the whole answer


def choose(choice: ToolChoice, tools: Sequence[dict[str, Any]], *, parallel: bool) -> Calls:
    """The tools that the choice leaves; raises APIError if it names a tool that is not there.

    A grammar for a tool's input can be followed only if the answer is nothing but that input.
    """
    by_name = isinstance(choice, NamedTool)
    named: dict[str, None] | None = None  # in the order of the choice; None: all tools
    required = by_name or choice == "required"
    match choice:
        case "none":
            return Calls()
        case NamedTool():
            named = {choice.name: None}
        case AllowedTools():
            named = dict.fromkeys(tool.name for tool in choice.allowed_tools.tools)
            required = choice.allowed_tools.mode == "required"
    if choice != "auto" and not tools:
        raise invalid_value("tool_choice", "tool_choice asks for a call, and there are no tools.")
    chosen = [tool for tool in tools if named is None or _name(tool) in named]
    if missing := (named or {}).keys() - {_name(tool) for tool in chosen}:
        name = next(name for name in named or () if name in missing)
        raise invalid_value(
            "tool_choice", f"tool_choice names {cut(name)!r}, which is not among the tools."
        )
    grammars = {_name(tool): text for tool in chosen if (text := _input_grammar(tool)) is not None}
    alone = required and len(chosen) == 1 and (named is not None or not parallel)
    if grammars and not alone:
        raise unsupported(
            "tools",
            f"The input of {next(iter(grammars))!r} is to follow a grammar. That can be done only "
            "if tool_choice names this tool; or leave the grammar out.",
        )
    functions = list(map(as_function, chosen))
    return Calls(
        tools=functions,
        shown=functions if isinstance(choice, AllowedTools) else list(map(as_function, tools)),
        required=required,
        most=1 if by_name or not parallel else None,
        free_text=frozenset(_name(tool) for tool in chosen if tool["type"] == "custom"),
        input_grammar=next(iter(grammars.values()), None),
    )


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a function: templates and call formats know nothing else."""
    if tool["type"] == "function":
        return tool
    description = str(tool["custom"].get("description") or "")
    if (grammar := _input_grammar(tool)) is not None:
        description += f"\n\nThe input must follow this {grammar.syntax}:\n{grammar.text}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {
        "name": tool["custom"]["name"],
        "description": description.strip(),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _name(tool: dict[str, Any]) -> str:
    return str(tool[tool["type"]]["name"])


def _input_grammar(tool: dict[str, Any]) -> GrammarText | None:
    match tool:
        case {
            "type": "custom",
            "custom": {
                "format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": text}}
            },
        }:
            return GrammarText(syntax, text)
    return None


def calls_grammar(tools: list[dict[str, Any]], *, several: bool) -> GrammarText:
    """A grammar of JSON lists of at least one call to these tools.

    The schema of each tool stays a schema of its own: its references start at its root.
    """
    more = '(WS? "," WS? call)*' if several else ""
    start = f'start: "[" WS? call {more} WS? "]"'
    return _grammar_of_calls([start], [tool["function"] for tool in tools])


def text_and_calls_grammar(
    tools: list[dict[str, Any]], *, reasons: bool, begun: bool
) -> GrammarText:
    """A grammar of answers in Hermes's format, whose markers are tokens. Only the arguments for
    strict tools must follow a schema. With `begun`, the answer begins within the reasoning.
    """
    functions = [tool["function"] for tool in tools]
    text, thought = f"TEXT: {text_without(CALL)}", ""
    if reasons:
        text += f" & {text_without(THINK)}"
        thought = f"{THINK} THOUGHT? {END_THINK} | "
    rules = [
        f"start: THOUGHT? {END_THINK} said" if begun else "start: said",
        f"said: TEXT? (({thought}{CALL} WS? call WS? {END_CALL}) TEXT?)*",
        text,
        f"THOUGHT: {text_without(END_THINK)}",
    ]
    bound = [each if each.get("strict") is True else {"name": each["name"]} for each in functions]
    return _grammar_of_calls(rules, bound)


def _grammar_of_calls(rules: list[str], functions: list[dict[str, Any]]) -> GrammarText:
    """These rules, and a rule `call` for one call to any of these functions."""
    rules = [
        *rules,
        r'call: "{" WS? "\"name\"" WS? ":" WS? named WS? "}"',
        "named: " + "\n    | ".join(map(_named_call, functions)),
        f"WS: /{WHITESPACE}/",
    ]
    return GrammarText("lark", "\n".join(rules))


def _named_call(function: dict[str, Any]) -> str:
    """A call from its name on."""
    # A schema without a type allows any value, but arguments are an object.
    parameters = {**(function.get("parameters") or {}), "type": "object"}
    # Allow only the arguments that the function knows, if one place names them all.
    if "properties" in parameters and parameters.keys().isdisjoint(_MORE_PROPERTIES):
        parameters = {"additionalProperties": False} | parameters
    name = json.dumps(json.dumps(function["name"], ensure_ascii=False))
    return rf'{name} WS? "," WS? "\"arguments\"" WS? ":" WS? {json_of_schema(parameters)}'


_MORE_PROPERTIES = ("allOf", "anyOf", "oneOf", "$ref")  # may declare some, too
