"""Files of requests in OpenAI's batch format."""

import asyncio
import gc
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_client import steps
from served import Served
from tiny_pairs import save_tiny_model_with_tokenizer
from typer.testing import CliRunner, Result

from outrider.engine.api import QueueFullError
from outrider.engine.processes.client import EngineUnavailableError
from outrider.server.cli import app
from outrider.server.http import batch
from outrider.server.http.batch import answer_lines

Serve = Callable[..., Served]


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(request) + "\n"


def answers(served: Served, lines: list[str], max_at_once: int = 2) -> dict[str, Any]:
    file = io.BytesIO("".join(lines).encode("utf-8", "surrogateescape"))

    async def run() -> dict[str, Any]:
        answered = answer_lines(served.app, served.client, file, max_at_once=max_at_once)
        return {answer["custom_id"]: answer async for answer in answered}

    return asyncio.run(run())


def test_lines_may_begin_with_a_byte_order_mark(serve: Serve) -> None:
    given = [f"\ufeff{line(name, {'prompt': 'Hi'})}" for name in "ab"]
    answered = answers(serve(), ["\ufeff\n", *given])
    assert [answered[name]["response"]["status_code"] for name in "ab"] == [200, 200]


def test_every_line_is_answered_by_its_route(serve: Serve) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    answered = answers(
        serve(),
        [
            line("a", {"prompt": "Hi"}),
            "\n",
            line("b", chat, "/v1/chat/completions"),
            line("c", {"input": "Hi"}, "/v1/responses"),
            line("d", chat | {"max_tokens": 5}, "/v1/messages"),
            line("e", {"prompt": "Hi", "temperature": -1}),
            line("f", {}, "/v1/nowhere"),
            line("g", chat, "/api/chat"),
            line("h", {"prompt": "Hi"}, "/api/generate/"),
            line("i", {"prompt": "Hi"}, "/tokenize"),
        ],
    )
    statuses = {each: answer["response"]["status_code"] for each, answer in answered.items()}
    assert statuses == dict.fromkeys("abcdghi", 200) | {"e": 400, "f": 404}
    assert all(answer["error"] is None for answer in answered.values())
    assert all(answer["id"] and answer["response"]["request_id"] for answer in answered.values())
    assert answered["a"]["response"]["body"]["choices"][0]["text"] == " Hello world"
    assert answered["g"]["response"]["body"]["message"]["content"] == " Hello world"
    assert answered["e"]["response"]["body"]["error"]["param"] == "temperature"


def test_line_that_is_no_request_is_an_error_of_its_own(serve: Serve) -> None:
    lines = [
        "{\n",
        '{"custom_id": "a"}\n',
        line("b", {"prompt": "Hi", "stream": True}),
        line("g", {"input": "Hi", "background": True}, "/v1/responses"),
        line("c", {}),
        '{"custom_id": "n", "body": ' + "[" * 5000 + "]" * 5000 + "}\n",
        line("u", {"prompt": "caf\udce9"}).replace("\\udce9", "\udce9"),  # of Latin-1
    ]
    answered = answers(serve(), [*lines, line("d", {"prompt": "Hi"})])
    errors = {
        each: answer["error"] and answer["error"]["message"] for each, answer in answered.items()
    }
    assert "Invalid JSON" in errors[None]  # type: ignore[index]
    assert " line " not in errors[None]  # type: ignore[index]
    numbers = {each: answer["error"]["line"] for each, answer in answered.items() if errors[each]}
    assert {each: numbers[each] for each in "abg"} == {"a": 2, "b": 3, "g": 4}
    assert "url: Field required" in errors["a"]
    assert "stream" in errors["b"]
    assert "background" in errors["g"]
    assert errors["c"] is None
    assert answered["d"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    "bad",
    [
        line("bad", {"prompt": "Hi", "temperature": float("nan")}),
        line("bad", {"prompt": "Hi"}, "/\n"),
        line("bad", {"prompt": "Hi"}, "/" + "x" * 100_000),
    ],
    ids=["nan", "line break", "long"],
)
def test_line_that_cannot_be_asked_does_not_end_the_batch(serve: Serve, bad: str) -> None:
    answered = answers(serve(), [line("a", {"prompt": "Hi"}), bad, line("b", {"prompt": "Hi"})])
    assert (
        answered["a"]["response"]["status_code"] == answered["b"]["response"]["status_code"] == 200
    )
    assert (answered["bad"]["response"], answered["bad"]["error"]["code"]) == (None, "invalid_line")
    assert 0 < len(answered["bad"]["error"]["message"]) <= batch.MAX_LINE_ERROR_CHARS


def test_no_more_run_at_once_than_fit(serve: Serve) -> None:
    running = most = 0
    served = serve()
    generate = served.client.generate
    as_many_as_fit = asyncio.Event()

    async def counting(requests: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            as_many_as_fit.set()
        await asyncio.wait_for(as_many_as_fit.wait(), 30)
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
    answered = answers(served, [line("a", {"prompt": "Hi"})])
    assert answered["a"]["response"]["status_code"] == 200


def test_request_waits_for_an_engine_that_restarts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "RETRY_S", 0.001)
    served = serve()
    client, generate = served.client, served.client.generate
    client.state, states = "restarting", ["ready", "restarting", "restarting"]

    async def restarting(requests: Any) -> Any:
        if client.state != "ready":
            client.state = states.pop()  # type: ignore[assignment]
            raise EngineUnavailableError("it died")
        return await generate(requests)

    client.generate = restarting  # type: ignore[method-assign]
    answered = answers(served, [line("a", {"prompt": "Hi"}), line("b", {"prompt": "Hi"})])
    assert [answered[each]["response"]["status_code"] for each in "ab"] == [200, 200]


