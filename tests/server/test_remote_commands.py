"""`outrider chat` and `outrider bench`, against servers behind real sockets."""

import asyncio
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.status import Status
from scripted_client import Play, steps
from served import Served
from socket_server import on_a_socket, own_certificate
from typer.testing import CliRunner, Result

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.cli import app
from outrider.server.cli.errors import unwritable
from outrider.server.cli.painter import Painter
from outrider.server.evaluation.load import percentile
from outrider.server.evaluation.remote import has_tokens
from outrider.server.text.tokenizer import Tokenizer

Serve = Callable[..., Served]
NOWHERE = "http://127.0.0.1:9"


def outrider(*arguments: str, say: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=say)


def drafting(tokenizer: Tokenizer, text: str) -> Play:
    """Four drafts a step, of which 2, 0 and 4 are accepted; as many as asked for if that is 0."""
    ids = tokenizer.encode(text, add_special_tokens=False)[:9]

    def play(request: NewRequest) -> list[RequestOutput]:
        if request.params.num_speculative_tokens == 0:
            return steps(request, ids)
        return steps(request, ids, sizes=(3, 1, 5), num_drafts=4)

    return play


# ---- chat


def test_chat_shows_the_answer_and_what_was_accepted(serve: Serve, tokenizer: Tokenizer) -> None:
    text = "Hello world, hello there! naïve one two"
    served = serve(drafting(tokenizer, text))
    shown = tokenizer.decode(
        tokenizer.encode(text, add_special_tokens=False)[:9], skip_special_tokens=True
    )
    with on_a_socket(served) as url:
        result = outrider("chat", url, "--seed", "3", say="Hi\nAgain\n/reset\nNew\n/k 0\nPlain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(shown) == 4
    assert result.stdout.count("[6 accepted") == 3
    assert "3.0 tokens a step" in result.stdout
    first, again, new, plain = [batch[-1] for batch in served.client.submitted[-4:]]
    assert [r.params.seed for r in (first, again, new)] == [3] * 3
    lens = [len(r.prompt_token_ids) for r in (first, again, new)]
    assert lens[1] > lens[0] + 8  # the conversation so far
    assert new.prompt_token_ids != again.prompt_token_ids
    assert lens[2] < lens[1]
    assert plain.params.num_speculative_tokens == 0


def test_colours_separate_accepted_tokens_from_others(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with on_a_socket(serve(drafting(tokenizer, "Hello world, hello there!"))) as url:
        shown = outrider("chat", url, say="Hi\n").stdout
    assert "\x1b[32mHello" in shown  # green
    assert "\x1b[33m" in shown or "\x1b[4;33m" in shown  # yellow


def test_an_error_ends_a_turn_and_not_the_conversation(serve: Serve) -> None:
    with on_a_socket(serve()) as url:
        result = outrider("chat", url, "--max-tokens", "5000", say="Hi\n/quit\n")
        assert result.exit_code == 0
        assert "400: This model's maximum context length" in result.stderr


def test_ctrl_c_before_any_text_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it leaves the text so far."""
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("Hello", " you")]
    takes = Painter.take
    interrupted = iter([True, False, True, False, False])

    def take(painter: Painter, choice: dict[str, Any]) -> None:
        if next(interrupted):
            raise KeyboardInterrupt
        takes(painter, choice)

    monkeypatch.setattr(Painter, "take", take)
    with other_server(chunks) as (url, bodies):
        assert outrider("chat", url, say="One\nTwo\nThree\n").exit_code == 0
    said = [[each["content"] for each in body["messages"]] for body in bodies]
    assert said == [["One"], ["Two"], ["Two", "Hello", "Three"]]


@pytest.mark.parametrize("command", ["chat", "bench"])
@pytest.mark.parametrize(
    "url", ["http://[::1", "http://", "ftp://x", "http://x:y", "http://" + 99 * "x"]
)
def test_what_is_no_url_is_called_so(command: str, url: str) -> None:
    result = outrider(command, url)
    assert result.exit_code == 1
    assert re.match(r"outrider: \S+ is no URL of a server \(.+ http://127", result.stderr)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_that_nobody_trusts_is_called_so(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = own_certificate(tmp_path)
    with on_a_socket(serve(), **tls) as url:
        assert "in the environment variable SSL_CERT_FILE" in outrider("chat", url).stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(tls["tls_certificate"]))
        assert outrider("chat", url).exit_code == 0
    with on_a_socket(serve()) as url:
        result = outrider("chat", url.replace("http://", "https://"))
        assert "its URL begins with http://" in result.stderr


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_what_keeps_from_asking_is_shown(
    serve: Serve, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = outrider(command, NOWHERE)
    assert result.exit_code == 1
    assert "cannot reach a server at" in result.stderr
    assert "outrider serve" in result.stderr
    with on_a_socket(serve(api_keys=["secret"])) as url:
        assert "401" in (reported := outrider(command, url).stderr)
        assert "--api-key" in reported
        monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
        assert (
            "serves no model 'x'; it serves test-model"
            in outrider(command, f"{url}/v1/", "--model", "x").stderr
        )


@pytest.mark.parametrize("command", ["chat", "bench", "evaluate"])
@pytest.mark.parametrize("given", ["nan", "inf", "-1", "x"])
def test_a_temperature_is_a_number_from_0_on(command: str, given: str) -> None:
    result = outrider(command, "--temperature", given)
    assert result.exit_code == 2
    assert f"'--temperature': {given} is no number from 0 on" in result.stderr


def test_what_is_no_utf_8_is_sent_and_shown_as_far_as_it_goes(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    served = serve(api_keys=["schl\u00fcssel"])
    with on_a_socket(served) as url:
        result = CliRunner().invoke(
            app,
            ["chat", url, "--system", "be ki\udcffnd", "--api-key", "schl\u00fcssel"],
            input=b"caf\xe9!\n",
        )
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "Hello world" in result.stdout
    prompt = served.client.submitted[-1][0].prompt_token_ids
    assert "caf\ufffd!" in tokenizer.decode(prompt, skip_special_tokens=False)


@contextmanager
def other_server(chunks: list[dict[str, Any]]) -> Iterator[Any]:
    """A server that streams these chunks."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "other"}]}))

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._answer(200, "".join([*events, "data: [DONE]\n\n"]))

        def _answer(self, status: int, content: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()


def token(text: str, **more: Any) -> dict[str, Any]:
    return {"token": text, "text": text, "bytes": list(text.encode()), **more}


def test_chat_separates_recovered_from_bonus_tokens_by_a_trace() -> None:
    steps_of = [
        [token("<think>", kind="plain"), token("Hm", kind="recovered")],
        [token("A", kind="accepted"), token("ß", kind="bonus")],
    ]
    chunks = [
        {"choices": [{"delta": {"reasoning": "Hm"}, "trace": [{"tokens": steps_of[0]}]}]},
        {"choices": [{"delta": {"content": "Aß"}, "trace": [{"tokens": steps_of[1]}]}]},
        {"choices": [], "usage": {}},
    ]
    with other_server(chunks) as (url, bodies):
        shown = outrider("chat", url, say="Hi\n").stdout
    assert "HmAß" in shown
    assert "1 accepted, 1 recovered, 1 bonus, 1 plain, 2.0 tokens a step" in shown
    assert bodies[0]["speculation"] == {"trace": True}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {}, "finish_reason": None}, False),  # of the prompt's progress
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning": "a"}, "finish_reason": None}, True),
        ({"delta": {"tool_calls": [{}]}, "finish_reason": None}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"delta": {}, "trace": [{}], "finish_reason": None}, True),  # text that is held back
    ],
)
def test_times_of_tokens_begin_with_a_token(choice: dict[str, Any], expected: bool) -> None:
    assert has_tokens(choice) == expected


