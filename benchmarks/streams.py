"""A streaming client that knows when each token came, for benchmarks over HTTP."""

import asyncio
import json
import time
from dataclasses import dataclass
from itertools import pairwise

from serving import Serving


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer, and when it came."""

    token_ids: list[int]
    text: str
    num_cached_tokens: int
    first_token_s: float  # from when it was asked for
    gap_s: list[float]  # between events, each of which brings the tokens of a step


async def stream(
    server: Serving,
    prompt: list[int],
    num_tokens: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    **more: object,
) -> Streamed:
    """Read the answer to a prompt of token ids, of exactly so many tokens, to its end.

    `more`: further fields of the request.
    """
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,  # so that no event waits for a whole character
        "seed": seed,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**24)
    start_s, at_s = time.perf_counter(), list[float]()
    token_ids, text, num_cached, is_whole = list[int](), "", 0, False
    refusal = b""
    writer.write(head.encode() + content)
    while not is_whole and (line := await reader.readline()):
        if not line.startswith(b"data: "):
            refusal = line if line.startswith(b"{") else refusal
            continue
        is_whole = line.startswith(b"data: [DONE]")
        event = {} if is_whole else json.loads(line[len(b"data: ") :])
        for choice in event.get("choices", ()):
            text += choice.get("text") or ""
            if ids := choice.get("token_ids"):
                token_ids += ids
                at_s.append(time.perf_counter())
        if usage := event.get("usage"):
            num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    writer.close()
    if not is_whole or not at_s:
        raise RuntimeError(f"no whole answer; see {server.log}: {refusal.decode()}")
    gap_s = [after - before for before, after in pairwise(at_s)]
    return Streamed(token_ids, text, num_cached, at_s[0] - start_s, gap_s)
