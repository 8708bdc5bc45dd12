"""What the log tells of requests, and never of their text."""

import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from asgi import get, post
from rich.console import Console
from scripted_client import steps
from served import Served

from outrider.server.console import configure_logging

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
    assert facts == {
        "request_id": "abc",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "cached_tokens": 1,
        "completion_tokens": 3,
        "draft_tokens": 4,
        "accepted_tokens": 1,
        "queue_s": 0.0,
    }
    assert re.search(
        rf"POST /v1/completions 200 ok in 0\.\d+ s, {num_prompt_tokens} \(1 cached\) \+ 3 tokens, "
        r"the first after 0\.\d+ s, 1 of 4 drafts accepted, abc",
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
