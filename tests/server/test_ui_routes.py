"""What the page needs of the server: its files, /info and the stream of numbers."""

import asyncio
import tomllib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from asgi import Call, get, post
from served import Served

from outrider.engine.api import EngineStats
from outrider.engine.processes.client import EngineClient
from outrider.server.http import stats
from outrider.server.http.stats import Stats
from outrider.server.http.ui import FILES as FOLDER
from outrider.server.observe.metrics import Metrics

Serve = Callable[..., Served]
FILES = ("/ui/", "/ui/style.css", "/ui/app.js", "/ui/icon.svg")


@pytest.mark.parametrize("path", FILES)
def test_the_page_needs_no_key_and_may_load_nothing_from_elsewhere(serve: Serve, path: str) -> None:
    reply = get(serve(api_keys=("one",)).app, path)
    assert reply.status == 200
    assert reply.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in reply.headers["content-security-policy"]


def test_every_file_of_the_page_is_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["outrider.server.ui"]
    names = [path.name for path in FOLDER.iterdir()]
    assert len(names) > 8
    assert [name for name in names if not any(fnmatch(name, each) for each in patterns)] == []


@pytest.mark.parametrize("root_path", ["", "/models/a"])
@pytest.mark.parametrize("path", ["", "/", "/ui"])
def test_a_shorter_address_leads_to_it_without_a_key(
    serve: Serve, root_path: str, path: str
) -> None:
    given = root_path + path or "/"
    reply = get(serve(api_keys=("one",), root_path=root_path).app, given)
    assert reply.status == 307
    assert urljoin(given, reply.headers["location"]) == f"{root_path}/ui/"


@pytest.mark.parametrize("path", ["/ui/../info", "/ui/%2e%2e/info", "/ui/../http/app.py", "/uix"])
def test_a_key_is_asked_for_beside_it(serve: Serve, path: str) -> None:
    assert get(serve(api_keys=("one",)).app, path).status in (401, 404)


@pytest.mark.parametrize("path", ["/info", "/stats/stream"])
def test_numbers_need_a_key(serve: Serve, path: str) -> None:
    assert get(serve(api_keys=("one",)).app, path).status == 401


@pytest.mark.parametrize("path", ["/", "/ui", *FILES])
def test_it_can_be_turned_off(serve: Serve, path: str) -> None:
    assert get(serve(ui=False).app, path).status == 404


def test_info_shows_what_is_served(serve: Serve) -> None:
    served = serve()
    reported = get(served.app, "/info").json()
    assert (reported["model"], reported["state"], reported["chats"]) == (
        "test-model",
        "ready",
        True,
    )
    assert reported["engine"]["speculation"]["num_speculative_tokens"] == 4
    assert reported["engine"]["draft"]["dtype"] == "float32"
    assert served.client.info is not None
    served.client.info = replace(served.client.info, host_pages=7, host_bytes=700)
    cache = get(served.app, "/info").json()["engine"]["cache"]
    assert (cache["host_pages"], cache["host_bytes"]) == (7, 700)
    served.client.info, served.client.state = None, "starting"
    reported = get(served.app, "/info").json()
    assert (reported["state"], reported["engine"]) == ("starting", None)


def test_the_page_asks_for_no_more_logprobs_than_the_server_returns(serve: Serve) -> None:
    served = serve(max_logprobs=2)
    most = get(served.app, "/info").json()["max_logprobs"]
    assert most == 2
    assert post(served.app, {"prompt": "Hi", "logprobs": most}).status == 200
    assert "info?.max_logprobs" in (FOLDER / "playground.js").read_text()


def test_info_names_models_and_no_folders(serve: Serve) -> None:
    def names(target: str, draft: str | None) -> tuple[str, str | None]:
        pair = {"target": {"model": target}, "draft": {"model": draft}}
        reported = get(serve(pair=pair).app, "/info").json()["engine"]
        assert reported["speculation"]["adaptive"] is True
        assert reported["speculation"]["verification"] == "block"
        return reported["target"]["model"], reported["draft"]["model"]

    assert names("Qwen/Qwen3-8B", "/data/private/draft") == ("Qwen/Qwen3-8B", "draft")
    assert names("./models/mine", None) == ("mine", None)


def first_events(served: Served, number: int) -> list[Any]:
    """The first events of a stream of numbers, and then the gate closes."""

    async def run() -> list[Any]:
        call = Call(served.app, "GET", "/stats/stream", [b""])
        while call.reply.body.count(b"\n\n") < number:
            await asyncio.sleep(0.01)
        served.gate.open = False
        await asyncio.wait_for(call.finished, 5)
        return call.reply.chunks

    return asyncio.run(run())


def test_the_stream_of_numbers_shows_the_engines_state(serve: Serve) -> None:
    served = serve()
    served.client.stats = EngineStats(
        num_running=2, pages_used=3, generation_tokens=50, drafted_per_position=[9, 4]
    )
    post(served.app, {"prompt": "Hi"})
    event, *_ = first_events(served, 1)
    assert (event["state"], event["num_running"], event["pages_used"]) == ("ready", 2, 3)
    assert (event["generation_tokens"], event["drafted_per_position"]) == (50, [9, 4])
    assert event["source"] == "draft_model"
    first_token = event["latencies"]["time_to_first_token"]
    assert first_token["count"] == 1
    assert first_token["buckets"][-1][1] == 1
    assert event["latencies"]["inter_token_latency"]["count"] == 1


def test_it_ends_when_the_server_leaves(serve: Serve) -> None:
    assert len(first_events(serve(), 2)) >= 2


def test_streams_share_the_numbers_of_a_moment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Stats] = []
    take = stats.stats_of

    def noting(client: EngineClient, metrics: Metrics) -> Stats:
        taken.append(take(client, metrics))
        return taken[-1]

    monkeypatch.setattr(stats, "stats_of", noting)

    async def run() -> list[list[float]]:
        served = serve()
        calls = [
            Call(served.app, "GET", "/stats/stream", [b""], query="interval_s=0.1")
            for _ in range(20)
        ]
        while any(call.reply.body.count(b"\n\n") < 3 for call in calls):
            await asyncio.sleep(0.01)
        served.gate.open = False
        await asyncio.gather(*(call.finished for call in calls))
        return [[event["time_s"] for event in call.reply.chunks] for call in calls]

    times = asyncio.run(run())
    assert len(taken) < sum(map(len, times)) / 5
    for reported in times:
        assert reported == sorted(
            set(reported)
        )  # none twice: rates are differences divided by times


def test_it_ends_when_its_reader_leaves(serve: Serve) -> None:
    async def run() -> None:
        call = Call(serve().app, "GET", "/stats/stream", [b""])
        await call.until_body()
        call.leave()
        await asyncio.wait_for(call.finished, 5)

    asyncio.run(run())


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "1e9"])
def test_an_interval_is_checked(serve: Serve, interval: str) -> None:
    async def run() -> int:
        call = Call(serve().app, "GET", "/stats/stream", [b""], query=f"interval_s={interval}")
        await asyncio.wait_for(call.finished, 5)
        return call.reply.status

    assert asyncio.run(run()) == 400


def test_a_dead_engine_is_shown_in_the_stream(serve: Serve) -> None:
    served = serve()
    served.client.state = "restarting"
    assert get(served.app, "/info").json()["state"] == "restarting"
    assert first_events(served, 1)[0]["state"] == "restarting"
