"""Whatever JSON comes in, the answer is a success or an error that names a reason."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from asgi import post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from scripted_client import steps
from served import Served
from tokenizers_for_tests import byte_level_tokenizer

from outrider.server.api.chat_protocol import ChatCompletionRequest
from outrider.server.api.messages_protocol import MessagesRequest
from outrider.server.api.ollama_protocol import OllamaChatRequest, OllamaGenerateRequest
from outrider.server.api.protocol import CompletionRequest
from outrider.server.api.responses_protocol import ResponsesRequest
from outrider.server.api.tokenization import TokenizeChat
from outrider.server.base.unknown_fields import NEUTRAL_VALUES

EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "50"))
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDPOINTS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "Hi"}),
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": MESSAGES}),
    ("/tokenize", TokenizeChat, {"messages": MESSAGES}),
    ("/v1/responses", ResponsesRequest, {"input": MESSAGES}),
    ("/v1/messages", MessagesRequest, {"messages": MESSAGES, "max_tokens": 9}),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()  # NaN and infinities among them, which Python writes and we refuse
    | st.text(max_size=10)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
MESSAGE_FIELDS = st.sampled_from(
    [
        *("role", "content", "tool_calls", "name", "type", "text", "call_id", "arguments"),
        *("input", "output", "summary", "thinking", "id", "tool_use_id"),
    ]
)
TYPES = [
    *("message", "reasoning", "function_call", "custom_tool_call", "function_call_output"),
    *("text", "input_text", "output_text", "tool_use", "tool_result", "thinking"),
]
MESSAGE = st.dictionaries(
    MESSAGE_FIELDS,
    JSON
    | st.sampled_from(["user", "assistant", *TYPES])
    | st.lists(
        st.fixed_dictionaries({"type": st.sampled_from(TYPES), "text": SCALARS}), max_size=2
    ),
)


def unions_of(schema: Any) -> Iterator[list[str]]:
    """What the paths of errors name the kinds of each union in a schema of pydantic."""
    if isinstance(schema, dict):
        if schema.get("type") == "union":
            yield [str(choice) for choice in schema["choices"]]
        if schema.get("type") == "tagged-union":
            yield [str(tag) for tag in schema["choices"]]
        for name, part in schema.items():
            if name != "metadata":
                yield from unions_of(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from unions_of(part)


@pytest.mark.parametrize(
    "request_type", [*(each for _, each, _ in ENDPOINTS), OllamaChatRequest, OllamaGenerateRequest]
)
def test_errors_can_leave_out_the_names_of_kinds(request_type: type[BaseModel]) -> None:
    """Those in angle brackets: of a union without tags, errors show how its types are written."""
    unions = list(unions_of(TypeAdapter(request_type).core_schema))
    assert unions
    assert [kind for kinds in unions for kind in kinds if kind[0] != "<"] == []


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(lambda request: steps(request, [70, 71]), byte_level_tokenizer())


@pytest.mark.parametrize(("path", "model", "minimal"), ENDPOINTS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), complete=st.booleans())
def test_any_fields_are_answered(
    served: Served,
    path: str,
    model: type[BaseModel],
    minimal: dict[str, Any],
    data: st.DataObject,
    complete: bool,
) -> None:
    fields = [*model.model_fields, *NEUTRAL_VALUES, "guided_json", "unheard_of"]
    body = data.draw(st.dictionaries(st.sampled_from(fields), JSON, max_size=6))
    reply = post(served.app, (minimal | body) if complete else body, path=path)
    if reply.status != 200:
        assert reply.status in (400, 404)
        assert reply.error["message"]
        assert len(reply.body) < 4000


@settings(max_examples=EXAMPLES, deadline=None)
@given(messages=st.lists(MESSAGE | JSON, max_size=3), end=st.booleans())
def test_any_messages_are_answered(served: Served, messages: list[Any], end: bool) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "continue_final_message": end}),
        ("/v1/responses", {"input": messages}),
        ("/v1/responses/input_tokens", {"input": messages}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": messages}),
    ):
        reply = post(served.app, body, path=path)
        if reply.status != 200:
            assert reply.status == 400
            assert reply.error["message"]
            assert len(reply.body) < 4000


@settings(max_examples=EXAMPLES, deadline=None)
@given(body=JSON)
def test_any_value_as_the_body_is_answered(served: Served, body: object) -> None:
    for path, _, _ in ENDPOINTS:
        assert post(served.app, body, path=path).status == 400


def test_a_body_may_begin_with_a_byte_order_mark(served: Served) -> None:
    """Files of Windows do, and clients send them as they are."""
    assert post(served.app, '{"prompt": "Hi"}'.encode("utf-8-sig")).status == 200
