"""The OpenAPI document is true: what it allows and what it forbids, sent by machine."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from asgi import get
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_client import steps
from served import Served

from outrider.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

Serve = Callable[..., Served]

WITH_BODY = [
    *("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
]
CASES = [
    *(("POST", path, mode) for path in WITH_BODY for mode in GenerationMode),
    ("GET", "/v1/models", GenerationMode.POSITIVE),
    ("GET", "/v1/models/{model}", GenerationMode.POSITIVE),
    ("GET", "/v1/responses/{response_id}", GenerationMode.POSITIVE),
    ("GET", "/v1/responses/{response_id}/input_items", GenerationMode.POSITIVE),
    ("DELETE", "/v1/responses/{response_id}", GenerationMode.POSITIVE),
    *(
        ("GET", path, GenerationMode.POSITIVE)
        for path in ("/tokenizer_info", "/health", "/live", "/ready", "/version", "/metrics")
    ),
    *(("GET", path, GenerationMode.POSITIVE) for path in ("/v1/loads", "/get_load", "/load")),
]


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Served:
    ids = tokenizer.encode(" Hello 🙂", add_special_tokens=False)

    def play(request: Any) -> Any:
        return steps(request, ids[: request.params.max_tokens])

    return Served(
        play,
        tokenizer,
        tool_call_format="hermes",
        reasoning_content=True,
        allowed_hosts=("*",),  # schemathesis calls it by a name of its own
    )


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_answers_are_those_of_the_document(
    served: Served, method: str, path: str, mode: GenerationMode
) -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", served.app)
    operation = document[path][method]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        # Limits that depend on other fields or on the model are told by 400, not by the document.
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
