"""Grammars that are made to hurt, over HTTP on a real engine: refused or served, and forgotten."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_server import serving

from outrider.server.text.tokenizer import Tokenizer

EOS = 0
N = 2500


def chain(arrow: str, first: str, last: str, num_rules: int = N) -> str:
    """Rules that lead to each other, each to the next."""
    rules = "".join(f"r{i} {arrow} r{i + 1}\n" for i in range(num_rules))
    return f"{first} {arrow} r0\n{rules}r{num_rules} {arrow} {last}\n"


def nested(depth: int, inner: str = "{}") -> str:
    return '{"type": "array", "items": ' * depth + inner + "}" * depth


def ambiguous(num_rules: int) -> str:
    names = [f'"a" x{i}' for i in range(num_rules)]
    rules = "".join(f'x{i}: e | "a"\n' for i in range(num_rules))
    return f'start: "x" e\ne: e e | {" | ".join(names)} | "a"\n{rules}'


REFS = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)} | {"d1000": {"type": "string"}}
WEB = {f"x{i}": {"anyOf": [{"$ref": "#/$defs/e"}, {"const": i}]} for i in range(300)}
OPTIONAL = {f"property{i}": {"type": "string"} for i in range(1500)}

OUTPUTS: dict[str, dict[str, Any]] = {
    "lark chain": {"grammar": chain(":", "start", '"a"')},
    "lark chain of terminals": {
        "grammar": chain(":", "start", '"a"').replace("r", "R").replace("staRt", "start")
    },
    "terminals with options": {
        "grammar": "start: T0\n"
        + "".join(f'T{i}: T{i + 1} "b"?\n' for i in range(N))
        + f'T{N}: "a"'
    },
    "left recursion": {"grammar": 'start: start "a" | start'},
    "right recursion": {"grammar": 'start: "a" start | start start | "b"'},
    "nothing": {"grammar": "start: e*\ne: e* |"},
    "ambiguity": {"grammar": ambiguous(40)},
    "wide ambiguity": {"grammar": ambiguous(1200)},
    "exploding": {"grammar": 'start: "x" e\ne: e e e | e e | /./ | /./ e /./ |'},
    "repetition": {"grammar": 'start: (("a" | "b"){0,9999} "c"?){0,9999}'},
    "brackets": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "schema in lark": {"grammar": "start: %json " + nested(5000)},
    "other grammar list": {"grammar": '{"grammars": []}'},
    "nul": {"grammar": 'start: "\x00"'},
    "gbnf chain": {"grammar": chain("::=", "root", '"a"')},
    "gbnf brackets": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "gbnf backwards": {
        "grammar": 'root ::= r0\nr1500 ::= "a"\n'
        + "".join(f"r{i} ::= r{i + 1}\n" for i in reversed(range(1500)))
    },
    "gbnf counts": {"grammar": 'root ::= ("a"{0,99999999} "b"){99999999}'},
    "gbnf that is none": {"grammar": "::="},
    "regex counts": {"regex": "((((a{0,9999}){0,9999}){0,9999}b){0,9999}c?){0,9999}"},
    "regex classes": {"regex": r"(\p{L}{1,500}[\s\S]){1,500}"},
    "regex nesting": {"regex": "(" * 20_000 + "a" + ")*" * 20_000},
    "regex states": {"regex": "(a|b)*a(a|b){50000}"},
    "regex alternatives": {"regex": "|".join(f"a{i}.*b{i}" for i in range(3000))},
    "choices": {"choice": ["a" * 60_000, "b"]},
    "many choices": {"choice": [f"value {i}" for i in range(4000)]},
    "empty choices": {"choice": [""]},
    "references": {"json": {"$defs": REFS, "$ref": "#/$defs/d0"}},
    "circle": {"json": {"$ref": "#"}},
    "two circles": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "web of references": {"json": {"$defs": WEB | {
        "e": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in WEB]}}, "$ref": "#/$defs/e"}},
    "nesting as text": {"json": nested(2000)},
    "nesting": {"json": json.loads(nested(150))},
    "enum": {"json": {"enum": [f"value {i}" for i in range(4000)]}},
    "maxLength": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "huge maxLength": {"json": {"type": "string", "maxLength": 10**30}},
    "minItems": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "multipleOf": {"json": {"type": "integer", "multipleOf": 10**18 + 9, "minimum": 3}},
    "maximum": {"json": {"type": "number", "minimum": -1e308, "maximum": 1e308}},
    "properties": {"json": {"type": "object", "properties": OPTIONAL}},
    "patterns": {"json": {"type": "string", "pattern": "^(a+)+(b|a?){200}$"}},
    "allOf": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(6)]} for i in range(12)
            ]
        }
    },
}  # fmt: skip


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TOOLS = {
    "nested tool": [tool(json.loads(nested(150)))],
    "tool with references": [tool({"$defs": REFS, "$ref": "#/$defs/d0"})],
    "circular tool": [tool({"$ref": "#"})],
    "tool of many properties": [tool({"type": "object", "properties": OPTIONAL})],
    "many tools": [tool({"type": "object", "title": str(i)}) for i in range(300)],
}

GOOD = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{2}"}}


def attacks() -> list[tuple[str, str, dict[str, Any]]]:
    """What is done, where, and the body."""
    base = {"max_tokens": 12, "temperature": 1.5, "seed": 1}
    bodies = [
        (name, "/completions", base | {"prompt": "x", "structured_outputs": outputs})
        for name, outputs in OUTPUTS.items()
    ]
    messages = [{"role": "user", "content": "x"}]
    return bodies + [
        (
            name,
            "/chat/completions",
            base | {"messages": messages, "tools": tools, "tool_choice": "required"},
        )
        for name, tools in TOOLS.items()
    ]


@pytest.mark.deep
def test_the_server_answers_and_goes_on(pair: tuple[Path, Path], tokenizer: Tokenizer) -> None:
    me = psutil.Process()

    async def run() -> dict[str, int]:
        server = {"grammar_timeout_s": 1.0}
        async with serving(pair, tokenizer, (EOS,), server, k=3) as (http, engine):
            http.timeout = 60

            async def ask(name: str, path: str, body: dict[str, Any]) -> httpx.Response:
                reply = await http.post(path, json=body)
                assert reply.status_code in (200, 400), (name, reply.text[:300])
                if reply.status_code == 400:
                    assert reply.json()["error"]["message"], name
                    assert len(reply.text) < 1000, name
                return reply

            async def good() -> None:
                reply = await http.post("/completions", json=GOOD)
                assert reply.status_code == 200, reply.text
                assert reply.json()["choices"][0]["finish_reason"] == "stop"

            await good()
            num_fds = me.num_fds()
            statuses = {}
            for name, path, body in attacks():
                statuses[name] = (await ask(name, path, body)).status_code
                if len(statuses) % 8 == 0:
                    await good()
            # Those that were served wait for others of the same grammar, a few of them.
            gc.collect()
            assert me.num_fds() < num_fds + 2 * 10
            await asyncio.gather(
                *(ask(*attack) for attack in attacks()[::6]), *(good() for _ in "ab")
            )
            await good()
            assert engine.stats.pages_used == 0
            return statuses

    before = me.num_fds(), len(me.children(recursive=True))
    statuses = asyncio.run(run())
    served = {name for name, status in statuses.items() if status == 200}
    assert served  # which of them, the machine's load has a part in
    assert served.isdisjoint(
        {"brackets", "circle", "nul", "gbnf brackets", "terminals with options"}
    )
    gc.collect()
    assert me.num_fds() <= before[0] + 4
    # No grammar's process is left; at most those that two compilers, not collected yet, fork from.
    assert len(me.children(recursive=True)) <= before[1] + 2 * 2
