"""Statistics of the running server as a stream of events, for pages that show them live."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client.core import Metric
from starlette.responses import Response

from outrider.engine.processes.client import EngineClient

from ..api.protocol import APIResponse
from ..base.errors import APIError
from ..base.json_text import json_text
from ..base.streaming import EventStream, server_sent
from ..observe.metrics import Metrics
from .middleware import Gate

# How long all streams report the same numbers, and how often each looks whether the server leaves.
TICK_S = 0.1

_LATENCIES = {
    "time_to_first_token": "outrider_time_to_first_token_seconds",
    "inter_token_latency": "outrider_inter_token_latency_seconds",
}


class Latency(APIResponse):
    """A histogram since the server started."""

    count: int
    sum_s: float
    buckets: list[tuple[float, int]]  # (upper bound in seconds, how many were at most as long)


class Stats(APIResponse):
    """Present gauges, and counters since the start: for rates, divide differences by `time_s`'s."""

    time_s: float  # of a monotonic clock
    state: str  # of the engine, as in /health
    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    dead_drafts: int
    source: str | None  # what draws drafts, or the last source
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    latencies: dict[str, Latency]


def stats_of(client: EngineClient, metrics: Metrics) -> Stats:
    info = client.info
    return Stats(
        time_s=time.monotonic(),
        state=client.state,
        source=info.proposer if info else None,
        latencies=_latencies(metrics),
        **dataclasses.asdict(client.stats),
    )


def add_stats_route(router: APIRouter, client: EngineClient, metrics: Metrics, gate: Gate) -> None:
    event, until_s = "", 0.0

    def event_at(now_s: float) -> str:
        nonlocal event, until_s
        if now_s >= until_s:
            event = server_sent(stats_of(client, metrics).to_json())
            until_s = now_s + TICK_S
        return event

    async def events(interval_s: float) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        while gate.open:
            now_s = loop.time()
            yield event_at(now_s)
            next_s = now_s + interval_s
            while gate.open and (left_s := next_s - loop.time()) > 0:
                await asyncio.sleep(min(TICK_S, left_s))
        yield server_sent("[DONE]")

    async def close() -> None:
        return

    async def failed(error: APIError) -> str:
        return server_sent(json_text(error.body()))

    @router.get(
        "/stats/stream",
        response_model=Stats,
        responses={200: {"description": "Events.", "content": {"text/event-stream": {}}}},
    )
    async def stream(interval_s: Annotated[float, Query(ge=0.1, le=60)] = 1.0) -> Response:
        """The statistics as server-sent events, until the server stops or the client leaves."""
        return EventStream(events(interval_s), close=close, failed=failed)


def _latencies(metrics: Metrics) -> dict[str, Latency]:
    families = {family.name: family for family in metrics.registry.collect()}
    return {name: _latency(families.get(family)) for name, family in _LATENCIES.items()}


def _latency(family: Metric | None) -> Latency:
    values: dict[str, float] = {}
    buckets: list[tuple[float, int]] = []
    for sample in family.samples if family is not None else ():
        kind = sample.name.rpartition("_")[2]
        if kind == "bucket":
            if sample.labels["le"] != "+Inf":  # JSON has no infinity, and `count` says the same
                buckets.append((float(sample.labels["le"]), int(sample.value)))
        else:
            values[kind] = sample.value
    return Latency(
        count=int(values.get("count", 0)), sum_s=values.get("sum", 0.0), buckets=sorted(buckets)
    )
