"""Output that must follow a JSON schema, a regex, a list of choices or a grammar."""

import asyncio
import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from outrider.engine.grammar_compiler import GrammarCompiler
from outrider.server.errors import APIError, cut, invalid_value, unsupported
from outrider.server.fields import APIRequest

MAX_REASON_CHARS = 300
_SOURCE_LINE = re.compile(r"^ *(\d+ \| .*|\^)$", re.MULTILINE)
# JSON may be laid out, but a model that does not know how to go on shall not print spaces for ever.
WHITESPACE = r"[ \t\r\n]{1,64}"


def _parsed(value: object) -> object:
    """A schema may come as a text that says it."""
    return from_json(value) if isinstance(value, str) else value


JSONSchema = Annotated[dict[str, Any], BeforeValidator(_parsed)]
Choices = TypeAliasType("Choices", Annotated[list[str], FailFast(), Field(min_length=1)])


class StructuredOutputs(APIRequest):
    """vLLM's spelling: one of these. Digits and words of a regex are ASCII, as in JSON Schema."""

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

    def to_lark(self) -> str | None:
        if self.json_schema is not None:
            return lark_of_schema(self.json_schema)
        if self.regex is not None:
            return f"start: /{regex_to_lark(self.regex, use_ascii='dw')}/"
        if self.choice is not None:
            return "start: " + " | ".join(map(json.dumps, self.choice))
        if self.grammar is not None:
            return gbnf_to_lark(self.grammar) if "::=" in self.grammar else self.grammar
        return lark_of_schema({"type": "object"}) if self.json_object else None


class NamedSchema(APIRequest):
    ignored_fields: ClassVar = frozenset({"description", "strict"})

    name: str | None = Field(default=None, min_length=1)
    json_schema: JSONSchema = Field(default_factory=dict, alias="schema")


class ResponseFormat(APIRequest):
    """OpenAI's spelling, and llama.cpp's of a schema beside json_object. A schema is followed
    whether `strict` or not."""

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

    def to_lark(self) -> str | None:
        if self.json_schema is not None:
            return lark_of_schema(self.json_schema.json_schema)
        if self.type == "text":
            return None
        return lark_of_schema(self.object_schema or {"type": "object"})


def lark_of_schema(schema: dict[str, Any]) -> str:
    """A grammar of the JSON values that a schema admits."""
    guidance = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"start: %json {json.dumps(guidance | schema)}"


class GrammarChecker:
    """Compiles grammars before the engine sees them, so that it sees none that is wrong or vast."""

    def __init__(
        self, compiler: GrammarCompiler | None, *, max_bytes: int, timeout_s: float
    ) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def grammar_of(
        self,
        response_format: ResponseFormat | None,
        structured_outputs: StructuredOutputs | None,
    ) -> str | None:
        """What an answer must follow; raises APIError that names the field."""
        texts: dict[str, str] = {}
        for param, asked in (
            ("response_format", response_format),
            ("structured_outputs", structured_outputs),
        ):
            if asked is not None and (text := await self._to_lark(param, asked)) is not None:
                texts[param] = text
        if len(texts) > 1:
            raise invalid_value(
                "structured_outputs", "structured_outputs and response_format exclude each other."
            )
        for param, text in texts.items():
            await self.check(param, text)
            return text
        return None

    async def check(self, param: str, lark: str) -> None:
        """Raise APIError unless the engine can follow this grammar; `param` is where it is from."""
        if self._compiler is None:
            raise unsupported(param, f"{param} is not supported with this model's tokenizer.")
        self._check_size(param, lark)
        try:
            async with asyncio.timeout(self._timeout_s):
                grammar = await asyncio.wrap_future(self._compiler.start(lark))
        except TimeoutError:
            raise invalid_value(
                param,
                f"{param}: compiling it took longer than {self._timeout_s:g} s "
                "(server.grammar_timeout_s); make it smaller.",
            ) from None
        if grammar.error is not None:
            raise _cannot_follow(param, grammar.error)

    async def _to_lark(self, param: str, asked: ResponseFormat | StructuredOutputs) -> str | None:
        if isinstance(asked, StructuredOutputs) and asked.grammar is not None:
            self._check_size(param, asked.grammar)
        try:
            return await asyncio.to_thread(asked.to_lark)
        except Exception as error:  # GBNF that is none, or is nested too deeply to be read
            raise _cannot_follow(param, str(error)) from None

    def _check_size(self, param: str, grammar: str) -> None:
        if (num_bytes := len(grammar.encode(errors="replace"))) > self._max_bytes:
            raise invalid_value(
                param,
                f"{param}: a grammar of {num_bytes} bytes is too large; this server takes at most "
                f"{self._max_bytes} (server.max_grammar_bytes).",
            )


def _cannot_follow(param: str, reason: str) -> APIError:
    """400, with the library's reason but not its copy of the grammar."""
    said = " ".join(_SOURCE_LINE.sub("", reason).split())
    return invalid_value(param, f"{param} cannot be followed: {cut(said, MAX_REASON_CHARS)}")
