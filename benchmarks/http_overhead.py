"""What answering HTTP costs: CPU time a request and a token, whole and streamed.

    python benchmarks/http_overhead.py [--workers 1] [--requests 400] [--streams 64] [--tokens 128]
        [--ids 128]

Of these processes alone, so that other work on the machine counts little; the engine is another
process. A request's cost is that of answers of one token; a further token's that of long answers,
less their requests', at one token a step. With several workers, a row has them all together,
and one of the process that stands between them and the engine. With --ids, prompts are so many ids
of tokens, as in http_rate.py, in place of a short text.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table
from serving import Serving, serving

from outrider.server.config.pair_settings import DEFAULT_DRAFT

PROMPT = "Once upon a time there was a small server that"
CONCURRENCY = 32


def spent_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def answer_all(server: Serving, num_requests: int, body: dict[str, object]) -> None:
    """So many answers, a number of them at a time."""
    seats = asyncio.Semaphore(CONCURRENCY)
    url = f"http://{server.host}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:

        async def ask() -> None:
            async with seats:
                (await http.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(ask() for _ in range(num_requests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ids", type=int)
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="outrider-http-")) / "serve.log"
    settings = [f"target.model={DEFAULT_DRAFT}", "speculation.proposer=none"]
    settings.append(f"server.api_workers={args.workers}")
    table = Table("CPU time", "a request of one token", "each further token")
    with serving(log, [part for setting in settings for part in ("--set", setting)]) as server:
        groups = {"answering": server.workers or [server.http]}
        if server.workers:
            groups["between"] = [server.http]
        for stream in (False, True):
            prompt = PROMPT if args.ids is None else list(range(1000, 1000 + args.ids))
            short = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": stream}
            long = short | {"max_tokens": args.tokens, "ignore_eos": True}
            asyncio.run(answer_all(server, CONCURRENCY, long))  # warm
            marks = [[spent_s(group) for group in groups.values()]]
            for count, body in ((args.requests, short), (args.streams, long)):
                asyncio.run(answer_all(server, count, body))
                marks.append([spent_s(group) for group in groups.values()])
            for name, before_s, middle_s, after_s in zip(groups, *marks, strict=True):
                request_s = (middle_s - before_s) / args.requests
                token_s = (after_s - middle_s) / args.streams - request_s
                table.add_row(
                    f"{name}, {'streamed' if stream else 'whole'}",
                    f"{request_s * 1e6:.0f} µs",
                    f"{token_s / (args.tokens - 1) * 1e6:.0f} µs",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
