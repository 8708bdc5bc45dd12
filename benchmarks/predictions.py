"""Right predictions, lookups and a penalty beside plain decoding, over HTTP.

    python benchmarks/predictions.py [--clients 1 8 32 64] [--rounds 2] [-- ARGUMENTS OF SERVE]

Each client sends one prompt of random token ids, all at once: plain, without drafts; with what the
server chooses by itself; with lookups alone, at temperature 1, where hardly anything repeats, and
at 0. Predicted, at 0: every request predicts the answer that plain decoding gave. A penalty, at 1:
one client of all asks for one, and the server chooses. Tokens a second, the best of the rounds;
prompts are cached, by a round in front that is not timed.
For models of random weights: see published_shapes.py --served.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from serving import Serving, serving
from streams import Streamed, stream

PLAIN: dict[str, object] = {"speculation": {"enabled": False}}
LOOKUPS: dict[str, object] = {"speculation": {"sources": ["suffix"]}}
PENALTY: dict[str, object] = {"frequency_penalty": 0.1}


async def ask_all(
    server: Serving,
    fields: Sequence[dict[str, object]],
    args: argparse.Namespace,
    temperature: float,
) -> tuple[float, list[Streamed]]:
    """Tokens a second, and the answers, of a client for each of these."""
    ids = range(200, args.vocab_size)
    prompts = [random.Random(i).choices(ids, k=args.tokens_in) for i in range(len(fields))]
    start_s = time.perf_counter()
    answers = await asyncio.gather(
        *(
            stream(server, prompt, args.tokens_out, seed=i, temperature=temperature, **more)
            for i, (prompt, more) in enumerate(zip(prompts, fields, strict=True))
        )
    )
    elapsed_s = time.perf_counter() - start_s
    return sum(len(answer.token_ids) for answer in answers) / elapsed_s, answers


async def best(
    server: Serving,
    fields: Sequence[dict[str, object]],
    args: argparse.Namespace,
    temperature: float,
) -> tuple[float, list[Streamed]]:
    """Of the rounds."""
    rounds = [await ask_all(server, fields, args, temperature) for _ in range(args.rounds)]
    return max(rounds, key=lambda one: one[0])


async def measure(server: Serving, args: argparse.Namespace) -> Table:
    table = Table(title="tokens a second (over plain)")
    names = ("chosen", "lookups", "predicted", "penalty")
    for head in ("clients", "temperature", "plain", *names):
        table.add_column(head)
    for num in args.clients:
        for temperature in (0.0, 1.0):
            # So that nothing is for the first time.
            await ask_all(server, [{}] * num, args, temperature)
            plain, answers = await best(server, [PLAIN] * num, args, temperature)
            asked = {"chosen": [{}] * num, "lookups": [LOOKUPS] * num}
            if temperature:
                asked["penalty"] = [PENALTY, *[{}] * (num - 1)]
            else:
                asked["predicted"] = list(map(predicting, answers))
            cells = {}
            for name, fields in asked.items():
                rate, _ = await best(server, fields, args, temperature)
                cells[name] = f"{rate:.0f} ({rate / plain:.2f})"
            print(f"{num} clients at {temperature:g}: plain {plain:.0f}, {cells}", flush=True)
            table.add_row(
                f"{num}", f"{temperature:g}", f"{plain:.0f}", *(cells.get(n, "") for n in names)
            )
    return table


def predicting(answer: Streamed) -> dict[str, object]:
    return {"prediction": {"type": "content", "content": answer.text}}


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=100_000, help="ids of prompts are below")
    args = parser.parse_args(sys.argv[1:at])
    log = Path(tempfile.mkdtemp(prefix="outrider-predictions-")) / "serve.log"
    with serving(log, sys.argv[at + 1 :]) as server:
        Console().print(asyncio.run(measure(server, args)))


if __name__ == "__main__":
    main()
