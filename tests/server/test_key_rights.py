"""What a key is good for: a cache of its own, and its requests' priority if the config says so."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from asgi import Reply, post
from served import Served
from typer.testing import CliRunner

from outrider.server.cli import app as cli
from outrider.server.config.server_settings import ServerSettings
from outrider.server.config.settings_loader import SettingsError, load_settings

Serve = Callable[..., Served]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
]


def send(served: Served, key: str | None, body: dict[str, Any], path: str) -> Reply:
    return post(served.app, body, {"authorization": f"Bearer {key}"} if key else {}, path=path)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_salt_makes_one_key_share_the_cache_of_another(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    served = serve(api_keys=("one", "two"), priority_api_keys=("three",))
    salts: dict[str, set[str]] = {}
    for key in ("one", "two", "three"):
        others = [salt for found in salts.values() for salt in found]
        for given in (None, "a", "one", "two", "one:", ":two", *others):
            reply = send(served, key, body | {"cache_salt": given}, path)
            assert reply.status == 200, reply.body
            salts.setdefault(key, set()).add(served.client.submitted[-1][0].cache_salt)
    for first, second in combinations(salts.values(), 2):
        assert not first & second


def test_requests_of_one_key_share_the_cache_unless_their_salts_differ(serve: Serve) -> None:
    served = serve(api_keys=("one",))
    for given in (None, None, "a", "a", "b"):
        send(served, "one", {"prompt": "Hi", "cache_salt": given}, "/v1/completions")
    first, again, a, a_again, b = (batch[0].cache_salt for batch in served.client.submitted)
    assert first == again != a == a_again != b != first


def test_keys_share_the_cache_if_the_config_says_so(serve: Serve) -> None:
    served = serve(api_keys=("one", "two"), share_cache_between_keys=True)
    for key in ("one", "two"):
        send(served, key, {"prompt": "Hi"}, "/v1/completions")
    assert {batch[0].cache_salt for batch in served.client.submitted} == {""}


def test_without_keys_the_salt_is_what_the_client_chose(serve: Serve) -> None:
    served = serve()
    send(served, None, {"prompt": "Hi", "cache_salt": "a"}, "/v1/completions")
    send(served, "unasked", {"prompt": "Hi", "priority": -3}, "/v1/completions")
    assert [batch[0].cache_salt for batch in served.client.submitted] == ["a", ""]
    assert served.client.submitted[1][0].priority == -3


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("priority", [-1, 1, -(2**63)])
def test_priority_is_for_the_keys_that_the_config_names(
    serve: Serve, path: str, body: dict[str, Any], priority: int, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# of the night shift\nfour\n")
    served = serve(
        api_keys=("one",), priority_api_keys=("three",), priority_api_key_file=tmp_path / "keys"
    )
    refused = send(served, "one", body | {"priority": priority}, path)
    assert (refused.status, refused.error["param"]) == (403, "priority")
    assert "server.priority_api_keys" in refused.error["message"]
    assert not served.client.submitted
    for key in ("three", "four"):
        assert send(served, key, body | {"priority": priority}, path).status == 200
        assert served.client.submitted[-1][0].priority == priority
    assert send(served, "one", body | {"priority": 0}, path).status == 200
    assert send(served, "five", body, path).status == 401


def test_keys_with_priority_alone_close_the_server_too(serve: Serve) -> None:
    served = serve(priority_api_keys=("three",))
    assert send(served, None, {"prompt": "Hi"}, "/v1/completions").status == 401
    assert send(served, "three", {"prompt": "Hi"}, "/v1/completions").status == 200


def test_no_key_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SERVER__PRIORITY_API_KEYS", "secret-one,secret-two")
    shown = CliRunner().invoke(cli, ["config"])
    assert shown.exit_code == 0
    assert "priority_api_keys" in shown.output
    assert "secret" not in shown.output
    with pytest.raises(SettingsError) as error:
        load_settings(environ={"OUTRIDER_SERVER__PRIORITY_API_KEYS": '["secret", 1'})
    assert "secret" not in str(error.value)


def test_empty_key_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    settings = ServerSettings(priority_api_key_file=tmp_path / "keys")
    with pytest.raises(OSError, match="priority_api_key_file"):
        settings.read_api_keys()
