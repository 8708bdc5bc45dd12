"""HTTP over bare connections, byte by byte."""

import json
import socket
import time
from collections.abc import Callable

import httpx
from served import Served

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
