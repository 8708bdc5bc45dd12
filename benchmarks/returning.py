"""Agents that come back: how long a long prompt takes the first time, and once others have
needed its pages.

    python benchmarks/returning.py [--tokens-in 30000] [--turns 20] [--new-tokens 64]
        [--others 4] [-- ARGUMENTS OF SERVE]

Each turn sends the whole conversation again, with the last answer and a little more. Between two
turns others send prompts as long, which take its pages: give the server so few that they do
(`--num-pages`), and memory for them (`--host-gib`). Answers are greedy. The last turn is sent
twice, and must be answered alike.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from serving import Serving, serving
from streams import Streamed, stream

ADDED_TOKENS = 100  # by each turn, besides the answer


async def conversation(server: Serving, args: argparse.Namespace) -> tuple[list[Streamed], bool]:
    """The turns, and whether the last one is answered alike when it is sent again."""
    rng, ids = random.Random(0), range(100, args.vocab_size)
    prompt, turns = rng.choices(ids, k=args.tokens_in), list[Streamed]()

    async def others() -> None:
        for _ in range(args.others):
            await stream(server, rng.choices(ids, k=args.tokens_in), 1)

    await others()  # the first turn finds a warm server
    for _ in range(args.turns):
        answer = await stream(server, prompt, args.new_tokens, temperature=0)
        turns.append(answer)
        last = prompt
        prompt = [*prompt, *answer.token_ids, *rng.choices(ids, k=ADDED_TOKENS)]
        await others()
    again = await stream(server, last, args.new_tokens, temperature=0)
    return turns, again.token_ids == turns[-1].token_ids


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens-in", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--others", type=int, default=4, help="prompts between two turns")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="ids of prompts are below")
    args = parser.parse_args(sys.argv[1:at])
    log = Path(tempfile.mkdtemp(prefix="outrider-returning-")) / "serve.log"
    with serving(log, sys.argv[at + 1 :]) as server:
        turns, is_alike = asyncio.run(conversation(server, args))
        loaded = server.metric("outrider_host_loaded_tokens_total")
    first, later = turns[0].first_token_s, [turn.first_token_s for turn in turns[1:]]
    table = Table("", "", title=f"{args.tokens_in} tokens, {args.turns} turns")
    table.add_row("first turn: time to the first token", f"{first:.3f} s")
    table.add_row("later turns, median", f"{statistics.median(later):.3f} s")
    table.add_row("later turns, of the first", f"{statistics.median(later) / first:.1%}")
    table.add_row("cached tokens of the last turn", f"{turns[-1].num_cached_tokens}")
    table.add_row("tokens that came back from host memory", f"{loaded:.0f}")
    table.add_row("the last turn, sent again, was answered", "alike" if is_alike else "otherwise")
    Console().print(table)
    return 0 if is_alike else 1


if __name__ == "__main__":
    sys.exit(main())
