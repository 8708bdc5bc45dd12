"""Time to the first token, and gaps between tokens, while requests arrive at random.

    python benchmarks/poisson.py [--tokens-in 8192] [--tokens-out 512] [--load 0.5 0.8 0.95]
        [--requests 64] [--at-once 32] [--tokens-a-step 2.7] [-- ARGUMENTS OF SERVE]

First the capacity is measured: requests a second when `--at-once` clients send one after the other.
Then requests arrive as a Poisson process at each share of it. Prompts are random token ids, so that
none is cached. A gap is the time between two events of a stream, which brings the tokens of a step.
Without a load (`--load`, and nothing behind it) only the capacity is measured. With
--tokens-a-step, for a head of random weights, steps give that many on the average, whatever the
models say, at each k or at that of --at-k: see set_acceptance.py.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from serving import Serving, serving
from streams import stream

WARM_UP = 2  # requests before anything is measured


@dataclass(frozen=True, slots=True)
class Shape:
    tokens_in: int
    tokens_out: int
    vocab_size: int


@dataclass(slots=True)
class Seen:
    """What the clients of one load saw."""

    first_token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0


async def ask(server: Serving, seed: int, shape: Shape, seen: Seen) -> None:
    ids = range(min(100, shape.vocab_size - 1), shape.vocab_size)
    prompt = random.Random(seed).choices(ids, k=shape.tokens_in)
    answer = await stream(server, prompt, shape.tokens_out, seed=seed)
    seen.first_token_s.append(answer.first_token_s)
    seen.gap_s += answer.gap_s
    seen.num_tokens += len(answer.token_ids)


async def capacity(server: Serving, shape: Shape, num_requests: int, at_once: int) -> float:
    """Requests a second of clients that send one after the other."""
    seeds = iter(range(1_000_000, 1_000_000 + num_requests))

    async def client() -> None:
        for seed in seeds:
            await ask(server, seed, shape, Seen())

    start_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(min(at_once, num_requests))))
    return num_requests / (time.perf_counter() - start_s)


async def arriving(server: Serving, shape: Shape, num_requests: int, rate: float) -> Seen:
    """Requests that arrive at random, so many a second on the average."""
    rng, seen, streams = random.Random(f"{rate}"), Seen(), []
    start_s = time.perf_counter()
    for _ in range(num_requests):
        streams.append(asyncio.create_task(ask(server, rng.randrange(2**31), shape, seen)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*streams)
    seen.elapsed_s = time.perf_counter() - start_s
    return seen


async def measure(server: Serving, shape: Shape, args: argparse.Namespace) -> Table:
    for seed in range(WARM_UP):
        await ask(server, seed, shape, Seen())
    most = await capacity(server, shape, args.requests, args.at_once)
    table = Table(
        "load",
        "requests/s",
        "tokens/s",
        "first token: p50 / p95 / p99, s",
        "gaps: p50 / p95 / p99 / longest, ms",
        title=f"{shape.tokens_in} tokens in, {shape.tokens_out} out; at most {most:.3f} requests"
        f" and {most * shape.tokens_out:.0f} tokens a second",
    )
    for load in args.load:
        seen = await arriving(server, shape, args.requests, load * most)
        firsts = np.percentile(seen.first_token_s, [50, 95, 99])
        gaps = 1e3 * np.percentile(seen.gap_s or [0.0], [50, 95, 99, 100])
        table.add_row(
            f"{load:.0%}",
            f"{load * most:.3f}",
            f"{seen.num_tokens / seen.elapsed_s:.1f}",
            " / ".join(f"{each:.2f}" for each in firsts),
            " / ".join(f"{each:.1f}" for each in gaps),
        )
    return table


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens-in", type=int, default=8192)
    parser.add_argument("--tokens-out", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=30_000, help="ids of prompts are below")
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8, 0.95])
    parser.add_argument("--requests", type=int, default=64, help="of the capacity and each load")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens-a-step", type=float, help="set acceptance; for random weights")
    parser.add_argument("--at-k", type=int, help="the k that --tokens-a-step is for; every k")
    args = parser.parse_args(sys.argv[1:at])
    shape = Shape(args.tokens_in, args.tokens_out, args.vocab_size)
    log = Path(tempfile.mkdtemp(prefix="outrider-poisson-")) / "serve.log"
    arguments = sys.argv[at + 1 :]
    with serving(log, arguments, tokens_a_step=args.tokens_a_step, at_k=args.at_k) as server:
        if args.tokens_a_step is not None:
            print(f"SET ACCEPTANCE: {args.tokens_a_step:g} tokens a step, whatever the models say")
        Console().print(asyncio.run(measure(server, shape, args)))


if __name__ == "__main__":
    main()
