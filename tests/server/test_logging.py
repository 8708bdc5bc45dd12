"""What the log shows of requests, and never of their text."""

import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from asgi import get, post
from rich.console import Console
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.observe.logs import configure_logging

Serve = Callable[..., Served]
LOGGER = "outrider.server.requests"


def drafted(request: Any) -> Any:
    return steps(request, [70, 71, 72], sizes=(2, 1), num_drafts=2, cached_tokens=1)


def facts_of(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    return record.facts  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("stream", [True, False])
def test_each_answer_is_a_line_with_its_numbers(
    serve: Serve, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG, "outrider.server")
    body = {"prompt": "my secret", "stop": "another secret", "stream": stream}
    post(serve(drafted).app, body, {"x-request-id": "abc"})
    facts = facts_of(caplog)
    assert facts.pop("duration_s") >= facts.pop("first_token_s") >= 0
    num_prompt_tokens = facts.pop("prompt_tokens")
    assert facts.pop("token_s") >= 0
    assert facts == {
        "request_id": "abc",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "cached_tokens": 1,
        "max_generation_tokens": 3,
        "max_tokens": 16,
        "completion_tokens": 3,
        "draft_tokens": 4,
        "accepted_tokens": 1,
        "queue_s": 0.0,
    }
    assert re.search(
        rf"POST /v1/completions 200 ok in \d+\.\d+ s, {num_prompt_tokens} \(1 cached\) "
        r"\+ 3 tokens, the first after \d+\.\d+ s, 1 of 4 drafts accepted, abc",
        caplog.text,
    )
    assert "secret" not in caplog.text


def test_refused_requests_are_lines_without_tokens(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    post(serve().app, {"prompt": 1})
    assert (facts_of(caplog)["status"], facts_of(caplog)["outcome"]) == (400, "invalid")
    assert "completion_tokens" not in facts_of(caplog)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": None}, "prompt: Field required"),
        ({"temperature": "secret"}, "temperature: Input should be a valid number"),
        ({"max_tokens": 5000}, "This model's maximum context length is 1000 tokens."),
        ({"mirostat": 2}, "mirostat is not supported by this server"),
        ({"bad_words": [""]}, "bad_words[0] must not be empty"),
        ({"model": "gpt-5"}, "The model 'gpt-5' does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_the_line_of_a_refused_request_says_why(
    serve: Serve, caplog: pytest.LogCaptureFixture, fields: Any, reason: str, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    served = serve(unknown_fields="refuse")
    assert post(served.app, {"prompt": "my secret", "stream": stream} | fields).status >= 400
    assert reason in facts_of(caplog)["reason"]
    assert f": {facts_of(caplog)['reason']}" in caplog.text
    assert "secret" not in caplog.text


def test_the_line_of_a_stream_that_broke_says_why(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    served = serve(lambda request: [EngineUnavailableError("the engine died")])
    post(served.app, {"prompt": "Hi", "stream": True})
    assert (facts_of(caplog)["outcome"], facts_of(caplog)["reason"]) == ("error", "the engine died")


def test_health_checks_are_no_lines(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    get(serve().app, "/health")
    assert not caplog.records


def test_json_lines_have_the_numbers_as_fields(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging("info", "json", Console(file=output))
    post(serve(drafted).app, {"prompt": "Hi"})
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logging.getLogger("outrider.server").exception("that\nfailed")
    answered, failed = map(json.loads, output.getvalue().splitlines())
    assert (answered["level"], answered["logger"]) == ("info", LOGGER)
    assert (answered["status"], answered["completion_tokens"]) == (200, 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", answered["time"])
    assert failed["message"] == "that\nfailed"
    assert "ZeroDivisionError" in failed["exception"]


# What would begin a line, or move a cursor, somewhere: a newline and its like, C0, C1, bidi.
ODD = "\n\r\x0b\x0c\x1b[31m\x7f\x85\x9b2J\u2028\u202e"
FORGED = f"2026-01-01 00:00:00,000 INFO outrider.server: all is well{ODD}and more"


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_line_is_written_by_a_client(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, log_format: str, is_terminal: bool
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    # A terminal of no colours: what is left of escape codes is then not ours.
    console = Console(file=output, width=500, force_terminal=is_terminal, color_system=None)
    configure_logging("debug", log_format, console)
    path = f"/v1/{FORGED}"
    post(serve().app, {"prompt": "Hi", FORGED: 1, "speculation": {FORGED: 1}}, path=path)
    post(serve().app, {"prompt": "Hi", FORGED: 1}, {"x-request-id": FORGED})
    log = logging.getLogger("uvicorn.error")
    try:
        try:
            raise KeyError(FORGED)
        except KeyError as error:
            raise ExceptionGroup(FORGED, [ValueError(FORGED)]) from error
    except ExceptionGroup:
        log.exception("Exception in ASGI application\n")
    log.warning("%s", FORGED)
    text = output.getvalue()
    assert text.count("and more") >= 4
    assert all(char.isprintable() for char in text.replace("\n", ""))
    for line in text.split("\n"):
        assert not re.match(r"2026-01-01|and more|\[31m", line)


def test_a_path_is_logged_as_it_was_sent(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.server")
    with on_a_socket(serve()) as url:
        httpx.get(f"{url}/v1/a%0a%1b%20b")
    assert facts_of(caplog)["path"] == "/v1/a%0a%1b%20b"