def test_chat_shows_how_far_the_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Status, "update", lambda self, status: shown.append(status))
    progress = {"total": 5000, "cache": 0, "processed": 1024, "time_ms": 7}
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {}}], "prompt_progress": progress},
        {"choices": [{"delta": {"content": "Hello"}}]},
    ]
    with other_server(chunks) as (url, bodies):
        assert "Hello" in outrider("chat", url, say="Hi\n").stdout
    assert bodies[0]["return_progress"] is True
    assert shown == ["reading the prompt: 1,024 of 5,000 tokens"]


def test_an_error_in_the_stream_is_shown() -> None:
    with other_server([{"error": {"message": "out of pages"}}]) as (url, _):
        assert "ended the answer: out of pages" in outrider("chat", url, say="Hi\n").stderr


@pytest.mark.parametrize("chunk", [{"error": "out of pages"}, "out of pages"])
def test_an_error_of_another_server_is_shown(chunk: Any) -> None:
    with other_server([chunk]) as (url, _):
        result = outrider("chat", url, say="Hi\n")
    assert (result.exit_code, "out of pages" in result.stderr) == (0, True)


def test_each_character_has_the_kind_of_its_token() -> None:
    painter = Painter()
    tokens = [
        {"text": "ab", "kind": "accepted"},
        {"text": "", "kind": "accepted"},  # half of a character
        {"text": "🙂", "kind": "bonus"},
        {"text": "<eos>", "kind": "recovered"},  # never shown
    ]
    painter.take({"trace": [{"tokens": tokens}]})
    assert list(painter.paint("a")) == [("a", "accepted")]
    assert list(painter.paint("b🙂")) == [("b", "accepted"), ("🙂", "bonus")]
    assert list(painter.paint("what no token says")) == [("what no token says", "plain")]


