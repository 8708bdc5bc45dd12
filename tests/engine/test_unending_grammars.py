"""What derives no finite text is refused, whoever wrote it and wherever it stands."""

import json
from itertools import pairwise
from typing import Any

import pytest

from outrider.engine.config import TokenTable
from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.grammars.unending import unending_part

EOS = 256
TOKENS = TokenTable(
    token_bytes=(*(bytes([i]) for i in range(256)), b"<eos>"), special_token_ids=(EOS,)
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENS, (EOS,), len(TOKENS.token_bytes))


def error(compiler: GrammarCompiler, text: str) -> str | None:
    return compiler.check("gbnf" if "::=" in text else "lark", text, 10).result().error


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("start: start", "start"),
        ("start: a\na: b\nb: a", "a"),
        ('start: "x" a\na: "y" b\nb: "z" a', "a"),
        ('start: "x" | "y" a // the other "x"\na: a "z"', "a"),
        ('start: "x" a?\na: ("y" | "z") [a] a+', "a"),
        ('start: "x" a{0,3}\na: "]" (a | b)\n\n  | "/" b\nb: a{2,3} -> c', "a"),
        ('start: A b*\nA: /[)"]/i "\\"("\n!b: b ["#"] | ("y" b)', "b"),
        ('start: a::0\na::_ : "x" a::incr(_) %if lt(_, 9)', "a"),
        ('start: "x" %lark {\n start: "(" a ")"\n a: start\n}', "start"),
        ('start: "x" a\na: %json {"type":\n "integer"} a', "a"),
        ('root ::= "x" a\na ::= "y" a', "a"),
    ],
)
def test_rules_that_only_lead_to_themselves(
    compiler: GrammarCompiler, text: str, name: str
) -> None:
    assert error(compiler, text) == f"the rule {name!r} derives no finite text"


@pytest.mark.parametrize(
    "text",
    [
        'start: "x"\na: a',
        'start: "x" | start "y" | start start',
        'start: "x" a?\na: "y" a?',
        'start: "x" a*\na: "(" a{0,3} ")" [a] a~0..2 | a',
        'start: a\na: "b" | c::0\nc::_: "(" a ")" | "x" c::incr([0:3]) %if lt([0:3], 2)',
        'start: a\na: a ("," a)* |',
        "start: a\na: ( )\n",
        'start: A\n%import common.INT\nA: INT | "i"i\n%ignore / /',
        'start: b\na: c "0"\nb: %lark {\n start: a\n a: "1"{1,2}\n} | a\nc: a | "2"',
        'start: a\na: %regex {"substring_words": "a b"} | "(" a ")"',
        'root ::= a*\na ::= "(" root ")" | [a-z]',
    ],
)
def test_rules_that_can_come_to_an_end(compiler: GrammarCompiler, text: str) -> None:
    assert error(compiler, text) is None


def of_schema(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(schema)


# References to each other, of which another place of a schema makes use.
CIRCLE = {
    "$defs": {
        "start": {"$ref": "#/$defs/a"},
        "a": {"$ref": "#/$defs/b~1c~0"},
        "b/c~": {"$ref": "#/$defs/a"},
    }
}
# The same through combinators.
COMBINED = {
    "$defs": {
        "any": {"anyOf": [{"$ref": "#/$defs/any"}]},
        "all": {"allOf": [{"oneOf": [{"$ref": "#/$defs/one"}]}]},
        "one": {"anyOf": [{"$ref": "#/$defs/all"}, {"anyOf": [{"$ref": "#/$defs/one"}]}]},
    }
}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"anyOf": [False, {"$ref": "#"}]}, "#"),
        ({"items": {"oneOf": [{"$ref": "#/items"}, False]}}, "#/items"),
        (CIRCLE | {"properties": {"x": {"$ref": "#/$defs/start"}}}, "#/$defs/a"),
        ({"items": {"anyOf": [{}, {"$ref": "#/%69tems/anyOf/1"}]}}, "#/%69tems/anyOf/1"),
        (COMBINED | {"items": {"$ref": "#/$defs/any"}}, "#/$defs/any"),
        (COMBINED | {"patternProperties": {"a": {"$ref": "#/$defs/all"}}}, "#/$defs/all"),
        ({"items": {"$ref": "#a"}, "$defs": {"a": {"$anchor": "a", "$ref": "#a"}}}, "#a"),
        (
            {"items": {"$ref": "http://b/a"}, "$defs": {"a": {"$id": "http://b/a", "$ref": "a"}}},
            "http://b/a",
        ),
        ({"$id": "http://b/a", "items": {"$ref": "a#/items"}}, "a#/items"),
        ({"$id": "http://b/a", "items": {"$ref": "http://b/a#/items"}}, "http://b/a#/items"),
        ({"$id": "urn:b:a", "items": {"$ref": "urn:b:a#/items"}}, "urn:b:a#/items"),
        ({"items": {"$id": "http://b/a", "$ref": "#"}}, "#"),
        ({"items": {"$ref": "json-schema:///#/items"}}, "json-schema:///#/items"),
        (DRAFT_7 | {"items": [{"$id": "#a", "$ref": "#a"}]}, "#a"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": ["array"], "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "#"),
    ],
)
def test_schemas_that_only_lead_to_themselves(
    compiler: GrammarCompiler, schema: dict[str, Any], reference: str
) -> None:
    said = f"the reference {reference!r} derives no finite text"
    assert error(compiler, of_schema(schema)) == said


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"} | CIRCLE,
        {"const": {"$ref": "#/const"}},
        {"type": "object", "properties": {"$ref": {"type": "integer"}, "$id": {}}},
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"anyOf": [{"type": "integer"}, {"$ref": "#"}]},
        {"allOf": [{"type": "array", "items": {"$ref": "#"}}]},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"oneOf": [{"type": "integer"}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "integer"}}},
        {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "integer"}}},
        {"$id": "http://b/c/", "$ref": "a", "$defs": {"a": {"$id": "a", "type": "integer"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {
            "type": "object",
            "patternProperties": {"a": {"type": "integer"}},
            "additionalProperties": {"$ref": "#"},
            "required": ["a"],
        },
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1},
        {"properties": {"a": False}, "additionalProperties": False},
    ],
)
def test_schemas_that_can_come_to_an_end(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert error(compiler, of_schema(schema)) is None


def test_thousands_of_references_are_checked_at_once() -> None:
    names = [f"d{i}" for i in range(4_000)]
    chain: dict[str, Any] = {
        name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)
    } | {names[-1]: {"type": "integer"}}
    schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": chain}
    assert unending_part(of_schema(schema)) is None
    chain[names[-1]] = {"$ref": "#/$defs/d7"}
    assert unending_part(of_schema(schema)) is not None
