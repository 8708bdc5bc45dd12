"""Clients that keep a connection busy and give nothing for it."""

import asyncio
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from raw_connections import JSON, LENGTH, OK, VERSION, Serve, connect, post, send, to_the_end, until
from scripted_client import steps
from socket_server import on_a_socket

from outrider.server.http import connection, middleware


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.2)


# ---- early answers


@pytest.mark.parametrize(
    "headers",
    [
        "content-length: 5\r\n",
        "transfer-encoding: chunked\r\n",
        "expect: 100-continue\r\n" + LENGTH,
    ],
)
def test_an_answer_before_the_body_is_the_last_of_its_connection(
    serve: Serve, headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.1)
    with on_a_socket(serve(api_keys=("key",))) as url, connect(url) as client:
        client.sendall(post(headers))
        time.sleep(0.05)
        client.sendall(b"1")
        answer = to_the_end(client)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_refusal_reaches_clients_that_send_their_whole_body_first(serve: Serve) -> None:
    with on_a_socket(serve(api_keys=("key",))) as url:
        reply = httpx.post(f"{url}/v1/completions", content=iter([b"x" * 100_000] * 30))
    assert (reply.status_code, reply.headers["connection"]) == (401, "close")


def test_a_refusal_of_a_request_that_is_whole_leaves_the_connection_open(serve: Serve) -> None:
    with on_a_socket(serve(api_keys=("key",))) as url, connect(url) as client:
        for _ in range(2):
            client.sendall(post(LENGTH, OK))
            answer = client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" not in answer


