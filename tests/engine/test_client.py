"""What every client promises, over each transport, with a scripted engine behind them."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_clients import (
    ScriptedProcessEngine,
    ScriptedSharedEngine,
    becomes_true,
    collect,
    pages_used_become,
    scripted_config,
    scripted_in_process,
)
from engine_clients import scripted_request as request

from outrider.engine.api import InvalidRequestError, QueueFullError
from outrider.engine.processes import process
from outrider.engine.processes.client import EngineClient, EngineUnavailableError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[scripted_in_process, ScriptedProcessEngine, ScriptedSharedEngine])
def make_client(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def client(make_client: Any) -> AsyncIterator[EngineClient]:
    client: EngineClient = make_client(scripted_config())
    await client.start()
    yield client
    async with asyncio.timeout(10):
        await client.stop()


async def test_start_reports_progress_and_what_came_up(make_client: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    client: EngineClient = make_client(scripted_config(), lambda *step: seen.append(step))
    assert client.state == "starting"
    with pytest.raises(EngineUnavailableError, match="starting"):
        await client.generate([request("a")])
    info = await client.start()
    assert info == client.info
    assert info.vocab_size == 100
    assert ("target", 1, 1) in seen
    assert (client.state, client.status_reason) == ("ready", None)
    await client.stop()


async def test_what_cannot_be_sent_leaves_no_trace(client: EngineClient) -> None:
    huge = dataclasses.replace(request("a").params, max_tokens=2**64)
    with contextlib.suppress(InvalidRequestError):  # in one process, nothing is encoded
        stream = await client.generate([dataclasses.replace(request("a"), params=huge)])
        await stream.aclose()
    assert await collect(await client.generate([request("b")])) == {"b": [0, 1, 2]}


async def test_sequences_of_a_submission_are_interleaved_and_end(client: EngineClient) -> None:
    stream = await client.generate([request("a", max_tokens=2), request("b", max_tokens=4)])
    outputs = [output async for output in stream]
    assert [o.token_ids[0] for o in outputs if o.request_id == "a"] == [0, 1]
    assert [o.token_ids[0] for o in outputs if o.request_id == "b"] == [0, 1, 2, 3]
    assert [o.request_id for o in outputs][:2] == ["a", "b"]
    assert [o.finish_reason for o in outputs].count("length") == 2
    assert [output async for output in stream] == []


async def test_submissions_run_side_by_side(client: EngineClient) -> None:
    streams = [await client.generate([request(f"r{i}", max_tokens=20)]) for i in range(4)]
    got = await asyncio.gather(*map(collect, streams))
    assert got == [{f"r{i}": list(range(20))} for i in range(4)]


async def test_a_slow_consumer_holds_nobody_up_and_misses_nothing(client: EngineClient) -> None:
    slow = await client.generate([request("slow", max_tokens=200)])
    first = await anext(slow)
    assert await collect(await client.generate([request("fast", max_tokens=300)]))
    assert slow.has_more_tokens("slow")
    assert not slow.has_more_tokens("fast")
    assert first.token_ids + (await collect(slow))["slow"] == list(range(200))
    assert not slow.has_more_tokens("slow")


async def test_a_full_queue_takes_all_or_none(client: EngineClient) -> None:
    running = await client.generate([request("a", max_tokens=500), request("b", max_tokens=500)])
    with pytest.raises(QueueFullError, match="the queue is full"):
        await client.generate([request("c"), request("d"), request("e")])
    assert client.stats.pages_used <= 2
    await collect(await client.generate([request("c"), request("d")]))
    await running.aclose()


async def test_an_invalid_submission_is_refused_in_the_engines_words(client: EngineClient) -> None:
    with pytest.raises(InvalidRequestError, match="an invalid prompt"):
        await client.generate([request("a"), request("b", script="invalid")])
    assert await collect(await client.generate([request("a")])) == {"a": [0, 1, 2]}


async def test_an_id_can_be_used_again_once_its_stream_is_closed(client: EngineClient) -> None:
    running = await client.generate([request("a", max_tokens=500)])
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.generate([request("a")])
    await running.aclose()
    assert await collect(await client.generate([request("a")])) == {"a": [0, 1, 2]}


async def test_a_bug_in_taking_a_request_fails_that_request_alone(client: EngineClient) -> None:
    other = await client.generate([request("other", max_tokens=30)])
    stream = await client.generate([request("a", script="submit_bug", max_tokens=10**6)])
    last = [output async for output in stream][-1]
    assert last.finish_reason == "error"
    assert last.error == "TypeError: a bug in submit"
    assert await collect(other) == {"other": list(range(30))}
    await pages_used_become(client, 0)


async def test_closing_a_stream_frees_its_pages(client: EngineClient) -> None:
    stream = await client.generate([request("a", max_tokens=10**6), request("b", max_tokens=1)])
    await pages_used_become(client, 1)
    await stream.aclose()
    await pages_used_become(client, 0)
    assert client.stats.num_running == 0
    await stream.aclose()
    assert [output async for output in stream] == []


async def test_cancelling_a_consumer_frees_its_pages(client: EngineClient) -> None:
    stream = await client.generate([request("a", max_tokens=10**6)])
    consumer = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)  # a task that never ran would have no stream to close
    await pages_used_become(client, 1)
    consumer.cancel()
    await asyncio.wait({consumer})
    assert consumer.cancelled()
    await pages_used_become(client, 0)


async def test_cancelling_a_submission_frees_its_pages(client: EngineClient) -> None:
    submission = asyncio.create_task(client.generate([request("a", max_tokens=10**6)]))
    await asyncio.sleep(0)  # it has been sent, and its answer cannot have been read yet
    submission.cancel()
    await asyncio.wait({submission})
    assert submission.cancelled()
    assert await collect(await client.generate([request("a")])) == {"a": [0, 1, 2]}
    await pages_used_become(client, 0)


async def test_abort_ends_one_sequence_of_a_submission(client: EngineClient) -> None:
    stream = await client.generate([request("a", max_tokens=10**6), request("b", max_tokens=5)])
    await client.abort(["a", "unknown"])
    reasons = {o.request_id: o.finish_reason async for o in stream}
    assert reasons == {"a": "abort", "b": "length"}
    await pages_used_become(client, 0)
    await client.abort(["a"])


async def test_counters_and_gauges_follow_the_engine(client: EngineClient) -> None:
    await collect(await client.generate([request("a", max_tokens=7)]))
    await pages_used_become(client, 0)
    assert client.stats.generation_tokens == 7
    assert client.stats.drafted_per_position == [7, 0]


async def test_a_start_that_fails_says_why_in_the_engines_words(make_client: Any) -> None:
    client: EngineClient = make_client(scripted_config("missing"))
    with pytest.raises(EngineUnavailableError, match="FileNotFoundError: no model in missing"):
        await client.start()
    assert client.state == "failed"
    assert "no model in missing" in (client.status_reason or "")
    await client.stop()


async def test_stop_ends_streams_with_an_error(client: EngineClient) -> None:
    stream = await client.generate([request("a", max_tokens=10**6)])
    await client.stop()
    with pytest.raises(EngineUnavailableError, match="stopped"):
        await collect(stream)
    with pytest.raises(EngineUnavailableError, match="stopped"):
        await client.generate([request("a")])
    assert client.state == "stopped"


async def test_an_engine_that_comes_up_after_stop_stays_stopped(make_client: Any) -> None:
    client: EngineClient = make_client(scripted_config("slow 0.1"))
    start = asyncio.create_task(client.start())
    await asyncio.sleep(0.01)
    await client.stop()
    with pytest.raises(EngineUnavailableError, match="stopped"):
        await start
    await asyncio.sleep(0)  # what the engine sent last is read by now
    assert client.state == "stopped"


async def test_stop_before_start_and_twice_is_harmless(make_client: Any) -> None:
    client: EngineClient = make_client(scripted_config())
    await client.stop()
    await client.stop()
    assert client.state == "stopped"


async def test_a_step_that_raises_ends_all_streams_with_its_words(client: EngineClient) -> None:
    other = await client.generate([request("other", max_tokens=10**6)])
    stream = await client.generate([request("a", script="step_bug")])
    for broken in (stream, other):
        with pytest.raises(EngineUnavailableError, match="ArithmeticError: a bug in step"):
            await collect(broken)
    assert client.state != "ready"


async def test_a_leak_is_found_once_the_engine_is_idle(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_QUIET_S", 0.1)  # as it is in scripted_engine.py
    other = await client.generate([request("other", max_tokens=10**6)])
    await collect(await client.generate([request("a", script="leak")]))
    assert client.state == "ready"
    await other.aclose()
    await becomes_true(lambda: client.state != "ready")
    assert "a page leaked" in (client.status_reason or "")
