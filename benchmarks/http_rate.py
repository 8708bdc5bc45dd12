"""Tokens a second that streaming clients see, by their number and k: the engine's, less HTTP.

    python benchmarks/http_rate.py [--clients 1 8 32 64] [--k 0 4 auto] [--tokens-a-step 2.7]
        [--at-k 3] -- ARGUMENTS OF SERVE

Every client streams one completion of random token ids, 128 in and 256 out, at temperature 1; with
`auto` the server chooses k. One rate is from when all have their first token to the last token, the
other from when they send. Every line takes eight streams at least, in turns if there are fewer
clients, and is measured twice: over prompts that are new, then over the same ones, which are
cached. Every k has the same seeds, for the number of steps until the last stream of 64 has ended
varies by 4% with them. With --tokens-a-step, for a head of random weights, steps give that many on
the average, whatever the models say, at each k or at that of --at-k: see set_acceptance.py.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from serving import Serving, serving

PROMPT_TOKENS, NEW_TOKENS = 128, 256
LEAST_STREAMS = 8  # how many drafts of one stream are accepted varies by 5%


async def stream(server: Serving, number: int, seed: int, k: int | None, vocab_size: int) -> float:
    """Read the stream of prompt `number` to its end; returns when the first token came."""
    prompt = random.Random(number).choices(range(2, vocab_size), k=PROMPT_TOKENS)
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
    try:
        await reader.readuntil(b"data: ")
    except asyncio.IncompleteReadError as error:
        raise RuntimeError(f"no stream, but {error.partial.decode()}") from error
    first_s = time.perf_counter()
    rest = await reader.read(-1)
    writer.close()
    if b"data: [DONE]" not in rest:
        raise RuntimeError(f"a stream broke off: {rest[-500:]!r}")
    return first_s


async def rate(
    server: Serving, prompts: range, clients: int, k: int | None, vocab_size: int
) -> tuple[float, float, float]:
    """Tokens a second, the same with prompts, and the longest wait for a first token in seconds."""
    decoding_s = whole_s = longest_s = 0.0
    for first in range(0, len(prompts), clients):
        start_s = time.perf_counter()
        turn = (
            stream(server, prompts[seed], seed, k, vocab_size)
            for seed in range(first, first + clients)
        )
        first_s = max(await asyncio.gather(*turn))
        end_s = time.perf_counter()
        decoding_s += end_s - first_s
        whole_s += end_s - start_s
        longest_s = max(longest_s, first_s - start_s)
    num_tokens = len(prompts) * NEW_TOKENS
    return (num_tokens - len(prompts)) / decoding_s, num_tokens / whole_s, longest_s


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--k", nargs="+", default=["0", "4", "auto"])
    parser.add_argument("--vocab-size", type=int, default=30_000, help="ids of prompts are below")
    parser.add_argument("--tokens-a-step", type=float, help="set acceptance; for random weights")
    parser.add_argument("--at-k", type=int, help="the k that --tokens-a-step is for; every k")
    args = parser.parse_args(sys.argv[1:at])
    log = Path(tempfile.mkdtemp(prefix="outrider-rate-")) / "serve.log"
    columns, prompts = "tokens/s, prompts too, first token after", range(0)
    arguments = sys.argv[at + 1 :]
    with serving(log, arguments, tokens_a_step=args.tokens_a_step, at_k=args.at_k) as server:
        if args.tokens_a_step is not None:
            print(f"SET ACCEPTANCE: {args.tokens_a_step:g} tokens a step, whatever the models say")
        print(f"k, clients: new: {columns}; cached: {columns}")
        for k in args.k:
            for clients in args.clients:
                num_streams = max(1, LEAST_STREAMS // clients) * clients
                prompts, cells = range(prompts.stop, prompts.stop + num_streams), []
                for _ in range(2):
                    own_k = None if k == "auto" else int(k)
                    decoding, whole, first_s = asyncio.run(
                        rate(server, prompts, clients, own_k, args.vocab_size)
                    )
                    cells.append(f"{decoding:7.0f} {whole:7.0f} {first_s:6.3f} s")
                print(f"{k:>4} {clients:3}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
