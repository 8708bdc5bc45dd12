"""Runs held-out prompts one at a time, with each number of drafts in turn, and counts.

One engine serves all requests. Since a request may name its own k, plain decoding and every k run
the same prompt within seconds of each other, under the same conditions. The engine has a process of
its own, as in the server, and its tokens are received here: on few cores, an engine without another
process beside it would be faster than it ever is for clients.
"""

import itertools
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from outrider.engine.api import EngineStats, NewRequest, SamplingParams
from outrider.engine.processes.client import EngineClient

PLAIN = 0
OWN_CHOICE = None  # the engine chooses k for every step
SHORT = ("chat", "code", "summarising", "json")  # the categories whose prompts are one question
RAW = "raw"  # the category of text that the target goes on with, without its chat template
# In the order in which their categories are measured and printed.
_FILES = (
    "prompts.toml", "prompts_raw.toml", "prompts_editing.toml", "prompts_document.toml",
    "prompts_agent.toml",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """The totals of all requests of one category, temperature and k."""

    num_tokens: int = 0
    num_steps: int = 0  # of the target
    seconds: float = 0.0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.num_tokens += other.num_tokens
        self.num_steps += other.num_steps
        self.seconds += other.seconds
        for mine, theirs in (
            (self.drafted_per_position, other.drafted_per_position),
            (self.accepted_per_position, other.accepted_per_position),
        ):
            mine[:] = [a + b for a, b in itertools.zip_longest(mine, theirs, fillvalue=0)]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def acceptance(self) -> float | None:
        """The share of drafts that were accepted; None if nothing was drafted."""
        drafted = sum(self.drafted_per_position)
        return sum(self.accepted_per_position) / drafted if drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position, the share of its drafts that were accepted with all before them."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs if drafted]


# (category, temperature, k) -> totals
Tallies = dict[tuple[str, float, int | None], Tally]


def held_out_prompts() -> dict[str, list[list[str]]]:
    """Prompts by category. Each is a conversation: turns of user and model, the user's first."""
    folder = resources.files("outrider.server.evaluation")
    given: dict[str, list[str | list[str]]] = {}
    for name in _FILES:
        given |= tomllib.loads(folder.joinpath(name).read_text())
    return {
        category: [[prompt] if isinstance(prompt, str) else prompt for prompt in of_category]
        for category, of_category in given.items()
    }


def as_messages(turns: list[str]) -> list[dict[str, Any]]:
    """A conversation as chat templates take it."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


def that_fit(prompts: dict[str, list[list[int]]], max_model_len: int) -> dict[str, list[list[int]]]:
    """The prompts behind which the context has room. Raises ValueError if there are none."""
    fit = {
        category: of_category_that_fit
        for category, of_category in prompts.items()
        if (of_category_that_fit := [ids for ids in of_category if len(ids) < max_model_len])
    }
    if not fit:
        raise ValueError(f"no prompt fits into a context of {max_model_len} tokens")
    return fit


async def measure(
    engine: EngineClient,
    prompts: dict[str, list[list[int]]],
    temperatures: list[float],
    ks: list[int | None],
    max_tokens: int,
    report: Callable[[int, int], None],
) -> Tallies:
    """Every prompt at every temperature with every k, one at a time.

    `prompts` are token ids by category. The first request of each k is repeated, as a warm-up.
    """
    tallies: Tallies = {}
    runs = [
        (category, temperature, seed, ids)
        for temperature in temperatures
        for category, of_category in prompts.items()
        for seed, ids in enumerate(of_category)
    ]
    for k in ks:
        await run(engine, runs[0][3], _params(k, temperatures[0], 0, max_tokens))
    for done, (category, temperature, seed, ids) in enumerate(runs):
        report(done, len(runs))
        # Rotate the order, so that a favourable place in it favours every k equally.
        for k in ks[done % len(ks) :] + ks[: done % len(ks)]:
            tally = await run(engine, ids, _params(k, temperature, seed, max_tokens))
            tallies.setdefault((category, temperature, k), Tally()).add(tally)
    report(len(runs), len(runs))
    return tallies


def _params(k: int | None, temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, num_speculative_tokens=k
    )


async def run(engine: EngineClient, prompt: list[int], params: SamplingParams) -> Tally:
    """One request, alone in the engine, from submission to its last token.

    Raises ValueError if the engine gives up on it, and what EngineClient.generate raises.
    """
    before = engine.stats
    num_tokens = 0
    start_s = time.perf_counter()
    request = NewRequest(request_id="evaluation", prompt_token_ids=prompt, params=params)
    async for output in await engine.generate([request]):
        if output.error is not None:
            raise ValueError(f"the engine gave up on a prompt: {output.error}")
        num_tokens += len(output.token_ids)
    seconds = time.perf_counter() - start_s
    after = engine.stats
    return Tally(
        num_tokens,
        after.steps - before.steps,
        seconds,
        _gained(before, after, "drafted_per_position"),
        _gained(before, after, "accepted_per_position"),
    )


def _gained(before: EngineStats, after: EngineStats, name: str) -> list[int]:
    then: list[int] = getattr(before, name)  # empty before the first step
    now: list[int] = getattr(after, name)
    return [b - a for a, b in itertools.zip_longest(then, now, fillvalue=0)]
