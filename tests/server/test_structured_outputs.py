"""Output that must follow a schema, a regex, choices or a grammar, as clients ask for it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel
from tiny_server import serving

from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.grammar.structured_outputs import ResponseFormat, lark_of_schema
from outrider.server.text.tokenizer import Tokenizer

EOS = 0
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "colour": {"enum": ["red", "green"]}},
    "required": ["x", "colour"],
    "additionalProperties": False,
} | COMPACT


Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(scope="module")
def tiny(pair: tuple[Path, Path], tokenizer: Tokenizer) -> Serve:
    """`tiny(**server_settings)`: a client of a tiny pair."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with serving(pair, tokenizer, (EOS,), settings, k=3) as (http, _):
            http.timeout = 60
            yield http

    return start


def answers(tiny: Serve, bodies: list[dict[str, Any]], **settings: Any) -> list[Any]:
    """All asked at once: completions, or chats where there are messages."""

    async def run() -> list[Any]:
        async with tiny(**settings) as http:
            posts = [
                http.post("/chat/completions" if "messages" in body else "/completions", json=body)
                for body in bodies
            ]
            return [reply.json() for reply in await asyncio.gather(*posts)]

    return asyncio.run(run())


def test_each_spelling_is_followed(tiny: Serve) -> None:
    base = {"prompt": "The", "max_tokens": 60, "seed": 1}
    message = [{"role": "user", "content": "Hello"}]
    named = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    replies = answers(
        tiny,
        [
            base | {"structured_outputs": {"json": POINT}},
            base | {"structured_outputs": {"json": json.dumps(POINT)}, "n": 2},
            base | {"structured_outputs": {"regex": r"[a-c]{2,4}/\d\d"}},
            base
            | {
                "structured_outputs": {"regex": r"^(yes|no)$", "json": None, "json_object": False},
                "temperature": 0,
            },
            base | {"structured_outputs": {"choice": ["naïve café", 'say "no"\n', "🙂"]}},
            base | {"structured_outputs": {"grammar": 'start: "a" b\nb: /[0-9]{3}/'}},
            base | {"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= [0-9] [0-9]'}},
            base | {"response_format": named},
            {"messages": message, "max_tokens": 60, "seed": 2, "response_format": named},
            base | {"response_format": {"type": "text"}, "max_tokens": 3},
        ],
    )
    texts = [
        [
            choice.get("text", choice.get("message", {}).get("content"))
            for choice in reply["choices"]
        ]
        for reply in replies
    ]
    for reply in replies[:-1]:
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    for text in [*texts[0], *texts[1], *texts[7], *texts[8]]:
        assert json.loads(text).keys() == {"x", "colour"}
    assert len(texts[1]) == 2
    for (text,), pattern in zip(
        texts[2:7],
        [r"[a-c]{2,4}/\d\d", "yes|no", '(naïve café|say "no"\n|🙂)', "a[0-9]{3}", "a[0-9]{2}"],
        strict=True,
    ):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (["", "a"], {"", "a"}),
        (["a", "ab", "a"], {"a", "ab"}),
        (["", ""], {""}),
        (["/./", "a?"], {"/./", "a?"}),
    ],
)
def test_every_choice_can_be_said(tiny: Serve, choices: list[str], said: set[str]) -> None:
    body = {"prompt": "x", "n": 16, "seed": 1, "temperature": 2}
    (reply,) = answers(tiny, [body | {"structured_outputs": {"choice": choices}}])
    assert {choice["text"] for choice in reply["choices"]} == said


def test_there_may_be_thousands_of_choices(tiny: Serve) -> None:
    labels = [f"label {i}" for i in range(3000)]
    body = {"prompt": "x", "n": 8, "seed": 1, "structured_outputs": {"choice": labels}}
    (reply,) = answers(tiny, [body])
    texts = {choice["text"] for choice in reply["choices"]}
    assert texts <= set(labels)
    assert len(texts) > 1


def test_a_grammar_may_have_thousands_of_alternatives(tiny: Serve) -> None:
    labels = [f"label {i}" for i in range(3000)]
    alternatives = "start: a\na: " + " | ".join(map(json.dumps, labels))
    body = {"prompt": "x", "seed": 1, "structured_outputs": {"grammar": alternatives}}
    (reply,) = answers(tiny, [body])
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["text"] in labels


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "minItems": 1.0, "maxItems": 2e0},
        {"type": "string", "format": "password", "maxLength": 8.0},
        {"anyOf": [{"format": "int32"}, {"items": {"format": "byte"}}]},
        {"properties": {"format": {"type": "string", "format": "path"}}},
        *(
            {"type": "string", "format": name}
            for name in ("uuid4", "uri-reference", "regex", "ipvanyaddress", "file-path", "x y")
        ),
        # A record of Zod's.
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "integer"},
        },
        {"type": "object", "propertyNames": {}, "dependentRequired": {}},
        {"type": "object", "propertyNames": True},
    ],
)
def test_keywords_without_effect_and_integers_as_floats_are_taken(schema: dict[str, Any]) -> None:
    assert LLMatcher.validate_grammar(lark_of_schema(schema).text) == ""