def test_an_engine_that_failed_ends_the_batch(serve: Serve) -> None:
    served = serve()
    served.client.state, served.client.status_reason = "failed", "it keeps dying"
    served.client.refusal = EngineUnavailableError("it keeps dying")
    with pytest.raises(EngineUnavailableError, match="it keeps dying"):
        answers(served, [line(str(i), {"prompt": "Hi"}) for i in range(9)])


def test_answers_do_not_wait_for_the_next_line_of_a_pipe(serve: Serve) -> None:
    served = serve()
    end, start = os.pipe()

    async def run() -> list[Any]:
        with open(end, "rb") as file:
            answered = answer_lines(served.app, served.client, file, max_at_once=2)
            os.write(start, line("a", {"prompt": "Hi"}).encode())
            first = await asyncio.wait_for(anext(answered), 10)
            os.write(start, line("b", {"prompt": "Hi"}).encode())
            os.close(start)
            return [first["custom_id"], *[answer["custom_id"] async for answer in answered]]

    assert asyncio.run(run()) == ["a", "b"]


def test_answer_that_fails_under_way_does_not_end_the_batch(serve: Serve) -> None:
    def play(request: Any) -> Any:
        bad = len(request.prompt_token_ids) == 1
        return [ZeroDivisionError("bug")] if bad else steps(request, [70])

    answered = answers(serve(play), [line("a", {"prompt": [70]}), line("b", {"prompt": [70, 71]})])
    assert answered["a"]["response"]["status_code"] == 500
    assert answered["b"]["response"]["status_code"] == 200


def run_batch(given: Path, output: Path) -> Result:
    """The command, with a tiny model beside the input."""
    target = save_tiny_model_with_tokenizer(given.parent / "target")
    settings = [f"target.model={target}", "speculation.proposer=ngram", "cache.num_pages=64"]
    settings += ["engine.num_threads=1", 'server.api_keys=["key"]']
    arguments = ["run-batch", "-i", str(given), "-o", str(output)]
    arguments += [argument for setting in settings for argument in ("--set", setting)]
    return CliRunner().invoke(app, arguments)


@pytest.mark.deep
def test_command_answers_a_file(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    given.write_text(line("a", body) + line("b", body | {"max_tokens": 0}))
    run = run_batch(given, output)
    assert run.exit_code == 0, run.output
    assert "2 requests, 1 of them failed" in run.output
    answered = {
        each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())
    }
    answer = answered["a"]["response"]["body"]
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 4
    assert answered["b"]["response"]["status_code"] == 400


@pytest.mark.usefixtures("in_this_process")
def test_command_fails_if_every_line_failed(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(line("a", {"prompt": "Hi", "max_tokens": 0}) + "{\n")
    run = run_batch(given, output)
    assert run.exit_code == 1, run.output
    assert "2 requests, 2 of them failed" in run.output
    assert len(output.read_text().splitlines()) == 2
    given.write_text("")
    assert run_batch(given, output).exit_code == 0


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_that_takes_no_more_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = tmp_path / "in.jsonl"
    bodies = [{"prompt": "Hi", "max_tokens": length, "ignore_eos": True} for length in (1, 400)]
    given.write_text("".join(line(str(body["max_tokens"]), body) for body in bodies))
    run = run_batch(given, Path("/dev/full"))
    gc.collect()
    assert (run.exit_code, "No space left" in run.output) == (1, True)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_sigterm_ends_the_command_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def prepare(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("in its turn")
            raise

    monkeypatch.setattr("outrider.server.models.prepare.prepare", prepare)
    (given := tmp_path / "in.jsonl").write_text(line("a", {"prompt": "Hi"}))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what a container's first process has
    try:
        run = CliRunner().invoke(app, ["run-batch", "-i", str(given), "-o", "-"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (run.exit_code, ended) == (130, ["in its turn"])


def test_command_says_what_is_missing(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "in.jsonl")
    run = CliRunner().invoke(app, ["run-batch", "-i", missing, "-o", "-"])
    assert run.exit_code == 1
    assert f"outrider: --input {missing}: No such file" in run.output


@pytest.mark.parametrize(
    ("output", "says"), [("in.jsonl", "the same file"), ("a/b", "No such"), ("/", "Is a directory")]
)
def test_an_output_that_cannot_be_is_reported_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Path("in.jsonl")
    given.write_text(line("a", {"prompt": "Hi"}))
    command = ["run-batch", "./nowhere", "-i", str(given), "-o", output]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 1
    assert f"outrider: --output {output}: " in run.output
    assert says in run.output
    assert given.read_text()


@pytest.mark.usefixtures("in_this_process")
def test_answers_of_an_earlier_run_stay_until_there_are_new_ones(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(line("a", {"prompt": "Hi"}))
    output.write_text("earlier")
    command = ["run-batch", "./nowhere", "-i", str(given), "-o", str(output)]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 1
    assert "./nowhere" in run.output
    assert output.read_text() == "earlier"
