"""Serve with Ray on this machine: traffic, a killed replica, up and down. Prints what was seen.

Usage: ray_replicas.py PORT
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from outrider.server.ray import Arguments, build

PORT = int(sys.argv[1])
URL = f"http://127.0.0.1:{PORT}"
BODY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
PATIENCE_S = 150.0


class Traffic:
    """Clients that ask one after another, until they are stopped."""

    def __init__(self, http: httpx.AsyncClient, num_clients: int, **body: Any) -> None:
        self.outcomes: Counter[str] = Counter()
        self.texts: set[str] = set()
        self._http = http
        self._body = BODY | body
        self._going = True
        self._clients = [asyncio.create_task(self._ask()) for _ in range(num_clients)]

    async def _ask(self) -> None:
        while self._going:
            try:
                reply = await self._http.post(f"{URL}/v1/completions", json=self._body)
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1
                continue
            self.outcomes[str(reply.status_code)] += 1
            if reply.status_code == 200:
                self.texts.add(reply.json()["choices"][0]["text"])

    async def stop(self) -> dict[str, int]:
        self._going = False
        await asyncio.gather(*self._clients)
        return dict(self.outcomes)


def running() -> int:
    states = serve.status().applications["default"].deployments["outrider"].replica_states
    return states.get("RUNNING", 0) if set(states) <= {"RUNNING"} else -1


def engines() -> dict[int, int]:
    """The engine processes of Ray's replicas, each with its replica's."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "outrider.engine.processes.process" in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):  # it has gone, or its replica has
                replica, raylet, *_ = process.parents()
                if "raylet" in raylet.name():
                    found[process.pid] = replica.pid
    return found


async def until(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > PATIENCE_S:
            raise TimeoutError(f"waited in vain: {serve.status()}")
        await asyncio.sleep(0.25)
    return round(time.monotonic() - start_s, 1)


def deploy(**arguments: Any) -> None:
    built = build(Arguments(num_cpus=0.5, **arguments))
    serve.run(built, blocking=False)


def fast_scaling(**arguments: Any) -> None:
    """As `build`, but scaling down within the test's time."""
    from outrider.server import ray as ours

    config = ours.AutoscalingConfig
    ours.AutoscalingConfig = lambda **given: config(  # type: ignore[misc,assignment]
        **(given | {"upscale_delay_s": 2, "downscale_delay_s": 5})
    )
    deploy(**arguments)


async def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=120) as http:
        models = (await http.get(f"{URL}/v1/models")).json()
        seen["model"] = models["data"][0]["id"]

        async with http.stream(
            "POST", f"{URL}/v1/completions", json=BODY | {"stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        seen["stream_ended"] = lines[-1]
        seen["stream_chunks"] = len(lines) - 1

        # Sessions: each conversation's second turn finds the first one's pages.
        hits = 0
        for i in range(6):
            prompt = f"Session {i}. " + "The quick brown fox jumps over the lazy dog. " * 8
            for turn in range(2):
                reply = await http.post(
                    f"{URL}/v1/completions",
                    json=BODY | {"prompt": prompt, "max_tokens": 1},
                    headers={"x-session-id": f"session-{i}"},
                )
                cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                hits += turn == 1 and cached > 32
        seen["sessions_that_hit"] = hits

        traffic = Traffic(http, 4)
        await asyncio.sleep(4)
        engine, replica = next(iter(engines().items()))
        psutil.Process(replica).kill()
        await until(lambda: engine not in engines())  # it does not outlive its replica
        seen["replaced_s"] = await until(lambda: len(engines()) == 2 and running() == 2)
        await asyncio.sleep(2)
        seen["killed"] = await traffic.stop()
        seen["texts"] = len(traffic.texts)

        # Another configuration replaces the replicas, one by one.
        traffic = Traffic(http, 1)
        await asyncio.to_thread(
            fast_scaling, min_replicas=1, max_replicas=2, target_ongoing_requests=2
        )
        await until(lambda: running() == 1 and len(engines()) == 1)
        seen["redeployed"] = await traffic.stop()

        traffic = Traffic(http, 6, max_tokens=32)
        seen["up_s"] = await until(lambda: running() == 2 and len(engines()) == 2)
        await asyncio.sleep(2)
        seen["scaled_up"] = await traffic.stop()
        traffic = Traffic(http, 1)
        seen["down_again_s"] = await until(lambda: running() == 1 and len(engines()) == 1)
        seen["scaled_down"] = await traffic.stop()
    return seen


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
try:
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    start_s = time.monotonic()
    deploy(min_replicas=2, max_replicas=2)
    up_s = round(time.monotonic() - start_s, 1)
    report = asyncio.run(main()) | {"up_s_first": up_s}
finally:
    serve.shutdown()
    ray.shutdown()
report["engines_left"] = len(engines())
print(json.dumps(report))
