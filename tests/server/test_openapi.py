"""The OpenAPI document is true: what it allows and what it forbids, sent by machine."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from asgi import get, post
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from schemathesis.specs.openapi.schemas import OpenApiSchema
from scripted_client import steps
from served import Served

from outrider.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

Serve = Callable[..., Served]

WITH_BODY = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
]
CASES = [
    *(("POST", path, mode) for path in WITH_BODY for mode in GenerationMode),
    ("GET", "/v1/models", GenerationMode.POSITIVE),
    ("GET", "/v1/models/{model}", GenerationMode.POSITIVE),
    ("GET", "/v1/responses/{response_id}", GenerationMode.POSITIVE),
    ("GET", "/v1/responses/{response_id}/input_items", GenerationMode.POSITIVE),
    ("DELETE", "/v1/responses/{response_id}", GenerationMode.POSITIVE),
    ("POST", "/v1/responses/{response_id}/cancel", GenerationMode.POSITIVE),
    *(
        ("GET", path, GenerationMode.POSITIVE)
        for path in ("/tokenizer_info", "/health", "/live", "/ready", "/version", "/metrics")
    ),
    *(("GET", path, GenerationMode.POSITIVE) for path in ("/v1/loads", "/get_load", "/load")),
]


@pytest.fixture(scope="module")
def document(tokenizer: Tokenizer) -> OpenApiSchema:
    """As schemathesis has read it from an application, which it will ask."""
    ids = tokenizer.encode(" Hello 🙂", add_special_tokens=False)

    def play(request: Any) -> Any:
        return steps(request, ids[: request.params.max_tokens])

    served = Served(
        play,
        tokenizer,
        tool_call_format="hermes",
        reasoning_content=True,
        allowed_hosts=("*",),  # schemathesis calls it by a name of its own
    )
    return schemathesis.openapi.from_asgi("/openapi.json", served.app)


@pytest.mark.parametrize("num_examples", [6, pytest.param(40, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_answers_are_those_of_the_document(
    document: OpenApiSchema, method: str, path: str, mode: GenerationMode, num_examples: int
) -> None:
    operation = document[path][method]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        # Limits that depend on other fields or on the model are found by us, not by the document.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


def test_document_knows_no_answer_that_is_not_given(serve: Serve) -> None:
    document = get(serve().app, "/openapi.json").json()
    assert "422" not in json.dumps(document)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}


def test_document_allows_what_is_served_and_nothing_else(serve: Serve) -> None:
    served = serve()
    document = get(served.app, "/openapi.json").json()
    call = {"function": {"name": "f", "arguments": "{}"}}
    hi = {"role": "user", "content": "Hi"}

    def turn(**fields: Any) -> dict[str, Any]:
        return {"messages": [hi, {"role": "assistant", **fields}, hi]}

    for path, body, allowed in (
        ("completions", {"prompt": "Hi", "truncate_prompt_tokens": 0}, False),
        ("completions", {"prompt": "Hi", "truncate_prompt_tokens": -1}, True),
        ("completions", {"prompt": [70.0], "allowed_token_ids": [70.0]}, True),
        ("completions", {"prompt": "Hi", "max_tokens": -1}, True),
        ("chat/completions", turn(content="x") | {"max_tokens": -1}, True),
        ("chat/completions", turn(content="x") | {"max_tokens": 0}, False),
        ("chat/completions", turn(content=None), False),
        ("chat/completions", turn(content=None, tool_calls=[]), True),
        ("chat/completions", turn(tool_calls=[call | {"type": "function"}]), True),
        ("chat/completions", turn(tool_calls=[call | {"type": None}]), True),
        ("chat/completions", turn(tool_calls=[call | {"type": "tool"}]), False),
    ):
        operation = document["paths"][f"/v1/{path}"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema_rs.validator_for(schema | {"components": document["components"]})
        assert validator.is_valid(body) == allowed, body
        assert (post(served.app, body, path=f"/v1/{path}").status == 200) == allowed, body
