"""JSON schemas and regexes at random, and grammars with what their texts must be."""

import ast
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
from llguidance import regex_to_lark

Check = Callable[[str], object]  # raises, or gives something false, where the text is wrong

_NAMES = ["name", "id", "größe", "a b", 'q"uote', "tags", "x", "nested_value"]
_PATTERNS = ["^[A-Z][a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no|maybe)$", "^a[bc]*d{0,3}$"]
_FORMATS = ["date", "uuid", "ipv4", "time"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """One whose texts are short enough to be finished by chance."""
    schema = _schema(rng, depth=3)
    if rng.random() < 0.2:
        leaf = _schema(rng, depth=1)
        tree = {
            "type": "object",
            "properties": {
                "leaf": leaf,
                "below": {"type": "array", "items": {"$ref": "#/$defs/t"}},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
        schema = {"$defs": {"t": tree}, "anyOf": [{"$ref": "#/$defs/t"}, schema]}
    return schema | {"x-guidance": {"whitespace_flexible": False}}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _constant]
    branches = [_array, _tuple, _object, _object, _union]
    make = rng.choice(leaves if depth == 0 else leaves + branches + branches)
    return make(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 4)
    return {"type": "string"} | rng.choice(
        [
            {"minLength": low, "maxLength": low + rng.randint(0, 8)},
            {"pattern": rng.choice(_PATTERNS)},
            {"format": rng.choice(_FORMATS)},
            {"enum": rng.sample(["red", "grün", "blue\n", "", "🙂"], 3)},
        ]
    )


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice([-1000, -17, 0, 1, 250])
    bounds = {"minimum": low, "maximum": low + rng.choice([0, 5, 999])}
    return {"type": "integer"} | rng.choice([bounds, {"exclusiveMinimum": low, "maximum": 9999}])


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.choice([-3, 0]), "maximum": rng.choice([1, 2.5])}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": rng.choice([1, "one", None, [1, {"a": 2}], True])},
            {"enum": [1, "1", [1], {"one": 1}, None]},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """In what the syntaxes of Python and Rust have in common."""
    if depth == 0:
        return rng.choice(
            ["a", "b", "0", "-", r"\.", "é", "/", '"', "[a-f]", "[^a-z]", r"\d", r"\w"]
        )
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    match rng.randrange(4):
        case 0:
            return f"({'|'.join(parts)})"
        case 1:
            low = rng.randint(0, 2)
            return f"({''.join(parts)}){{{low},{low + rng.randint(0, 2)}}}"
        case 2:
            return f"({parts[0]}){rng.choice('?*+')}"
    return "".join(parts)


def schema_case(seed: int) -> tuple[str, Check]:
    """A grammar in Lark, and its check."""
    schema = random_schema(random.Random(seed))
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    return f"start: %json {json.dumps(schema)}", lambda text: validator.is_valid(json.loads(text))


def regex_case(seed: int) -> tuple[str, Check]:
    regex = random_regex(random.Random(seed))
    return f"start: /{regex_to_lark(regex, use_ascii='dw')}/", _matches(regex)


def _balanced(text: str) -> bool:
    while "()" in text or "[]" in text:
        text = text.replace("()", "").replace("[]", "")
    return text == ""


def _matches(pattern: str) -> Check:
    return re.compile(pattern, re.ASCII).fullmatch


GRAMMARS: list[tuple[str, Check]] = [
    (
        "start: sum\nsum: product (/[+-]/ product)*\nproduct: atom (/[*]/ atom)*\n"
        'atom: /[1-9][0-9]{0,2}/ | "(" sum ")"',
        lambda text: ast.parse(text, mode="eval"),
    ),
    ('start: "[" [item ("," item)*] "]"\nitem: /[0-9]/ | start', json.loads),
    ('start: p+\np: "(" p* ")" | "[" p* "]"', _balanced),
    ('start: "a" start "b" | ""', lambda text: "ab" not in text.replace("ab", "", 1)),
    ('start: same\nsame: "a" same "a" | "b" same "b" | "c"', lambda text: text == text[::-1]),
    (
        'start: pair ("," pair){1,3}\npair: KEY "=" VALUE\nKEY: /[a-c]/\nVALUE: /[0-9]{1,2}/',
        _matches(r"[a-c]=\d{1,2}(,[a-c]=\d{1,2}){1,3}"),
    ),
    ('start: /[a-z]{2,5}/ ("-" /[a-z]{2,5}/)? "\\n"', _matches("[a-z]{2,5}(-[a-z]{2,5})?\n")),
    ('start: WORD " " WORD\nWORD: /[a-z]+/ & /.{3,6}/', _matches("[a-z]{3,6} [a-z]{3,6}")),
    (
        'start: "x" %json {"type": "integer", "minimum": 3, "maximum": 17}',
        _matches("x([3-9]|1[0-7])"),
    ),
    ('start: digit+ "🙂" digit\ndigit: "0" | "1"', _matches("[01]+🙂[01]")),
]
