"""Output that must follow a JSON schema, a regex, a list of choices or a grammar."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from outrider.engine.grammars.grammar_compiler import MAX_COMPILES_AT_ONCE, GrammarCompiler
from outrider.engine.grammars.grammar_messages import Syntax

from ..base.errors import cut, invalid_value, unavailable, unsupported
from ..base.fields import APIRequest
from ..base.off_loop import MANY_CHARS, off_loop

MAX_GRAMMAR_ERROR_CHARS = 300
_SOURCE_LINE = re.compile(r"^ *(\d+ \| .*|\^)$", re.MULTILINE)
# JSON may be indented, but a model that is at a loss would print white space for ever: so a line
# break comes first, and no second one.
WHITESPACE = r"(\r?\n[ \t]{0,20}|[ \t]{1,20})"


def _parsed(value: object) -> object:
    """A schema may also be given as a string of JSON."""
    return from_json(value) if isinstance(value, str) else value


JSONSchema = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Choices = TypeAliasType("Choices", Annotated[list[str], FailFast(), Field(min_length=1)])


class GrammarText(NamedTuple):
    syntax: Syntax
    text: str


Within = Callable[[str], GrammarText]  # makes a grammar of one in Lark

_COUNTS = {
    f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties")
}
# Those that llguidance checks. It refuses others, which JSON Schema takes for annotations.
_CHECKED_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"}
_CHECKED_FORMATS |= {"uri", "uuid"}
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_NO_SCHEMAS = {"const", "enum", "default", "examples"}


def _accepted(schema: Any) -> Any:
    """The schema without keywords that llguidance refuses although they have no effect, and with
    integers for counts that are written as floats.
    """
    if isinstance(schema, list):
        return list(map(_accepted, schema))
    if not isinstance(schema, dict):
        return schema
    accepted: dict[str, Any] = {}
    for key, value in schema.items():
        match key, value:
            case "uniqueItems", False:
                continue
            case "propertyNames", _ if value in ({}, True, {"type": "string"}):
                continue
            case "dependentRequired", _ if value == {}:
                continue
            case "format", str() if value not in _CHECKED_FORMATS:
                continue
            case _, float() if key in _COUNTS and value.is_integer():
                accepted[key] = int(value)
            case _, dict() if key in _MAPS_OF_SCHEMAS:
                accepted[key] = {name: _accepted(each) for name, each in value.items()}
            case _:
                accepted[key] = value if key in _NO_SCHEMAS else _accepted(value)
    return accepted


def json_of_schema(schema: dict[str, Any]) -> str:
    """The JSON values that a schema allows, as an expression in Lark."""
    guidance = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(guidance | _accepted(schema))}"


def lark_of_schema(schema: dict[str, Any]) -> GrammarText:
    """A grammar of the JSON values that a schema allows."""
    return GrammarText("lark", f"start: {json_of_schema(schema)}")


def _lark_of_choices(choices: list[str]) -> str:
    """One terminal for all choices, because a parser considers only some thousands of rules; a
    terminal may not be empty.
    """
    words = " | ".join(json.dumps(choice) for choice in choices if choice)
    if not words:
        return 'start: ""'
    start = "CHOICE?" if "" in choices else "CHOICE"
    return f"start: {start}\nCHOICE: {words}"


class StructuredOutputs(APIRequest):
    r"""vLLM's spelling: one of these fields. In a regex \d and \w are ASCII, as in JSON Schema."""

    model_config = ConfigDict(extra="forbid")

    json_schema: JSONSchema | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        asked = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(field is not None for field in asked) != 1:
            raise ValueError("expected exactly one of json, json_object, regex, choice and grammar")
        return self

    def grammar_text(self) -> GrammarText:
        if self.json_schema is not None:
            return lark_of_schema(self.json_schema)
        if self.regex is not None:
            return GrammarText("regex", self.regex)
        if self.choice is not None:
            return GrammarText("lark", _lark_of_choices(self.choice))
        if self.grammar is not None:
            return GrammarText("gbnf" if "::=" in self.grammar else "lark", self.grammar)
        return lark_of_schema({"type": "object"})


