"""Tokens a second that streaming clients see, by their number and k: the engine's, less HTTP.

    python benchmarks/http_rate.py [--clients 1 8 32 64] [--k 0 4 auto] -- ARGUMENTS OF SERVE

Every client streams one completion of random token ids, 128 in and 256 out, at temperature 1; with
`auto` the server chooses k. One rate is from when all have their first token to the last token, the
other from when they send. Every line takes eight streams at least, in turns if there are fewer
clients, and is measured twice: over prompts that are new, then over the same ones, which are
cached.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from serving import Serving, serving

PROMPT_TOKENS, NEW_TOKENS = 128, 256
LEAST_STREAMS = 8  # how many drafts of one stream are accepted varies by 5%


async def stream(server: Serving, seed: int, k: int | None) -> float:
    """Read a stream to its end; returns when the first token came."""
    prompt = random.Random(seed).choices(range(2, 30_000), k=PROMPT_TOKENS)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "speculation": {"num_speculative_tokens": k, "verification": "token"},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    first_s = time.perf_counter()
    rest = await reader.read(-1)
    writer.close()
    if b"data: [DONE]" not in rest:
        raise RuntimeError(f"a stream broke off: {rest[-500:]!r}")
    return first_s


async def rate(
    server: Serving, seeds: range, clients: int, k: int | None
) -> tuple[float, float, float]:
    """Tokens a second, the same with prompts, and the longest wait for a first token in seconds."""
    decoding_s = whole_s = longest_s = 0.0
    for first in range(seeds.start, seeds.stop, clients):
        start_s = time.perf_counter()
        turn = (stream(server, seed, k) for seed in range(first, first + clients))
        first_s = max(await asyncio.gather(*turn))
        end_s = time.perf_counter()
        decoding_s += end_s - first_s
        whole_s += end_s - start_s
        longest_s = max(longest_s, first_s - start_s)
    num_tokens = len(seeds) * NEW_TOKENS
    return (num_tokens - len(seeds)) / decoding_s, num_tokens / whole_s, longest_s


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--k", nargs="+", default=["0", "4", "auto"])
    args = parser.parse_args(sys.argv[1:at])
    log = Path(tempfile.mkdtemp(prefix="outrider-rate-")) / "serve.log"
    columns = ["tokens/s", "prompts too", "first token after"]
    table = Table("k", "clients", *columns, *columns)
    seeds = range(0)
    with serving(log, sys.argv[at + 1 :]) as server:
        for k in args.k:
            for clients in args.clients:
                num_streams = max(1, LEAST_STREAMS // clients) * clients
                seeds, cells = range(seeds.stop, seeds.stop + num_streams), []
                for _ in range(2):
                    own_k = None if k == "auto" else int(k)
                    decoding, whole, first_s = asyncio.run(rate(server, seeds, clients, own_k))
                    cells += [f"{decoding:.0f}", f"{whole:.0f}", f"{first_s:.3f} s"]
                table.add_row(k, str(clients), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