@pytest.mark.parametrize(
    "schema", [{"propertyNames": {"pattern": "^a"}}, {"dependentRequired": {"a": ["b"]}}]
)
def test_keywords_with_an_effect_are_not_dropped(schema: dict[str, Any]) -> None:
    assert "Unimplemented" in LLMatcher.validate_grammar(lark_of_schema(schema).text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("date", "2024-02-29"),
        ("date-time", "2024-02-29T12:00:00Z"),
        ("duration", "P1D"),
        ("email", "a@b.org"),
        ("hostname", "b.org"),
        ("ipv4", "127.0.0.1"),
        ("ipv6", "::1"),
        ("time", "12:00:00Z"),
        ("uri", "http://b.org/"),
        ("uuid", "00000000-0000-0000-0000-000000000000"),
    ],
)
def test_formats_that_can_be_checked_are(name: str, value: str) -> None:
    schema = {"type": "string", "format": name}
    assert LLMatcher.validate_grammar(lark_of_schema(schema).text) == ""
    assert LLMatcher.validate_grammar(lark_of_schema(schema | {"pattern": "^[éü]*$"}).text) != ""
    longest = schema | {"maxLength": len(value)}
    assert LLMatcher.validate_grammar(lark_of_schema(longest).text) == ""


@pytest.mark.parametrize("named", [{"name": "x"}, {"name": "x", "schema": None}])
def test_json_without_a_schema_is_an_object(named: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": named}
    wanted = lark_of_schema({"type": "object"})
    assert ResponseFormat.model_validate(form).grammar_text() == wanted
    body = {"input": "x", "text": {"format": {"type": "json_schema"} | named}}
    asked = ResponsesRequest.model_validate(body).as_chat([]).response_format
    assert asked is not None
    assert asked.grammar_text() == wanted


def test_an_empty_schema_allows_any_value() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert ResponseFormat.model_validate(form).grammar_text() == lark_of_schema({})


def test_properties_and_values_that_are_called_like_keywords_stay() -> None:
    schema = {"properties": {"uniqueItems": False, "x": {"const": {"minItems": 1.0}}}}
    assert json.dumps(schema).removeprefix("{") in lark_of_schema(schema).text


def test_json_mode_gives_objects(tiny: Serve) -> None:
    bodies = [
        {"prompt": "x", "max_tokens": 120, "seed": seed, **asked}
        for seed in range(3)
        for asked in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        )
    ]
    for reply in answers(tiny, bodies):
        (choice,) = reply["choices"]
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_an_answer_that_is_complete_before_min_tokens_is_an_answer_in_every_api(
    tiny: Serve,
) -> None:
    base = {"temperature": 0, "min_tokens": 20, "structured_outputs": {"json": {"type": "boolean"}}}
    messages = [{"role": "user", "content": "Answer:"}]
    bodies: dict[str, dict[str, Any]] = {
        "/completions": {"prompt": "Answer:", "max_tokens": 40},
        "/chat/completions": {"messages": messages, "max_tokens": 40},
        "/responses": {"input": "Answer:", "max_output_tokens": 40},
        "/messages": {"messages": messages, "max_tokens": 40, "model": "tiny"},
    }

    async def run() -> None:
        async with tiny() as http:
            for path, body in bodies.items():
                reply = await http.post(path, json=base | body)
                assert reply.status_code == 200, (path, reply.text)
                assert re.search(r'"(true|false)"', reply.text), (path, reply.text)
                reply = await http.post(path, json=base | body | {"stream": True})
                events = [
                    json.loads(line.removeprefix("data: "))
                    for line in reply.text.splitlines()
                    if line.startswith("data: {")
                ]
                assert len(events) > 1, (path, reply.text)
                assert not any(event.get("error") for event in events), (path, events)
                assert not any(event.get("type") == "error" for event in events), (path, events)

    asyncio.run(run())


def test_a_prompt_is_scored_though_no_token_could_follow_it(tiny: Serve) -> None:
    body = {
        "prompt": "Hello",
        "max_tokens": 0,
        "structured_outputs": {"choice": ["Q"]},
        "allowed_token_ids": [5],
    }
    scored, echoed = answers(
        tiny, [body | {"prompt_logprobs": 1}, body | {"echo": True, "logprobs": 1}]
    )
    assert len(scored["choices"][0]["prompt_logprobs"]) > 1
    assert len(echoed["choices"][0]["logprobs"]["tokens"]) > 1


def test_what_is_cut_off_says_so(tiny: Serve) -> None:
    body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "[ab]{50}"}}
    (reply,) = answers(tiny, [body])
    assert reply["choices"][0]["finish_reason"] == "length"


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


class Tree(BaseModel):
    leaf: bool
    below: list["Tree"]


