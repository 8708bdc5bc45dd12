"""Clients that keep a connection busy and give nothing for it."""

import asyncio
import itertools
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import socket_server
from scripted_client import steps
from served import Served
from socket_server import on_a_socket

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.http import connection, http_server, middleware

Serve = Callable[..., Served]
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
OK = json.dumps({"prompt": "Hi"}).encode()
JSON = "content-type: application/json\r\n"
LENGTH = f"{JSON}content-length: {len(OK)}\r\n"


def post(headers: str, body: bytes = b"") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n"
    return head.encode() + body


def connect(url: str, receive_buffer_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.settimeout(10)
    client.connect((httpx.URL(url).host, httpx.URL(url).port or 0))
    return client


def to_the_end(client: socket.socket) -> bytes:
    """All that is sent until the server closes."""
    received = b""
    while True:
        try:
            part = client.recv(65_536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def send(client: socket.socket, data: bytes) -> int:
    """How many bytes of it the server took; none once it has closed."""
    try:
        return client.send(data)
    except ConnectionError:
        return 0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are put behind sockets from now on."""
    made: list[Any] = []

    def noting(*args: Any) -> Any:
        made.append(http_server.Server(*args))
        return made[-1]

    monkeypatch.setattr(socket_server, "Server", noting)
    return made


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


@pytest.fixture
def full(serve: Serve) -> Iterator[str]:
    """A server below /models/a whose only connection has a request."""
    forever = asyncio.Event()
    served = serve(lambda request: [steps(request, [70, 71])[0], forever], root_path="/models/a")
    with (
        on_a_socket(served, max_connections=1, root_path="/models/a") as url,
        connect(url) as busy,
    ):
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


# ---- those who do not read, and those who leave


def endless(request: NewRequest) -> Iterator[RequestOutput]:
    for i in itertools.count():
        yield RequestOutput(request_id=request.request_id, token_ids=[70 + i % 9])


@pytest.mark.parametrize("reads", [0, 1])
def test_a_client_that_does_not_read_its_stream_is_ended(serve: Serve, reads: int) -> None:
    served = serve(endless)
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    request = post(f"{JSON}content-length: {len(body)}\r\n", body)
    with (
        on_a_socket(served, send_buffer_bytes=4096, send_timeout_s=0.3) as url,
        connect(url, receive_buffer_bytes=4096) as client,
    ):
        client.sendall(request)
        deadline_s = time.monotonic() + 10
        while not served.client.aborted:
            assert time.monotonic() < deadline_s
            if reads:
                client.recv(reads)
            time.sleep(0.02)


def test_a_client_that_reads_slowly_gets_all_of_its_answer(serve: Serve) -> None:
    served = serve(lambda request: steps(request, [70 + i % 9 for i in range(600)]))
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 600}).encode()
    request = post(f"{JSON}content-length: {len(body)}\r\nconnection: close\r\n", body)
    received = b""
    with (
        on_a_socket(served, send_buffer_bytes=4096, send_timeout_s=1) as url,
        connect(url, receive_buffer_bytes=4096) as client,
    ):
        client.sendall(request)
        while part := client.recv(4096):
            received += part
            time.sleep(0.02)
    assert b"[DONE]" in received


async def as_much_as_asked(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers GET /NUMBER with so many bytes."""
    num_bytes = int(scope["path"][1:])
    headers = [(b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(num_bytes)})


def asking_for(num_bytes: int) -> bytes:
    head = f"GET /{num_bytes} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    return head.encode()


def body_in(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_what_a_slow_client_reads_counts_although_the_kernel_holds_much(
    serve: Serve, servers: list[Any]
) -> None:
    served = serve()
    served.app = as_much_as_asked
    with (
        on_a_socket(served, send_timeout_s=1) as url,
        connect(url, receive_buffer_bytes=4096) as client,
    ):
        client.sendall(asking_for(6_000_000))
        for _ in range(16):  # 300 kB a second
            time.sleep(0.1)
            client.recv(32_768)
        assert servers[0].server_state.connections, "it was ended"


def number_late(connections: set[Any]) -> int:
    return sum(each._unsent_since_s is not None for each in connections)


def test_beyond_the_budget_the_slowest_are_closed_first(serve: Serve, servers: list[Any]) -> None:
    served = serve()
    served.app = as_much_as_asked
    with on_a_socket(served, max_unsent_bytes=2**20) as url:
        late = [connect(url, receive_buffer_bytes=4096) for _ in range(4)]
        connections = servers[0].server_state.connections
        for number, client in enumerate(late, 1):
            client.sendall(asking_for(210_000))
            until(lambda n=number: number_late(connections) == n)  # type: ignore[misc]
        reader = connect(url)
        reader.sendall(asking_for(600_000))
        assert len(body_in(to_the_end(reader))) == 600_000
        lengths = [len(to_the_end(client)) for client in late]
        assert lengths[0] == min(lengths) < max(lengths) == lengths[-1]
        for client in late:
            client.close()


def test_a_client_that_leaves_with_another_request_sent_ahead_frees_its_sequences(
    serve: Serve,
) -> None:
    forever = asyncio.Event()
    served = serve(lambda request: [steps(request, [70, 71])[0], forever])
    with on_a_socket(served) as url:
        with connect(url) as client:
            client.sendall(post(LENGTH, OK) + VERSION)
            until(lambda: len(served.client.submitted) == 1)
        until(lambda: len(served.client.aborted) == 1)


def test_a_server_that_leaves_beside_unread_answers_logs_no_traceback(
    serve: Serve,
    servers: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(http_server, "FAREWELL_S", 0.2)
    served = serve(endless)
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    with (
        on_a_socket(served, send_buffer_bytes=4096, shutdown_timeout_s=0) as url,
        connect(url, receive_buffer_bytes=4096) as client,
    ):
        client.sendall(post(f"{JSON}content-length: {len(body)}\r\n", body))
        (server,) = servers
        until(lambda: any(each.flow.write_paused for each in server.server_state.connections))
        server._loop.call_soon_threadsafe(server.drain)
        until(lambda: server.should_exit)
    assert "Traceback" not in caplog.text
    assert not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]
