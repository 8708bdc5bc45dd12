"""Files of requests in OpenAI's batch format."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_client import steps
from served import Served
from tiny_pairs import save_tiny_model_with_tokenizer
from typer.testing import CliRunner

from outrider.engine.api import QueueFullError
from outrider.server.cli import app
from outrider.server.http import batch
from outrider.server.http.batch import answer_lines

Serve = Callable[..., Served]


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(request) + "\n"


def answers(served: Served, lines: list[str], max_at_once: int = 2) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        told = answer_lines(served.app, lines, max_at_once=max_at_once)
        return {answer["custom_id"]: answer async for answer in told}

    return asyncio.run(run())


def test_every_line_is_answered_by_its_route(serve: Serve) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    told = answers(
        serve(),
        [
            line("a", {"prompt": "Hi"}),
            "\n",
            line("b", chat, "/v1/chat/completions"),
            line("c", {"input": "Hi"}, "/v1/responses"),
            line("d", chat | {"max_tokens": 5}, "/v1/messages"),
            line("e", {"prompt": "Hi", "temperature": -1}),
            line("f", {}, "/v1/nowhere"),
        ],
    )
    statuses = {each: answer["response"]["status_code"] for each, answer in told.items()}
    assert statuses == {"a": 200, "b": 200, "c": 200, "d": 200, "e": 400, "f": 404}
    assert all(answer["error"] is None for answer in told.values())
    assert all(answer["id"] and answer["response"]["request_id"] for answer in told.values())
    assert told["a"]["response"]["body"]["choices"][0]["text"] == " Hello world"
    assert told["e"]["response"]["body"]["error"]["param"] == "temperature"


def test_line_that_is_no_request_is_an_error_of_its_own(serve: Serve) -> None:
    lines = [
        "{\n",
        '{"custom_id": "a"}',
        line("b", {"prompt": "Hi", "stream": True}),
        line("c", {}),
        '{"custom_id": "n", "body": ' + "[" * 5000 + "]" * 5000 + "}\n",
    ]
    told = answers(serve(), [*lines, line("d", {"prompt": "Hi"})])
    errors = {each: answer["error"] and answer["error"]["message"] for each, answer in told.items()}
    assert "Invalid JSON" in errors[None]  # type: ignore[index]
    assert "url: Field required" in errors["a"]
    assert "stream" in errors["b"]
    assert errors["c"] is None
    assert told["d"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    "bad",
    [
        line("bad", {"prompt": "Hi"}, "/v1/completions/"),
        line("bad", {"prompt": "Hi", "temperature": float("nan")}),
        line("bad", {"prompt": "Hi"}, "/\n"),
        line("bad", {"prompt": "Hi"}, "/" + "x" * 100_000),
    ],
    ids=["redirected", "nan", "line break", "long"],
)
def test_line_that_cannot_be_asked_does_not_end_the_batch(serve: Serve, bad: str) -> None:
    told = answers(serve(), [line("a", {"prompt": "Hi"}), bad, line("b", {"prompt": "Hi"})])
    assert told["a"]["response"]["status_code"] == told["b"]["response"]["status_code"] == 200
    assert (told["bad"]["response"], told["bad"]["error"]["code"]) == (None, "invalid_line")
    assert 0 < len(told["bad"]["error"]["message"]) <= batch.MAX_REASON_CHARS


def test_no_more_run_at_once_than_fit(serve: Serve) -> None:
    running = most = 0
    served = serve()
    generate = served.client.generate

    async def counting(requests: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await generate(requests)

    served.client.generate = counting  # type: ignore[method-assign]
    assert len(answers(served, [line(str(i), {"prompt": "Hi"}) for i in range(9)], 3)) == 9
    assert most == 3


def test_request_waits_where_the_queue_is_full(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "RETRY_S", 0.001)
    served = serve()
    refusals = [QueueFullError("full")] * 3
    generate = served.client.generate

    async def refusing(requests: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await generate(requests)

    served.client.generate = refusing  # type: ignore[method-assign]
    told = answers(served, [line("a", {"prompt": "Hi"})])
    assert told["a"]["response"]["status_code"] == 200


def test_answer_that_fails_under_way_does_not_end_the_batch(serve: Serve) -> None:
    def play(request: Any) -> Any:
        bad = len(request.prompt_token_ids) == 1
        return [ZeroDivisionError("bug")] if bad else steps(request, [70])

    told = answers(serve(play), [line("a", {"prompt": [70]}), line("b", {"prompt": [70, 71]})])
    assert told["a"]["response"]["status_code"] == 500
    assert told["b"]["response"]["status_code"] == 200


@pytest.mark.deep
def test_command_answers_a_file(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target = save_tiny_model_with_tokenizer(tmp_path / "target")
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    given.write_text(line("a", body) + line("b", body | {"max_tokens": 0}))
    settings = [f"target.model={target}", "speculation.proposer=ngram", "cache.num_pages=64"]
    settings += ["engine.num_threads=1", 'server.api_keys=["key"]']
    arguments = ["run-batch", "-i", str(given), "-o", str(output)]
    arguments += [argument for setting in settings for argument in ("--set", setting)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert "2 requests, 1 of them failed" in run.output
    told = {each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())}
    answer = told["a"]["response"]["body"]
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 4
    assert told["b"]["response"]["status_code"] == 400


def test_command_says_what_is_missing(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "in.jsonl")
    run = CliRunner().invoke(app, ["run-batch", "-i", missing, "-o", "-"])
    assert run.exit_code == 1
    assert f"outrider: --input {missing}: No such file" in run.output
