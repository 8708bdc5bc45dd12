"""Both clients with the real engine behind them, on tiny random models."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_clients import collect, pages_used_become, state_becomes
from engines import engine_config, generate, prompts
from in_process import InProcessEngine
from tiny_models import VOCAB

from outrider.engine.api import NewRequest, QueueFullError, SamplingParams
from outrider.engine.processes.client import EngineClient, EngineUnavailableError
from outrider.engine.processes.process_engine import ProcessEngine

pytestmark = pytest.mark.anyio


@pytest.fixture(
    scope="module",
    params=[
        InProcessEngine,
        # The server's end-to-end tests have it flood and leave this one; so does every request.
        pytest.param(ProcessEngine, marks=[pytest.mark.slow, pytest.mark.deep]),
    ],
)
async def client(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path]
) -> AsyncIterator[EngineClient]:
    config = engine_config(
        tiny_model(seed=0), tiny_model(seed=1), max_num_seqs=2, max_queue_len=4, num_pages=128
    )
    # Engines of other tests, in this process, may still hold the processes of their grammars.
    children = psutil.Process().children()
    client: EngineClient = request.param(replace(config, num_threads=1))
    await client.start()
    yield client
    await client.stop()
    assert set(psutil.Process().children()) <= set(children)


def sequence(request_id: str, prompt: list[int], max_tokens: int = 20) -> NewRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return NewRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


async def test_greedy_tokens_are_those_of_generate(
    client: EngineClient, tiny_model: Callable[..., Path]
) -> None:
    given = prompts([3, 17, 9], VOCAB)
    stream = await client.generate([sequence(str(i), p) for i, p in enumerate(given)])
    expected = {str(i): generate(tiny_model(seed=0), p, 20) for i, p in enumerate(given)}
    assert await collect(stream) == expected


async def test_leaving_in_mid_stream_frees_all_pages(client: EngineClient) -> None:
    (prompt,) = prompts([40], VOCAB)
    stream = await client.generate([sequence(f"r{i}", prompt, 200) for i in range(4)])
    await anext(stream)
    assert client.stats.pages_used > 0
    await stream.aclose()
    await pages_used_become(client, 0)
    assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)


async def test_a_flood_is_answered_in_full(client: EngineClient) -> None:
    (prompt,) = prompts([5], VOCAB)

    async def ask(i: int) -> bool:
        try:
            stream = await client.generate([sequence(f"r{i}", prompt)])
        except QueueFullError:
            return False
        return len((await collect(stream))[f"r{i}"]) == 20

    served = await asyncio.gather(*map(ask, range(50)))
    assert 4 <= sum(served) < 50
    await pages_used_become(client, 0)


@pytest.mark.slow
@pytest.mark.sweep  # of a scripted engine in test_process_engine.py, a server's in test_workers.py
@pytest.mark.parametrize("client", [ProcessEngine], indirect=True)
async def test_kill_9_in_mid_stream_costs_only_what_was_running(client: Any) -> None:
    (prompt,) = prompts([5], VOCAB)
    before = await collect(await client.generate([sequence("a", prompt)]))
    stream = await client.generate([sequence("a", prompt, 200)])
    await anext(stream)
    os.kill(client.info.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="killed by signal 9"):
        await collect(stream)
    await state_becomes(client, "ready")
    assert await collect(await client.generate([sequence("a", prompt)])) == before


@pytest.mark.slow
@pytest.mark.deep
async def test_a_killed_rank_costs_only_what_was_running(tiny_model: Callable[..., Path]) -> None:
    config = engine_config(tiny_model(seed=0), tiny_model(seed=1), num_pages=128)
    target = replace(config.target, tensor_parallel=2)
    client = ProcessEngine(replace(config, target=target, num_threads=1))
    await client.start()
    (prompt,) = prompts([5], VOCAB)
    expected = {"a": generate(tiny_model(seed=0), prompt, 20)}
    assert await collect(await client.generate([sequence("a", prompt)])) == expected
    assert client.info is not None
    (rank,) = psutil.Process(client.info.pid).children()
    stream = await client.generate([sequence("a", prompt, 200)])
    await anext(stream)
    rank.kill()
    with pytest.raises(EngineUnavailableError, match="rank 1 of the target: killed by"):
        await collect(stream)
    await state_becomes(client, "restarting")
    await state_becomes(client, "ready")
    assert await collect(await client.generate([sequence("a", prompt)])) == expected
    await pages_used_become(client, 0)
    engine = psutil.Process(client.info.pid)
    (rank,) = engine.children()
    rank.kill()  # and of an engine without work
    await state_becomes(client, "restarting")
    await client.stop()
    assert not [process for process in (engine, rank) if process.is_running()]


@pytest.mark.slow
@pytest.mark.sweep  # of a scripted engine in test_process_engine.py, a command's in test_serving.py
async def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    client = ProcessEngine(engine_config(tmp_path / "nothing"))
    with pytest.raises(EngineUnavailableError, match=r"could not start: .*nothing"):
        await client.start()
    await client.stop()
