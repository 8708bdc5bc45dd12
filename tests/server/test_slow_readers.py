"""Clients that read slowly or not at all, and those that leave."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import socket_server
from raw_connections import JSON, LENGTH, OK, VERSION, Serve, connect, post, to_the_end, until
from scripted_client import steps
from socket_server import on_a_socket

from outrider.engine.api import NewRequest, RequestOutput
from outrider.server.http import http_server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are put behind sockets from now on."""
    made: list[Any] = []

    def noting(*args: Any) -> Any:
        made.append(http_server.Server(*args))
        return made[-1]

    monkeypatch.setattr(socket_server, "Server", noting)
    return made


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
