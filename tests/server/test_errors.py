"""What is refused, what fails under way, and what clients are sent."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from asgi import Call, get, post, start_post
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.api import InvalidRequestError, NewRequest, QueueFullError
from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.base.fields import MAX_LOGPROBS

Serve = Callable[..., Served]
OK = {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/completions", {"prompt": []}, "prompt must not be empty"),
        ("/v1/completions", {"prompt": "Hi", "stop": [""]}, "stop[0] must not be empty"),
        ("/v1/chat/completions", {"messages": []}, "messages must not be empty"),
        ("/v1/messages", {"max_tokens": 1, "messages": []}, "messages must not be empty"),
        (
            "/v1/completions",
            {"prompt": "Hi", "logprob_token_ids": [1] * (MAX_LOGPROBS + 1)},
            f"logprob_token_ids must have at most {MAX_LOGPROBS} items, not {MAX_LOGPROBS + 1}",
        ),
    ],
)
def test_a_wrong_length_is_refused_in_plain_words(
    serve: Serve, path: str, fields: dict[str, Any], message: str
) -> None:
    reply = post(serve().app, fields, path=path)
    assert reply.status == 400
    assert reply.json()["error"]["message"].startswith(message)


def failing_after_two(request: NewRequest) -> list[Any]:
    return [
        *steps(request, [70, 71, 72])[:2],
        EngineUnavailableError("the engine died: killed by signal 9"),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"text": "Hi"}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        (OK | {"max_tokens": 0}, "max_tokens"),
        (OK | {"max_tokens": "5"}, "max_tokens"),
        (OK | {"max_tokens": 1.5}, "max_tokens"),
        (OK | {"n": 0}, "n"),
        (OK | {"n": True}, "n"),
        (OK | {"n": 10**6}, "n"),
        (OK | {"temperature": -0.1}, "temperature"),
        (OK | {"temperature": "1"}, "temperature"),
        (OK | {"top_p": 1.1}, "top_p"),
        (OK | {"top_k": -2}, "top_k"),
        (OK | {"min_p": -0.1}, "min_p"),
        (OK | {"seed": 2**63}, "seed"),
        (OK | {"stop": ["x"] * 17}, "stop"),
        (OK | {"stop": ""}, "stop"),
        (OK | {"stop": "x" * 10000}, "stop"),
        (OK | {"stop_token_ids": [-1]}, "stop_token_ids"),
        (OK | {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (OK | {"logprobs": 21}, "logprobs"),
        (OK | {"logprobs": True}, "logprobs"),
        (OK | {"stream_options": {"include_usage": True}}, "stream_options"),
        (OK | {"speculation": {"verification": "none"}}, "speculation"),
        (OK | {"best_of": 3, "stream": True}, "best_of"),
        (OK | {"best_of": 1, "n": 2}, "best_of"),
        (OK | {"best_of": 1000}, "best_of"),
        (OK | {"prompt_logprobs": 21}, "prompt_logprobs"),
        (OK | {"prompt_logprobs": -2}, "prompt_logprobs"),
        (OK | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (OK | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (OK | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (OK | {"cache_salt": ""}, "cache_salt"),
        (OK | {"cache_salt": "x" * 1025}, "cache_salt"),
        (OK | {"priority": 2**63}, "priority"),
        (OK | {"detokenize": False, "stop": "x"}, "stop"),
        (OK | {"suffix": "x"}, "suffix"),
        (OK | {"presence_penalty": 2.1}, "presence_penalty"),
        (OK | {"frequency_penalty": -2.1}, "frequency_penalty"),
        (OK | {"repetition_penalty": 0}, "repetition_penalty"),
        (OK | {"logit_bias": {"five": 1}}, "logit_bias"),
        (OK | {"logit_bias": {"-5": 1}}, "logit_bias"),
        (OK | {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (OK | {"logit_bias": {"5": "1"}}, "logit_bias"),
        (OK | {"logit_bias": {"1000000": 1}}, "logit_bias"),
        (OK | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (OK | {"allowed_token_ids": []}, "allowed_token_ids"),
        (OK | {"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (OK | {"bad_words": "word"}, "bad_words"),
        (OK | {"bad_words": [""]}, "bad_words"),
        (OK | {"bad_words": ["x"] * 129}, "bad_words"),
        (OK | {"logits_processors": "name"}, "logits_processors"),
        (OK | {"logits_processors": [{"args": {}}]}, "logits_processors"),
        (OK | {"logits_processors": [{"name": "x", "code": "y"}]}, "logits_processors"),
        (OK | {"logits_processors": ["x"] * 17}, "logits_processors"),
        (OK | {"top_k": 2**63}, "top_k"),
        (OK | {"min_tokens": 10**30}, "min_tokens"),
        (OK | {"priority": -(2**64)}, "priority"),
        (OK | {"speculation": {"num_speculative_tokens": 1e40}}, "speculation"),
        (OK | {"speculation": {"num_speculative_tokens": 33}}, "speculation"),
        (OK | {"min_tokens": -1}, "min_tokens"),
        (OK | {"min_tokens": 17}, "min_tokens"),
        (OK | {"response_format": {"type": "json_object"}}, "response_format"),
        (OK | {"guided_json": {}}, "guided_json"),
    ],
)
def test_unusable_field_is_named(serve: Serve, body: Any, param: str) -> None:
    served = serve()
    reply = post(served.app, body)
    assert reply.status == 400
    assert set(reply.json()) == {"error"}
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert isinstance(reply.error["code"], str)
    assert reply.error["param"] == param
    assert not served.client.submitted


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b'{"prompt": "Hi", "temperature": NaN}',
        b'{"prompt": "Hi", "unknown": NaN}',
        b'{"prompt": "Hi", "temperature": Infinity}',
        b'{"prompt": "Hi", "temperature": 1e999}',
        b'{"prompt": "Hi", "top_p": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "Hi", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
def test_malformed_json_is_400(serve: Serve, raw: bytes) -> None:
    reply = post(serve().app, raw)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_body_of_another_type_is_400(serve: Serve) -> None:
    reply = post(serve().app, OK, {"content-type": "text/plain"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_content_type")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hi", "speculation": "off"},
        {"prompt": "Hi", "logit_bias": [5]},
        ["prompt"],
        "prompt",
        b"",
    ],
)
def test_what_must_be_an_object_is_called_so(serve: Serve, body: object) -> None:
    reply = post(serve().app, body)
    assert reply.status == 400
    assert "expected an object" in reply.error["message"]


def test_a_compressed_body_is_refused_by_name(serve: Serve) -> None:
    served = serve()
    reply = post(served.app, gzip.compress(b'{"prompt": "Hi"}'), {"content-encoding": "gzip"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_content_encoding")
    assert post(served.app, OK, {"content-encoding": "identity"}).status == 200


def test_neutral_values_of_unsupported_parameters_are_accepted(serve: Serve) -> None:
    neutral = {"length_penalty": 1.0, "use_beam_search": False, "suffix": ""}
    neutral |= {"best_of": 1, "guided_json": None, "response_format": {"type": "text"}}
    assert post(serve().app, OK | neutral).status == 200


def test_errors_stay_small_however_wrong_the_body(serve: Serve) -> None:
    many = {"prompt": ["x", *range(50_000)], "stop": ["y" * 2000] * 16, "user": ["z" * 10_000]}
    many |= dict.fromkeys(("n", "seed", "top_p", "top_k", "min_p", "logprobs"), "w" * 10000)
    reply = post(serve().app, many)
    assert reply.status == 400
    assert len(reply.body) < 4000
    named_by_the_client = post(serve().app, OK | {"speculation": {"x" * 10_000: 1}})
    assert named_by_the_client.status == 400
    assert len(named_by_the_client.body) < 4000


def test_prompt_that_is_too_long_is_refused_in_the_words_clients_match(serve: Serve) -> None:
    reply = post(serve().app, {"prompt": [70] * 990, "max_tokens": 11, "stream": True})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["message"].startswith(
        "This model's maximum context length is 1000 tokens. However, you requested 1001 tokens"
    )
    assert post(serve().app, {"prompt": [70] * 990, "max_tokens": 10}).status == 200


@pytest.mark.parametrize("stop", ["", ["x"] * 300, [5], 5])
def test_what_is_wrong_with_stop_is_said_once(serve: Serve, stop: object) -> None:
    message = post(serve().app, OK | {"stop": stop}).error["message"]
    assert message.count("stop") == 1


def test_stop_strings_are_bounded(serve: Serve) -> None:
    served = serve(max_stop_strings=2)
    assert post(served.app, OK | {"stop": ["a", "b"]}).status == 200
    error = post(served.app, OK | {"stop": ["a", "b", "c"]}).error
    assert error["param"] == "stop"
    assert "server.max_stop_strings" in error["message"]


def test_prompts_times_n_is_bounded(serve: Serve) -> None:
    served = serve(max_prompts_times_n=6)
    assert post(served.app, {"prompt": ["a", "b"], "n": 3}).status == 200
    assert post(served.app, {"prompt": ["a", "b"], "n": 4}).error["param"] == "n"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFullError("full"), 429, "queue_full"),
        (EngineUnavailableError("restarting"), 503, "engine_unavailable"),
        (InvalidRequestError("never"), 400, "invalid_value"),
    ],
)
def test_refusal_of_the_engine_comes_before_any_stream(
    serve: Serve, refusal: Exception, status: int, code: str, stream: bool
) -> None:
    served = serve()
    served.client.refusal = refusal
    reply = post(served.app, OK | {"stream": stream})
    assert (reply.status, reply.error["code"]) == (status, code)
    assert ("retry-after" in reply.headers) == (status in (429, 503))


def test_unexpected_exception_is_a_500_without_its_text(serve: Serve) -> None:
    served = serve()
    served.client.refusal = ZeroDivisionError("secret")

    async def run() -> Call:
        call = start_post(served.app, OK, path="/v1/completions")
        await asyncio.wait([call.finished])
        call.finished.exception()
        return call

    reply = asyncio.run(run()).reply
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "secret" not in reply.error["message"]


def test_engine_that_has_never_been_up_is_503(serve: Serve) -> None:
    served = serve()
    served.client.info = None
    assert post(served.app, OK).status == 503


# ---- failures under way


def test_failure_in_mid_stream_ends_with_an_error_event(serve: Serve) -> None:
    served = serve(failing_after_two)
    reply = post(served.app, OK | {"stream": True})
    *chunks, last = reply.events
    assert reply.status == 200
    assert len(chunks) == 2
    assert "signal 9" in json.loads(last)["error"]["message"]
    assert reply.ended
    assert b'outrider_requests_total{outcome="error"' in get(served.app, "/metrics").body


def test_failure_under_way_of_a_whole_answer_is_an_error(serve: Serve) -> None:
    reply = post(serve(failing_after_two).app, OK)
    assert reply.status == 503


def test_bug_in_mid_stream_is_logged_and_not_shown(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(lambda request: [*steps(request, [70, 71])[:1], ZeroDivisionError("secret")])
    *_, last = post(served.app, OK | {"stream": True}).events
    assert json.loads(last)["error"]["type"] == "server_error"
    assert "secret" not in last
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_request_that_takes_too_long_is_ended_and_freed(serve: Serve, stream: bool) -> None:
    async def run() -> None:
        forever = asyncio.Event()
        served = serve(
            lambda request: [steps(request, [70, 71])[0], forever], request_timeout_s=0.1
        )
        call = start_post(served.app, OK | {"stream": stream}, path="/v1/completions")
        await asyncio.wait_for(call.finished, 5)
        error = json.loads(call.reply.events[-1])["error"] if stream else call.reply.error
        assert error["code"] == "request_timeout"
        assert "0.1 s" in error["message"]
        assert call.reply.status == (200 if stream else 504)
        assert served.client.aborted

    asyncio.run(run())


def test_request_in_time_is_left_alone(serve: Serve) -> None:
    served = serve(request_timeout_s=30)
    assert post(served.app, OK).status == 200
    assert not served.client.aborted


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_client_frees_its_sequences_at_once(serve: Serve, stream: bool) -> None:
    async def run() -> None:
        waiting = asyncio.Event()
        served = serve(lambda request: [*steps(request, [70, 71])[:1], waiting])
        call = start_post(served.app, OK | {"stream": stream, "n": 2}, path="/v1/completions")
        while not served.client.submitted:
            await asyncio.sleep(0)
        if stream:
            await call.until_body()
        assert not served.client.aborted
        call.leave()
        await asyncio.wait_for(call.finished, 1)
        ids = [request.request_id for request in served.client.submitted[0]]
        assert sorted(served.client.aborted) == ids
        metrics = Call(served.app, "GET", "/metrics", [b""])
        await metrics.finished
        assert b'outcome="disconnected"' in metrics.reply.body

    asyncio.run(run())


def test_client_that_leaves_within_its_body_is_no_invalid_request(serve: Serve) -> None:
    served = serve()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with on_a_socket(served) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 80)) as client:
            client.sendall(head + b"content-length: 9\r\n\r\n{")
        deadline_s = time.monotonic() + 10
        while 'path="/v1/completions"' not in (reported := httpx.get(f"{url}/metrics").text):
            assert time.monotonic() < deadline_s
    assert 'outrider_requests_total{outcome="disconnected",path="/v1/completions"} 1.0' in reported


def test_field_that_the_engine_refuses_is_named(serve: Serve) -> None:
    served = serve()
    for text, param in (
        ("bad_words: too many", "bad_words"),
        ("speculation.sources: no such", "speculation"),
        ("no such: thing", None),
        ("see a.b c: thing", None),
    ):
        served.client.refusal = InvalidRequestError(text)
        assert post(served.app, OK).error["param"] == param


@pytest.mark.parametrize("field", ["logits_processors", "speculation"])
def test_a_long_name_is_not_sent_back(field: str, serve: Serve) -> None:
    """The engine's own refusal repeats the name, so a longer one never reaches it."""
    name = 100_000 * "x"
    body = OK | {field: {"sources": [name]} if field == "speculation" else [name]}
    result = post(serve().app, body)
    assert (result.status, result.error["param"]) == (400, field)
    assert "at most 256 characters" in result.error["message"]
    assert len(result.error["message"]) < 300
