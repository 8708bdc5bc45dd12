"""Fields that are not served: accepted if they ask for nothing, named if nobody knows them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgi import Reply, get, post
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from served import Served

from outrider.server.api.chat_protocol import ChatCompletionRequest
from outrider.server.api.protocol import CompletionRequest
from outrider.server.base.unknown_fields import IGNORED, NEUTRAL_VALUES, OTHER_SAMPLERS

Serve = Callable[..., Served]
CHAT_PATH = "/v1/chat/completions"
OK: dict[str, Any] = {"prompt": "Hi"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
HEADER = "x-unknown-fields"


def send(served: Served, body: dict[str, Any]) -> Reply:
    return post(served.app, body, path=CHAT_PATH if "messages" in body else "/v1/completions")


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_an_openai_client_is_known(params: Any, model: Any) -> None:
    known = model.model_fields.keys() | IGNORED | NEUTRAL_VALUES.keys()
    assert params.__annotations__.keys() <= known


@pytest.mark.parametrize("path", ["docs/api.md", "the OpenAPI document"])
def test_ignored_fields_are_listed_in_the_docs(serve: Serve, path: str) -> None:
    if path == "docs/api.md":
        text = (Path(__file__).parents[2] / path).read_text()
    else:
        text = get(serve().app, "/openapi.json").json()["info"]["description"]
    assert all(f"`{name}`" in text for name in IGNORED)


@pytest.mark.parametrize("policy", ["ignore", "refuse"])
@pytest.mark.parametrize("base", [OK, CHAT])
def test_what_asks_for_nothing_is_accepted_in_silence(
    serve: Serve, caplog: pytest.LogCaptureFixture, base: dict[str, Any], policy: str
) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    body = base | {
        "store": True,
        "metadata": {"team": "a"},
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "30m"},
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "mirostat": 0,
        "mirostat_tau": 5,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "typical_p": 1.0,
        "temprature": None,
    }
    if base is CHAT:
        body |= {"tools": [TOOL], "response_format": {"type": "text"}}
        body["messages"] = [
            {"role": "user", "name": "x", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes", "refusal": None, "annotations": []},
        ]
    reply = send(serve(unknown_fields=policy), body)
    assert reply.status == 200
    assert HEADER not in reply.headers
    assert "unknown" not in caplog.text


@pytest.mark.parametrize(
    ("body", "path", "nearest"),
    [
        (OK | {"temprature": 0}, "temprature", "temperature"),
        (OK | {"max_token": 3}, "max_token", "max_tokens"),
        (OK | {"colour": "blue"}, "colour", None),
        (CHAT | {"top_logprob": 3}, "top_logprob", "top_logprobs"),
        (CHAT | {"best_of": 3}, "best_of", None),
        (
            OK | {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
        (
            OK | {"response_format": {"type": "text", "jsonschema": {}}},
            "response_format.jsonschema",
            "json_schema",
        ),
        (CHAT | {"tools": [TOOL | {"functions": {}}]}, "tools[0].functions", "function"),
        (
            CHAT | {"tools": [TOOL, {"type": "function", "function": {"name": "g", "params": {}}}]},
            "tools[1].function.params",
            "parameters",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
            "messages[0].content[0].txt",
            "text",
        ),
    ],
)
def test_unknown_field_is_named_with_the_nearest_known_one(
    serve: Serve, caplog: pytest.LogCaptureFixture, body: Any, path: str, nearest: str | None
) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    served = serve()
    reply = send(served, body)
    assert reply.status == 200
    assert reply.headers[HEADER] == path
    assert path in caplog.text
    assert "blue" not in caplog.text

    caplog.clear()
    strict = serve(unknown_fields="refuse")
    reply = send(strict, body)
    assert (reply.status, reply.error["code"]) == (400, "unknown_parameter")
    assert reply.error["param"] == path
    assert path in reply.error["message"]
    assert (f"did you mean {nearest}?" in reply.error["message"]) == (nearest is not None)
    assert not strict.client.submitted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", OK | {"add_special_token": False}),
        ("/tokenize", CHAT | {"add_special_token": False}),
        ("/detokenize", {"tokens": [70], "add_special_token": False}),
    ],
)
def test_routes_of_the_tokenizer_name_them_too(serve: Serve, path: str, body: Any) -> None:
    assert post(serve().app, body, path=path).headers[HEADER] == "add_special_token"
    assert post(serve(unknown_fields="refuse").app, body, path=path).status == 400


def test_object_of_this_server_alone_takes_no_unknown_field(serve: Serve) -> None:
    reply = send(serve(), OK | {"speculation": {"enabeld": False}})
    assert (reply.status, reply.error["param"]) == (400, "speculation")
    assert "did you mean enabled?" in reply.error["message"]


@pytest.mark.parametrize("name", ["vllm_xargs", "kv_transfer_params"])
def test_parameter_of_others_that_would_change_the_answer_is_refused(
    serve: Serve, name: str
) -> None:
    for base in (OK, CHAT):
        reply = send(serve(), base | {name: {"a": 1}})
        assert (reply.status, reply.error["param"]) == (400, name)


@pytest.mark.parametrize("name", OTHER_SAMPLERS)
def test_sampler_of_others_is_refused_with_ours_beside_it(serve: Serve, name: str) -> None:
    off, ours = OTHER_SAMPLERS[name]
    value = not off if isinstance(off, bool) else 0.5
    for base in (OK, CHAT):
        reply = send(serve(), base | {name: value})
        assert (reply.status, reply.error["param"]) == (400, name)
        assert reply.error["message"].endswith(f"leave it out, or use {ours}.")
        assert send(serve(unknown_fields="refuse"), base | {name: off}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        ("/v1/completions", OK, "max_tokens"),
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
        ("/v1/messages", CHAT, "max_tokens"),
    ],
)
def test_fields_are_served_by_the_names_of_others(
    serve: Serve, path: str, body: dict[str, Any], max_tokens: str
) -> None:
    served = serve(unknown_fields="refuse")

    def params(**fields: Any) -> Any:
        reply = post(served.app, body | fields, path=path)
        assert reply.status == 200, reply.body
        return served.client.submitted[-1][0].params

    theirs = params(n_predict=7, repeat_penalty=1.1)
    assert (theirs.max_tokens, theirs.repetition_penalty) == (7, 1.1)
    ours = {max_tokens: 5, "repetition_penalty": 1.2}
    both = params(n_predict=7, repeat_penalty=1.1, **ours)
    assert (both.max_tokens, both.repetition_penalty) == (5, 1.2)  # ours go before
    # Without a limit, the answer may fill the context.
    for unlimited in (params(n_predict=-1), params(**{max_tokens: -1})):
        prompt = served.client.submitted[-1][0].prompt_token_ids
        assert unlimited.max_tokens == 1000 - len(prompt)


def test_answers_without_a_limit_fit_behind_every_prompt(serve: Serve) -> None:
    served = serve()
    body = {"prompt": [[70] * 9, [70] * 400], "max_tokens": -1}
    assert post(served.app, body).status == 200
    assert {request.params.max_tokens for request in served.client.submitted[0]} == {600}


def test_a_failing_request_learns_its_unknown_fields_too(serve: Serve) -> None:
    reply = send(serve(), OK | {"temprature": 1, "min_tokens": 17})
    assert reply.status == 400
    assert reply.headers[HEADER] == "temprature"


@pytest.mark.parametrize("policy", ["ignore", "refuse"])
def test_names_that_a_client_made_up_write_no_line_and_no_header(
    serve: Serve, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    caplog.set_level(logging.DEBUG, "outrider.server")
    names = ["a\nERROR forged", "b\r\nset-cookie: x", "\x1b[31mred", "\x7f", "ü" * 500, "", ", x"]
    reply = send(serve(unknown_fields=policy), OK | dict.fromkeys(names, 1))
    reported = reply.headers.get(HEADER, "") + caplog.text + reply.headers.get("set-cookie", "")
    if policy == "refuse":
        reported += reply.error["message"] + reply.error["param"]
    for record in caplog.records:
        message = record.getMessage()
        assert message.isprintable()
        assert message.isascii()
        assert len(message) < 2000
    header = reply.headers.get(HEADER, "")
    assert header.isprintable()
    assert header.isascii()
    assert "\x1b" not in reported
    assert "ü" * 100 not in reported
    assert "set-cookie" not in reply.headers


def test_a_thousand_unknown_fields_make_a_short_header(serve: Serve) -> None:
    reply = send(serve(), OK | {f"field{i}": 1 for i in range(1000)})
    assert reply.status == 200
    assert len(reply.headers[HEADER]) < 1000
