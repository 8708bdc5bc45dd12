"""How far a prompt is computed, as streams report it to those who ask."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from asgi import post
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.api import NewRequest, RequestOutput

Serve = Callable[..., Served]

HI = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
ASK = {"stream": True, "return_progress": True}


def play(request: NewRequest) -> list[RequestOutput]:
    """A prompt in three steps; the last of them brings the first token."""
    name, total = request.request_id, len(request.prompt_token_ids)
    reported = steps(request, [70, 71, 0], finish="stop", cached_tokens=1)
    if request.reports_prompt:
        reported[0] = replace(reported[0], num_computed_prompt_tokens=total)
        reported[:0] = [
            RequestOutput(
                request_id=name,
                token_ids=[],
                num_computed_prompt_tokens=num,
                num_cached_tokens=1,
                queue_s=10.0,
            )
            for num in range(1, total)
        ]
    return reported


def events(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = post(served.app, PATHS[path] | fields, path=path)
    assert reply.status == 200
    assert "x-unknown-fields" not in reply.headers
    is_named = path in ("/v1/responses", "/v1/messages")
    return reply.named_events if is_named else reply.chunks


@pytest.mark.parametrize("path", PATHS)
def test_streams_report_how_far_the_prompt_is(serve: Serve, path: str) -> None:
    served = serve(play)
    reported = events(served, path, **ASK)
    total = len(served.client.submitted[0][0].prompt_token_ids)
    progress = [event["prompt_progress"] for event in reported if event.get("prompt_progress")]
    assert [each["processed"] for each in progress] == [*range(1, total + 1)]
    assert {(each["total"], each["cache"]) for each in progress} == {(total, 1)}
    assert all(each["time_ms"] >= 0 for each in progress)  # without the time in the queue
    # Without those events, the stream is as it was.
    rest = [event for event in reported if not event.get("prompt_progress")]
    plain = events(serve(play), path, stream=True)
    assert len(rest) == len(plain)
    assert not any("prompt_progress" in event for event in plain)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_with_progress_have_a_choice_to_which_nothing_is_added(
    serve: Serve, path: str
) -> None:
    reported = events(serve(play), path, n=2, **ASK)
    chunks = [chunk for chunk in reported if "prompt_progress" in chunk]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not choice.get("text")
        assert not choice.get("delta")
        assert choice["finish_reason"] is None


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_answer_has_no_progress(serve: Serve, path: str) -> None:
    served = serve(play)
    body = PATHS[path] | {"return_progress": True}
    assert "prompt_progress" not in post(served.app, body, path=path).json()
    assert not served.client.submitted[0][0].reports_prompt


def test_clients_pass_over_progress(serve: Serve) -> None:
    import anthropic  # takes seconds, which no other worker need spend

    with on_a_socket(serve(play)) as url:
        ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        extra: Any = {"model": "test-model", "extra_body": {"return_progress": True}}
        with ours.responses.stream(input="Hi", **extra) as answer:
            kinds = [event.type for event in answer]
            assert answer.get_final_response().output_text
        assert "response.prompt_progress" in kinds
        chunks = list(ours.chat.completions.create(messages=HI, stream=True, **extra))  # type: ignore[call-overload]
        assert any("prompt_progress" in (chunk.model_extra or {}) for chunk in chunks)
        theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with theirs.messages.stream(messages=HI, max_tokens=9, **extra) as message:  # type: ignore[arg-type]
            assert message.get_final_text()
