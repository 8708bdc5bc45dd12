"""What the HTTP process costs: its own CPU time a request and a token, whole and streamed.

    python benchmarks/http_overhead.py [--requests 400] [--streams 64] [--tokens 128]

That process's time alone, so that other work on the machine counts little; the engine is another
process. A request's cost is that of answers of one token; a further token's that of long answers,
less their requests', at one token a step.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from serving import Serving, serving

from outrider.server.settings import DEFAULT_DRAFT

PROMPT = "Once upon a time there was a small server that"
CONCURRENCY = 32


async def cpu_s(server: Serving, num_requests: int, body: dict[str, object]) -> float:
    """CPU seconds of the HTTP process for so many answers, a number of them at a time."""
    seats = asyncio.Semaphore(CONCURRENCY)
    url = f"http://{server.host}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:

        async def ask() -> None:
            async with seats:
                (await http.post("/v1/completions", json=body)).raise_for_status()

        before_s = sum(server.http.cpu_times()[:2])
        await asyncio.gather(*(ask() for _ in range(num_requests)))
        return sum(server.http.cpu_times()[:2]) - before_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="outrider-http-")) / "serve.log"
    settings = [f"target.model={DEFAULT_DRAFT}", "speculation.proposer=none"]
    request, token = ["a request of one token"], ["each further token"]
    with serving(log, [part for setting in settings for part in ("--set", setting)]) as server:
        for stream in (False, True):
            short = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": stream}
            long = short | {"max_tokens": args.tokens, "ignore_eos": True}
            asyncio.run(cpu_s(server, CONCURRENCY, long))  # warm
            request_s = asyncio.run(cpu_s(server, args.requests, short)) / args.requests
            rest_s = asyncio.run(cpu_s(server, args.streams, long)) - args.streams * request_s
            request.append(f"{request_s * 1e6:.0f} µs")
            token.append(f"{rest_s / args.streams / (args.tokens - 1) * 1e6:.0f} µs")
    table = Table("CPU time of the HTTP process", "whole", "streamed")
    table.add_row(*request)
    table.add_row(*token)
    Console().print(table)


if __name__ == "__main__":
    main()
