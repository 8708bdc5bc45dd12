"""Whom a request was meant for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from asgi import get
from served import Served

Serve = Callable[..., Served]
LOCAL = ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:1", "127.9.9.9", "[::1]:8000"]
LOCAL += ["[::1]", "a.localhost"]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "0.0.0.0"]
FOREIGN += ["10.0.0.1", "[::2]:80", "", "localhost@evil.example", "evil.example\x1b[31m"]


def status(served: Served, host: str) -> int:
    return get(served.app, "/v1/models", {"host": host}).status


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_only_names_of_loopback_are_served(serve: Serve, bound: str) -> None:
    served = serve(host=bound)
    assert {status(served, host) for host in LOCAL} == {200}
    assert {status(served, host) for host in FOREIGN} == {403}
    error = get(served.app, "/v1/models", {"host": "evil.example"}).error
    assert error["code"] == "host_not_allowed"
    assert "server.allowed_hosts" in error["message"]


def test_a_request_without_a_host_and_the_paths_of_probes_are_served(serve: Serve) -> None:
    served = serve()
    assert get(served.app, "/v1/models").status == 200
    assert get(served.app, "/health", {"host": "10.0.0.1"}).status == 200


def test_elsewhere_any_name_is_served_unless_names_are_set(serve: Serve) -> None:
    anywhere = serve(host="0.0.0.0")
    assert {status(anywhere, host) for host in LOCAL + FOREIGN} == {200}
    named = serve(host="0.0.0.0", allowed_hosts=("llm.example", "*.Internal"))
    for host, expected in (
        ("llm.example:443", 200),
        ("LLM.example.", 200),
        ("a.b.internal", 200),
        ("internal", 403),
        ("x.llm.example", 403),
        ("localhost", 403),
    ):
        assert status(named, host) == expected, host
    assert {status(serve(allowed_hosts=("*",)), host) for host in FOREIGN} == {200}


def test_behind_a_unix_socket_any_name_is_served(serve: Serve) -> None:
    served = serve(host="127.0.0.1", uds=Path("server.sock"))
    assert {status(served, host) for host in LOCAL + FOREIGN} == {200}


def test_the_names_that_are_set_take_the_place_of_those_of_loopback(serve: Serve) -> None:
    served = serve(allowed_hosts=("llm.example",))
    assert status(served, "llm.example") == 200
    assert status(served, "localhost") == 403