@pytest.mark.parametrize("model", [Animal, Tree])
def test_openai_client_parses_its_own_models(tiny: Serve, model: type[BaseModel]) -> None:
    async def run() -> Any:
        async with tiny() as http:
            client = openai.AsyncOpenAI(base_url=http.base_url, api_key="x", http_client=http)
            return await client.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": "Which animal?"}],
                response_format=model,
                seed=3,
                temperature=0.3,
                max_completion_tokens=200,
            )

    assert isinstance(asyncio.run(run()).choices[0].message.parsed, model)


def test_openai_client_streams_the_same(tiny: Serve) -> None:
    async def run() -> tuple[str, str]:
        async with tiny() as http:
            client = openai.AsyncOpenAI(base_url=http.base_url, api_key="x", http_client=http)
            asked: dict[str, Any] = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Which animal?"}],
                "response_format": Animal,
                "seed": 3,
                "max_completion_tokens": 100,
            }
            whole = await client.chat.completions.parse(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                streamed = await stream.get_final_completion()
            assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
            return whole.choices[0].message.content, streamed.choices[0].message.content

    whole, streamed = asyncio.run(run())
    assert whole == streamed


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be provided"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "json_object"),
    ({"regex": "a+"}, "regex", "use structured_outputs"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "circle"}},
            }
        },
        "response_format",
        "circle",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", "uniqueI"),
    (
        {"structured_outputs": {"json": {"$ref": "http://example.org/schema.json"}}},
        "structured_outputs",
        "example.org",
    ),
    ({"structured_outputs": {"json": {"$ref": "file:///etc/hosts"}}}, "structured_outputs", ""),
    (
        {"structured_outputs": {"json": {"$ref": "#"}}},
        "structured_outputs",
        "cannot be followed: no token can go on with the text",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "must not be empty"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-around"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs", "backreferences"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs", "nobody"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "line 1"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs", "exclude each other"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    ({"guided_json": POINT}, "guided_json", "use structured_outputs"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tiny: Serve) -> dict[str, Any]:
    """The server's reply to each body, as JSON."""
    bodies = [{"prompt": "x"} | asked for asked, _, _ in REFUSED]
    replies = answers(tiny, bodies)
    return {json.dumps(asked): reply for (asked, _, _), reply in zip(REFUSED, replies, strict=True)}


@pytest.mark.parametrize(("asked", "param", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    refusals: dict[str, Any], asked: dict[str, Any], param: str, message: str
) -> None:
    error = refusals[json.dumps(asked)]["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert "llguidance" not in error["message"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS = {
    "nesting": {"json": nested(150)},
    "brackets": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
    "gbnf brackets": {"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    "enum": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "choices": {"choice": [f"value {i}" for i in range(20_000)]},
    "properties": {"json": {"properties": {f"property {i}": {} for i in range(5_000)}}},
    "alternatives": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(6)]} for i in range(12)
            ]
        }
    },
    "regex": {"regex": r"(\p{L}{1,200}[\s\S]){1,200}"},
    "repetition": {"regex": "((((a{0,9999}){0,9999}){0,9999}b){0,9999}c?){0,9999}"},
    "states": {"regex": "(a|b)*a(a|b){5000}"},
}


def test_bombs_are_defused_while_others_are_served(tiny: Serve) -> None:
    async def run() -> list[tuple[str, int, str]]:
        async with tiny(grammar_timeout_s=2.0) as http:

            async def plain() -> int:
                num_served = 0
                while not done.is_set():
                    reply = await http.post("/completions", json={"prompt": "x", "max_tokens": 2})
                    assert reply.status_code == 200
                    num_served += 1
                return num_served

            async def explode(name: str) -> tuple[str, int, str]:
                body = {"prompt": "x", "max_tokens": 4, "structured_outputs": BOMBS[name]}
                reply = await http.post("/completions", json=body)
                return name, reply.status_code, reply.text[:200]

            done = asyncio.Event()
            neighbour = asyncio.create_task(plain())
            results = [await explode(name) for name in BOMBS]
            done.set()
            assert await neighbour > 0
            return results

    results = asyncio.run(run())
    assert {status for _, status, _ in results} <= {200, 400}, results
    refused = {name for name, status, _ in results if status == 400}
    assert {
        "nesting",
        "brackets",
        "gbnf brackets",
        "enum",
        "choices",
        "properties",
        "alternatives",
    } <= refused


def test_a_grammar_that_takes_too_long_is_refused_in_time(tiny: Serve) -> None:
    slow = {"properties": {f"p{i}": {} for i in range(1_000)}}
    body = {"prompt": "x", "structured_outputs": {"json": slow}}
    (reply,) = answers(tiny, [body], grammar_timeout_s=0.01)
    assert "took longer than 0.01 s" in reply["error"]["message"]


def test_without_a_compiler_grammars_are_refused(serve: Callable[..., Any]) -> None:
    async def run() -> Any:
        transport = httpx.ASGITransport(serve().app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as http:
            body = {"prompt": "x", "response_format": {"type": "json_object"}}
            return (await http.post("/completions", json=body)).json()["error"]

    error = asyncio.run(run())
    assert (error["code"], error["param"]) == ("unsupported_parameter", "response_format")