def test_an_unexpected_failure_is_the_last_answer_of_its_connection_and_says_so(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    served.client.refusal = ZeroDivisionError("a bug")
    with on_a_socket(served) as url, httpx.Client(base_url=url) as client:
        reply = client.post("/v1/completions", json={"prompt": "Hi"})
        assert (reply.status_code, reply.headers.get("connection")) == (500, "close")
        assert client.get("/version").status_code == 200
    assert "a bug" in caplog.text


# ---- HTTP/1.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_an_old_version_gets_no_chunks(serve: Serve, stream: bool) -> None:
    body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
    headers = f"{JSON}expect: 100-continue\r\ncontent-length: {len(body)}\r\n"
    request = post(headers, body).replace(b"HTTP/1.1", b"HTTP/1.0")
    with on_a_socket(serve()) as url, connect(url) as client:
        client.sendall(request)
        head, _, answer = to_the_end(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"chunked" not in head
    assert b"connection: close" in head
    if stream:
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer)["object"] == "text_completion"


# ---- what is no request


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("first", [b"", VERSION])
def test_bytes_that_begin_no_request_do_not_keep_a_connection(serve: Serve, first: bytes) -> None:
    with on_a_socket(serve()) as url, connect(url) as client:
        client.sendall(first)
        until(lambda: not time.sleep(0.02) and not send(client, b"\r\n"))


@pytest.mark.parametrize(
    "flood",
    [
        b"\r\n",
        post(JSON + "transfer-encoding: chunked\r\n", b"0\r\nx: y") + b"x",
        post(JSON + "transfer-encoding: chunked\r\n", b"0\r\n") + b"a:b\r\n",
        post(JSON + "transfer-encoding: chunked\r\n", b"1;x=") + b"x",
        b"GET /" + b"x",
        b"GET / HTTP/1.1\r\n" + b"a:\r\n",
    ],
    ids=["newlines", "trailer", "trailers", "chunk extension", "path", "headers"],
)
def test_what_is_never_read_by_anybody_is_bounded(serve: Serve, flood: bytes) -> None:
    first, more = flood[:-5], flood[-5:] * 4096
    sent_bytes = 0
    with on_a_socket(serve()) as url:
        with connect(url) as client:
            client.sendall(first)
            while part_bytes := send(client, more):
                sent_bytes += part_bytes
                assert sent_bytes < 16 * 2**20  # the sockets' own buffers among them
        assert httpx.get(f"{url}/version").status_code == 200


def test_requests_sent_ahead_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    start = connection.HttpConnection._start_asgi_task

    def noting(self: connection.HttpConnection, cycle: Any, app: Any) -> None:
        queued.append(len(self.pipeline))
        start(self, cycle, app)

    monkeypatch.setattr(connection.HttpConnection, "_start_asgi_task", noting)
    with on_a_socket(serve()) as url:
        with connect(url) as client:
            client.sendall(VERSION * 5)
            until(lambda: len(queued) == 5)
        with connect(url) as client:
            client.sendall(VERSION * 5000)
            to_the_end(client)
        assert max(queued) <= connection.MAX_PIPELINED
        assert httpx.get(f"{url}/version").status_code == 200


# ---- offers of another protocol


CHUNKED = f"{JSON}transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(OK), OK)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize(
    ("headers", "body"), [(LENGTH, OK), (CHUNKED, CHUNKS)], ids=["length", "chunks"]
)
@pytest.mark.parametrize("part_bytes", [10_000, 50, 1], ids=["at once", "in parts", "by bytes"])
def test_an_offer_to_upgrade_is_declined_and_its_request_answered(
    serve: Serve, protocol: str, headers: str, body: bytes, part_bytes: int
) -> None:
    offer = (
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMA\r\n"
    )
    offering = post(offer + headers, body)
    last = VERSION.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    sent = offering + VERSION + offering * 2 + last
    served = serve()
    with on_a_socket(served) as url, connect(url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for first in range(0, len(sent), part_bytes):
            client.sendall(sent[first : first + part_bytes])
        answers = to_the_end(client)
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1 ") == 5
    assert answers.count(b"text_completion") == len(served.client.submitted) == 3


@pytest.mark.parametrize("connection", ["upgrade, close", "close, upgrade"])
def test_the_last_request_of_a_connection_may_offer_to_upgrade(
    serve: Serve, connection: str
) -> None:
    with on_a_socket(serve()) as url, connect(url) as client:
        client.sendall(post(f"connection: {connection}\r\nupgrade: h2c\r\n{LENGTH}", OK))
        answer = to_the_end(client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer


@pytest.mark.parametrize("target", ["localhost:443", "/version"])
@pytest.mark.parametrize("offer", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
def test_a_tunnel_is_refused(serve: Serve, target: str, offer: str) -> None:
    with on_a_socket(serve()) as url, connect(url) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\nhost: localhost\r\n{offer}\r\n".encode())
        assert to_the_end(client).startswith(b"HTTP/1.1 400 ")


# ---- how many


def test_a_new_connection_takes_the_place_of_one_without_a_request(serve: Serve) -> None:
    with on_a_socket(serve(), max_connections=3) as url:
        idle = [connect(url) for _ in range(20)]
        for _ in range(3):
            assert httpx.get(f"{url}/version").status_code == 200
        until(lambda: len(select.select(idle, (), (), 0)[0]) >= 17)  # at their end
        for client in idle:
            client.close()


def test_a_connection_too_many_is_503_while_all_have_requests(serve: Serve) -> None:
    forever = asyncio.Event()
    served = serve(lambda request: [steps(request, [70, 71])[0], forever])
    with on_a_socket(served, max_connections=2) as url:
        busy = [connect(url) for _ in range(2)]
        for client in busy:
            client.sendall(post(LENGTH, OK))
        until(lambda: len(served.client.submitted) == 2)
        with connect(url) as client:
            client.sendall(post(LENGTH, OK))
            answer = to_the_end(client)
        head, body = answer.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert httpx.get(f"{url}/live").status_code == 200
        crowd = [connect(url) for _ in range(9)]  # they say nothing, and make room for each other
        assert httpx.get(f"{url}/live").status_code == 200
        until(lambda: len(select.select(crowd, (), (), 0)[0]) == 9)
        assert len(served.client.submitted) == 2
        for client in busy:
            client.close()
        until(lambda: len(served.client.aborted) == 2)
        assert httpx.get(f"{url}/version").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_half_has_left(serve: Serve, stream: bool) -> None:
    forever = asyncio.Event()
    served = serve(lambda request: [steps(request, [70, 71])[0], forever])
    body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
    with on_a_socket(served) as url, connect(url) as client:
        client.sendall(post(f"{JSON}content-length: {len(body)}\r\n", body))
        until(lambda: len(served.client.submitted) == 1)
        client.shutdown(socket.SHUT_WR)
        until(lambda: len(served.client.aborted) == 1)
        assert not to_the_end(client).endswith(b"0\r\n\r\n")  # no end that looks like success


@pytest.fixture
def full(serve: Serve) -> Iterator[str]:
    """A server below /models/a whose only connection has a request."""
    forever = asyncio.Event()
    served = serve(lambda request: [steps(request, [70, 71])[0], forever], root_path="/models/a")
    with on_a_socket(served, max_connections=1, root_path="/models/a") as url, connect(url) as busy:
        busy.sendall(post(LENGTH, OK))
        until(lambda: len(served.client.submitted) == 1)
        yield url


@pytest.mark.parametrize(
    "path", ["/live", "/live/", "/live?x=/y", "/models/a/live", "http://localhost/live", "/%6cive"]
)
def test_a_full_server_says_that_it_lives_once_a_connection(full: str, path: str) -> None:
    ask = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    with connect(full) as client:
        client.sendall(ask * 2)
        answer = to_the_end(client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("request_bytes", [VERSION, post(LENGTH, OK), post(LENGTH, OK) * 2])
def test_a_request_that_finds_the_server_full_is_not_called_invalid(
    full: str, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(full) as client:
        client.sendall(request_bytes)
        answer = to_the_end(client)
    assert (answer.count(b"HTTP/1.1"), answer[9:12]) == (1, b"503")
    assert "Invalid" not in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "GET /v1/models?x=/live",
        "GET /v1/models/live",
        "GET /models/b/live",
        "GET /live/live",
        "GET http://localhost/version?/live",
        "POST /live",
        "GET /live HTTP/1.1\r\ncontent-length: 1\r\nx:",
        "GET /live HTTP/1.1\r\ntransfer-encoding: chunked\r\nx:",
    ],
)
def test_a_full_server_lets_nothing_else_in(full: str, line: str) -> None:
    with connect(full) as client:
        client.sendall(f"{line} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert to_the_end(client).startswith(b"HTTP/1.1 503 ")
