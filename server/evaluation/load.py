"""Loads a running server, alternately with and without drafts, and measures as a client."""

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from .measure import SHORT, as_messages, held_out_prompts
from .remote import TIMEOUT, Remote, RemoteError, chunk_of, has_tokens, refusal, unreachable

SPECULATION_OFF: dict[str, Any] = {"enabled": False}
METRICS_ON: dict[str, Any] = {"metrics": True}


@dataclass(slots=True)
class LoadResult:
    """The result for one number of concurrent requests, over all rounds."""

    seconds: float = 0.0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)  # of each request
    token_s: list[float] = field(default_factory=list)  # of each request: mean over later tokens
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def acceptance(self) -> float | None:
        """The share of drafts that were accepted; None if there were none."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None


def percentile(values: list[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed; NaN without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


async def measure_load(
    remote: Remote,
    *,
    concurrency: int,
    rounds: int,
    requests_per_round: int,
    max_tokens: int,
    temperature: float,
    k: int | None,
    counted: Callable[[int, int], None],
) -> tuple[LoadResult, LoadResult]:
    """Measure without and with drafts, in alternating rounds, so that both run in the same minutes.
    The first round of each is not counted: in it the server learns what a step costs.

    `counted` is called with (requests done, requests in all). Raises RemoteError.
    """
    by_category = held_out_prompts()
    short = (by_category[category] for category in SHORT)
    prompts = [turns for in_turn in zip(*short, strict=False) for turns in in_turn]
    plain, drafted = LoadResult(), LoadResult()
    with_drafts = METRICS_ON if k is None else METRICS_ON | {"num_speculative_tokens": k}
    limits = httpx.Limits(max_connections=concurrency)
    total, done = 2 * (rounds + 1) * requests_per_round, 0
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, headers=remote.headers) as client:
        for number in range(rounds + 1):
            for load, speculation in ((plain, SPECULATION_OFF), (drafted, with_drafts)):
                todo = iter(range(requests_per_round))
                into = load if number else LoadResult()

                async def work() -> None:
                    nonlocal done
                    for i in todo:  # noqa: B023  (awaited within this turn of the loop)
                        body = remote.body(
                            as_messages(prompts[i % len(prompts)]),
                            temperature=temperature,  # no seed: it would ask for `match`
                            max_completion_tokens=max_tokens,
                            ignore_eos=True,
                            cache_salt=uuid.uuid4().hex,  # so that no prompt is in the cache
                            stream_options={"include_usage": True},
                            speculation=speculation,  # noqa: B023
                        )
                        await _ask(client, remote, body, into)  # noqa: B023
                        done += 1
                        counted(done, total)

                started_s = time.perf_counter()
                await asyncio.gather(*(work() for _ in range(concurrency)))
                into.seconds += time.perf_counter() - started_s
    return plain, drafted


async def _ask(
    client: httpx.AsyncClient, remote: Remote, body: dict[str, Any], load: LoadResult
) -> None:
    started_s, first_s, last_s = time.perf_counter(), 0.0, 0.0
    num_tokens = 0
    try:
        async with client.stream("POST", remote.chat_url, json=body) as response:
            if response.is_error:
                await response.aread()
                raise refusal(remote.url, response)
            async for line in response.aiter_lines():
                if (chunk := chunk_of(line)) is None:
                    continue
                if any(map(has_tokens, chunk["choices"])):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                if usage := chunk.get("usage"):
                    num_tokens = usage["completion_tokens"]
                if drafts := (chunk.get("metrics") or {}).get("speculative_decoding"):
                    load.num_drafts += drafts["num_draft_tokens"]
                    load.num_accepted += drafts["num_accepted_draft_tokens"]
    except httpx.HTTPError as error:
        raise unreachable(remote.url, error) from None
    if not num_tokens:
        raise RemoteError(f"{remote.url} does not report how many tokens its answers have (usage)")
    load.num_tokens += num_tokens
    load.first_token_s.append(first_s - started_s)
    if num_tokens > 1:
        load.token_s.append((last_s - first_s) / (num_tokens - 1))