def test_the_same_text_twice_has_the_kinds_of_both_tokens() -> None:
    painter = Painter()
    tokens = [{"text": "ha", "kind": kind} for kind in ("accepted", "bonus")]
    painter.take({"trace": [{"tokens": tokens}]})
    assert [*painter.paint("ha"), *painter.paint("ha")] == [("ha", "accepted"), ("ha", "bonus")]


# ---- bench


def test_bench_measures_with_and_without_drafts(
    serve: Serve, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    served = serve(drafting(tokenizer, "Hello world, hello there! naïve one two"))
    out = tmp_path / "bench.json"
    with on_a_socket(served) as url:
        result = outrider(
            "bench", url, "-c", "1", "-c", "3", "--max-tokens", "9", "--requests", "3",
            "--rounds", "2", "--json", str(out),
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.count("50%") == 2  # every column is whole in 80
    reported = json.loads(out.read_text())
    assert (reported["url"], reported["model"]) == (url, "test-model")
    assert [row["concurrency"] for row in reported["loads"]] == [1, 3]
    for row in reported["loads"]:
        assert row["acceptance"] == 0.5  # 6 of 12
        assert row["plain"]["num_requests"] == row["drafted"]["num_requests"] == 6  # no warm-up
        assert row["speedup"] == row["drafted"]["tokens_per_s"] / row["plain"]["tokens_per_s"]
        assert row["plain"]["first_token_s_p99"] >= row["plain"]["first_token_s_p50"] > 0
    requests = [request for batch in served.client.submitted for request in batch]
    drafts = [request.params.num_speculative_tokens for request in requests]
    assert drafts == 2 * 3 * [0, 0, 0, None, None, None]  # two loads, three rounds of each
    assert len({request.cache_salt for request in requests}) == len(requests)
    assert {request.params.max_tokens for request in requests} == {9}


def test_sigterm_ends_bench_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)

    monkeypatch.setattr("outrider.server.evaluation.load.measure_load", measure)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with other_server([]) as (url, _):
            assert outrider("bench", url).exit_code == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_bench_says_if_nothing_was_drafted(serve: Serve) -> None:
    with on_a_socket(serve()) as url:
        result = outrider("bench", url, "-c", "1", "--requests", "1", "--rounds", "1")
        assert "drafted nothing" in result.stdout
        result = outrider("bench", url, "-c", "1", "--max-tokens", "9999")
        assert (result.exit_code, "maximum context length" in result.stderr) == (1, True)


@pytest.mark.parametrize("file", ["/nowhere/out.json", "/"])
def test_bench_refuses_first_what_it_could_not_write(file: str) -> None:
    assert outrider("bench", NOWHERE, "--json", file).exit_code == 2


def test_a_file_that_may_not_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").touch()
    assert [unwritable(tmp_path / name) for name in ("old", "new")] == [None, None]
    for locked in (tmp_path / "old", tmp_path):  # a test may run as root, who may write all
        monkeypatch.setattr("os.access", lambda path, mode, locked=locked: path != locked)
        assert unwritable(tmp_path / ("old" if locked.is_file() else "new")) == "Not writable"


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7.0], 0.5) == 7.0