class NamedSchema(APIRequest):
    ignored_fields: ClassVar = frozenset({"description", "strict"})

    name: str | None = Field(default=None, min_length=1)
    json_schema: JSONSchema | None = Field(default=None, alias="schema")  # None: any object


class ResponseFormat(APIRequest):
    """OpenAI's spelling, and llama.cpp's: a schema beside json_object. A schema is followed,
    `strict` or not.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    object_schema: JSONSchema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be provided with type json_schema, and no other")
        if self.object_schema is not None and self.type != "json_object":
            raise ValueError("schema belongs to type json_object, and to no other")
        return self

    def grammar_text(self) -> GrammarText | None:
        if self.type == "text":
            return None
        schema = self.json_schema.json_schema if self.json_schema else self.object_schema or None
        return lark_of_schema({"type": "object"} if schema is None else schema)


class GrammarChecker:
    """Has grammars compiled before the engine gets them. Wrong or huge ones are refused, naming the
    field; the others are returned as Lark. No grammar is parsed in this process.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, *, max_bytes: int, timeout_s: float
    ) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_COMPILES_AT_ONCE)

    @property
    def can_compile(self) -> bool:
        return self._compiler is not None

    async def grammar_of(
        self,
        response_format: ResponseFormat | None,
        structured_outputs: StructuredOutputs | None,
        salt: str,
        num_bytes: int,
        within: Within | None = None,
    ) -> str | None:
        """The grammar of an answer; raises APIError that names the field. `salt` and `within` as in
        `check`; `num_bytes`: of the JSON that they come from.
        """
        text: GrammarText | None = None
        if response_format is not None:
            text = await off_loop(num_bytes, response_format.grammar_text, threshold=MANY_CHARS)
        if structured_outputs is None:
            return await self.check("response_format", text, salt, within) if text else None
        if text:
            raise invalid_value(
                "structured_outputs", "structured_outputs and response_format exclude each other."
            )
        text = await off_loop(num_bytes, structured_outputs.grammar_text, threshold=MANY_CHARS)
        return await self.check("structured_outputs", text, salt, within)

    async def check(
        self, param: str, grammar: GrammarText, salt: str, within: Within | None = None
    ) -> str:
        """The grammar as Lark; raises APIError unless the engine can follow it. `param` is the
        field that it comes from. Only requests with the same salt find what others compiled.
        `within` makes a larger grammar of it.
        """
        if within is not None and grammar.syntax == "lark":
            return await self.check(param, within(grammar.text), salt)
        if within is not None:
            return await self.check(param, within(await self.check(param, grammar, salt)), salt)
        if self._compiler is None:
            raise unsupported(param, f"{param} is not supported with this model's tokenizer.")
        self._check_size(param, grammar.text)
        try:
            await asyncio.wait_for(self._slots.acquire(), self._timeout_s)
        except TimeoutError:
            raise unavailable(
                "Other grammars are being compiled; try again.", code="grammars_busy"
            ) from None
        try:
            compiling = self._compiler.check(*grammar, self._timeout_s, salt)
            verdict = await asyncio.wrap_future(compiling)
        except OSError as error:
            raise unavailable(f"No grammar can be compiled now: {error}") from None
        finally:
            self._slots.release()
        if verdict.timed_out:
            raise invalid_value(
                param,
                f"{param}: compiling it took longer than {self._timeout_s:g} s "
                "(server.grammar_timeout_s); make it smaller.",
            )
        if verdict.error is not None:
            # Without the library's copy of the grammar.
            said = " ".join(_SOURCE_LINE.sub("", verdict.error).split())
            reason = f"{param} cannot be followed"
            message = f"{reason}: {cut(said, MAX_GRAMMAR_ERROR_CHARS)}"
            raise invalid_value(param, message, reason=reason)
        self._check_size(param, verdict.lark)
        return verdict.lark

    def _check_size(self, param: str, grammar: str) -> None:
        if (num_bytes := len(grammar.encode(errors="replace"))) > self._max_bytes:
            raise invalid_value(
                param,
                f"{param}: a grammar of {num_bytes} bytes is too large; this server takes at most "
                f"{self._max_bytes} (server.max_grammar_bytes).",
            )
